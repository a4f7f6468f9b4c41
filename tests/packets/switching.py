"""Clients that send requests and keep connections open while the program is switched to another binding or backend."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from tests.support import cluster, golden_state, lab
from tests.support.cluster import Cluster

HELD = (("client", "balancer 1"), ("p2", "cluster 1"), ("host", "cluster 1"))
"""Pairs of a client and an address. The client keeps TCP connections to the address open, one for each IP family."""
Client = tuple[str, str, str, Family]
"""A client that sends requests, with its protocol, address and family."""


def clients(*pairs: tuple[str, str]) -> list[Client]:
    """Four clients for each pair of a client and an address: with TCP and UDP, each over IPv4 and IPv6."""
    return [(from_, protocol, to, family) for from_, to in pairs for protocol in ("TCP", "UDP") for family in Family]


def configure(path: Path, **ours: object) -> None:
    """Replace a configuration file.

    ``ours`` has the fields of the file's section ``ipvsproxy``. The new file sets ``trafficScopes`` to "api", unless ``ours`` has
    another value.
    """
    document = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "ipvs",
        "clusterCIDR": "10.244.0.0/16,fd00:10:244::/56",
        "ipvs": {"minSyncPeriod": "0s"},
        "ipvsproxy": {"trafficScopes": "api", **cluster.IN_FILE, **ours},
    }
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document))
    draft.rename(path)


def holds(laboratory: lab.Lab, backend: Backend, variant: str = "") -> bool:
    """Whether this backend has our rules and sets, and the other backend has none of our objects.

    ``variant`` is the suffix in the names of the iptables programs that list the rules, such as "-legacy".
    """
    chains = "".join(laboratory.run("node", f"{program}{variant}-save") for program in ("iptables", "ip6tables"))
    sets = laboratory.run("node", "ipset", "list", "-name")
    in_iptables = (":KUBE-SERVICES" in chains, "KUBE-CLUSTER-IP" in sets)
    wanted = backend is Backend.IPTABLES
    return in_iptables == (wanted, wanted) and nft_tables.has_own_table() is not wanted


def iptables_is_empty() -> bool:
    """Whether no chain in iptables and no set in ipset belongs to kube-proxy or to us."""
    return not any(golden_state.read_state(("ipsets", "iptables")).values())


REFUSED_WITHIN_S = 0.25
"""The time, in seconds, for which a client waits for an answer that the client must not receive. The time is short, so that the
client sends many requests."""


@contextlib.contextmanager
def refusing_always(running: Cluster, clients: Sequence[tuple[str, str, int, Family]]) -> Iterator[None]:
    """Fail at the end of the block if any of these clients has received an answer.

    Each client is a tuple: the name of the client's address, the name of the server's address, the TCP port, and the IP family.
    """
    load = []
    with contextlib.ExitStack() as loads:
        for name, to, port, family in clients:
            target, source = cluster.address(to, family), cluster.address(name, family)
            sending = running.lab.load("client", "TCP", target, port, src=source, interval_s=0.02, timeout_s=REFUSED_WITHIN_S)
            load.append(loads.enter_context(sending))
        yield
    answered = {client: one.outcomes for client, (one,) in zip(clients, load, strict=True) if "ok" in one.outcomes}
    assert answered == {}
    assert all(sum(one.outcomes.values()) >= 10 for (one,) in load), [one.outcomes for (one,) in load]


@contextlib.contextmanager
def losing_nothing(running: Cluster, clients: Sequence[Client]) -> Iterator[Callable[[], None]]:
    """Fail at the end of the block if a request of these clients has failed.

    The ``with`` block gets a function that checks the connections that the clients keep open, and fails if one of them is lost.
    """
    held = [running.lab.open(from_, "TCP", cluster.address(to, family), 80) for from_, to in HELD for family in Family]

    def check_held() -> None:
        assert [one.ask() for one in held] == [one.backend for one in held]

    with contextlib.ExitStack() as loads:
        load = [
            loads.enter_context(
                running.lab.load(from_, protocol, cluster.address(to, family), cluster.PORTS[protocol][0], interval_s=0.2)
            )
            for from_, protocol, to, family in clients
        ]
        yield check_held
    assert {client: one.failures for client, (one,) in zip(clients, load, strict=True) if one.failed} == {}
    assert all(one.outcomes["ok"] >= 3 for (one,) in load), [one.outcomes for (one,) in load]
    for one in held:
        one.abort()
