"""The source address that backends see for cluster IPs, with ``--masquerade-all`` and each method to detect local pods.

``test_services.py`` covers all other kinds of address for each binding, but with only one of these methods. Each method is tested
with only one value of ``--ipvs-vip-binding``. The two values alternate from one method to the next.
"""

import itertools
from collections.abc import Mapping

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import Binding
from tests.support import cluster, lab, patience
from tests.support.cluster import Cluster, service

pytestmark = [pytest.mark.kernel]

ATTEMPTS = 4
POD_NETWORKS = ["10.244.0.0/24", "fd00:10:244::/64"]
"""The pod ranges of this node. The flags in ``cluster`` contain the pod ranges of the whole cluster."""
SERVICES = [*service("both", 1, "p1", "r1", protocols=["TCP"]), *service("here", 2, "p1", protocols=["TCP"])]
NODE = cluster.node() | {"spec": {"podCIDR": POD_NETWORKS[0], "podCIDRs": POD_NETWORKS}}

NO_NETWORKS = "node's networks, of which there are none yet"
HIDDEN, SHOWN = "bridge node", ""
"""The source address that a backend sees. ``HIDDEN`` stands for the node's address in the backend's network, if the client is
masqueraded. ``SHOWN`` stands for the client's own address."""
SENDERS: Mapping[str, tuple[str, str]] = {
    "p2": ("p2", "cluster 1"),
    "host": ("host", "cluster 1"),
    "client": ("client", "cluster 1"),
    # These clients use a Service that has only a local endpoint: the answer of a remote endpoint might bypass this node, with the
    # wrong source address.
    "r2": ("remote", "cluster 2"),
    "client to here": ("client", "cluster 2"),
}
"""For each sender: the namespace or pod from which it sends, and the address to which it sends. ``r2`` is a pod on the other
node."""
MODES: Mapping[str, tuple[list[str], Mapping[str, str]]] = {
    "everything": (["--masquerade-all"], {"p2": HIDDEN, "host": HIDDEN, "client": HIDDEN, "r2": HIDDEN}),
    "cluster's networks": ([], {"p2": SHOWN, "host": HIDDEN, "client": HIDDEN, "r2": SHOWN}),
    "node's networks": (["--detect-local-mode=NodeCIDR"], {"p2": SHOWN, "host": HIDDEN, "client": HIDDEN, "r2": HIDDEN}),
    "a bridge": (
        ["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cni0"],
        {"p2": SHOWN, "host": HIDDEN, "client": HIDDEN, "r2": HIDDEN},
    ),
    "names of interfaces": (
        ["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=cn"],
        {"p2": SHOWN, "host": HIDDEN, "client": HIDDEN, "r2": HIDDEN},
    ),
    "another bridge": (
        ["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=eth0"],
        {"p2": HIDDEN, "host": HIDDEN, "client to here": SHOWN, "r2": SHOWN},
    ),
    NO_NETWORKS: (["--detect-local-mode=NodeCIDR"], {"p2": SHOWN, "host": HIDDEN, "client to here": SHOWN, "r2": SHOWN}),
}
ALIKE = ("cluster's networks", "another bridge", NO_NETWORKS)
"""Modes that run only in a thorough test. ``test_services.py`` also runs in the first of these modes. The rules of the other two
modes differ only in names and networks from the rules of modes that every run tests."""


@pytest.fixture(scope="module", name="running")
def _running(laboratory: lab.Lab, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A cluster without a running program. Each test starts the program with its own flags."""
    cluster.clear()
    return Cluster(laboratory, tmp_path_factory.mktemp("masquerade"))


@pytest.mark.parametrize(
    ("mode", "binding"),
    [
        pytest.param(mode, binding, marks=[patience.THOROUGH] * (mode in ALIKE), id=mode)
        for mode, binding in zip(MODES, itertools.cycle(Binding), strict=False)
    ],
)
def test_the_masquerade_mode_determines_whether_backends_see_the_address_of_the_node_or_of_the_sender(
    running: Cluster, mode: str, binding: Binding
) -> None:
    flags, expected = MODES[mode]
    running.objects = [cluster.node() if mode == NO_NETWORKS else NODE, *SERVICES]
    running.start(*flags, f"--ipvs-vip-binding={binding}")
    try:
        questions = [(sender, family) for sender in expected for family in Family]
        for sender, family in questions:
            from_, to = SENDERS[sender]
            own = "" if sender == "host" else cluster.address("client" if from_ == "client" else sender, family)
            result = running.lab.probe(
                from_, "TCP", cluster.address(to, family), 80, src=own or None, count=ATTEMPTS, timeout_s=4.0
            )
            names = expected[sender] if expected[sender] == SHOWN or to == "cluster 1" else "bridge"
            sources = tuple(sorted(cluster.address(one, family) for one in names.split())) or (own,)
            assert (result.outcome, result.sources) == ("ok", sources), f"{sender} {family.label}"
            assert len(result.backends) == (2 if to == "cluster 1" else 1), f"{sender} {family.label}"
    finally:
        running.program.kill()
