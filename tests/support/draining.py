"""Lets a reconciler observe real servers that drain."""

from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.state import Observation
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, VirtualServerKey
from ipvsproxy.reconcile.reconciler import Reconciler


def show_draining(reconciler: Reconciler, key: VirtualServerKey, *real_servers: RealServerKey, now: float = 0) -> None:
    """Let the reconciler observe a desired virtual server with exactly these real servers at weight 0."""
    settings = reconciler.survey.virtual_servers[key].settings
    observed = ObservedVirtualServer(settings, dict.fromkeys(real_servers, 0))
    at_once(reconciler.observer.observing(Observation(some_virtual_servers={key: observed}), now))
