"""What keeps Services from being reached on this node, though each is served as it should be: checks of ``ipvsproxy doctor``."""

from collections.abc import Collection, Iterator

from ipvsproxy.commands.finding import Finding, ok, warn
from ipvsproxy.model.service import Service
from ipvsproxy.translate.settings import LocalMode, Settings


def judge(services: Collection[Service], settings: Settings) -> Iterator[Finding]:
    """All findings about Services."""
    yield from _cluster_ranges(services, settings)


def _cluster_ranges(services: Collection[Service], settings: Settings) -> Iterator[Finding]:
    """Whether cluster IPs lie in the range of the pods, from which packets are not masqueraded.

    This host sends to a cluster IP with that cluster IP as its source, so it would count as a pod (kubernetes#65158).
    """
    if settings.detect_local is not LocalMode.CLUSTER_CIDR or settings.masquerade_all or not services:
        return
    is_fine = True
    for network in settings.cluster_networks:
        inside = [(one, service.name) for service in services for one in service.cluster_addresses if network.contains(one)]
        if inside:
            is_fine = False
            address, name = min(inside)
            yield warn(
                "cluster-cidr",
                f"{len(inside)} cluster IPs lie in {network} of --cluster-cidr, such as {address} of {name}: this host, and pods "
                "in its network, have a cluster IP as their source there, so they are not masqueraded, and get no answer from "
                "endpoints of other nodes",
                "name the range of the pods alone in --cluster-cidr (clusterCIDR), or set --masquerade-all",
            )
    if is_fine and settings.cluster_networks:
        yield ok("cluster-cidr", "no cluster IP lies in --cluster-cidr")
