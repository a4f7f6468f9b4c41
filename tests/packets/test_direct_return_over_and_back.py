"""A node takes over from kube-proxy with direct return turned on, and goes back to kube-proxy, under load.

kube-proxy does not run; as in ``test_over_and_back.py``, the test writes kube-proxy's recorded state to the kernel. The other
node of the cluster always has direct return.
"""

import contextlib
import copy
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES
from tests.chaos import take_overs
from tests.packets import three_nodes
from tests.packets.switching import iptables_is_empty
from tests.support import cluster, forked, golden_fixtures, golden_state, in_namespace, lab, patience, program

pytestmark = [pytest.mark.kernel]

RECORDED: Mapping[str, Any] = golden_fixtures.recording("default", "P0")
DIRECT = ("192.0.2.8", 8008)
"""An external address and port of the Service ``s08/web``, which has direct return and an endpoint on each node.

The recorded kube-proxy had only an IPv4 range in ``--cluster-cidr``, so IPv6 Services have no direct return.
"""
CLIENT = cluster.address("client", Family.IPV4)
HELD = (("p1", "TCP", "10.96.16.1", 80), ("host", "TCP", "fd00:10:96::b01", 80), ("client", "TCP", "198.51.100.6", 80))
"""Connections to Services other than the Service of ``DIRECT``. Each entry has the client, protocol, address and port. These
connections must stay open."""
FORMER = {
    "net/ipv4/conf/all/rp_filter": "2",
    "net/ipv4/conf/tunl0/rp_filter": "1",
    "net/ipv4/vs/sloppy_tcp": "0",
    "net/ipv4/vs/sloppy_sctp": "0",
}
CHANGED = {path: "1" if "sloppy" in path else "0" for path in FORMER}
LEFT = ("iptables v4/nat/KUBE-SERVICES", "-A KUBE-SERVICES -m mark ! --mark 0x0/0x3fff -j ACCEPT", "extra")
"""The rule that ``cleanup --only=own`` leaves, in a chain that kube-proxy rewrites. After the cleanup, the rule matches no
packet, because no packet has one of these bits in its mark."""
WITHIN_S = patience.seconds(600.0)


@pytest.mark.parametrize("way", ["cleanup", pytest.param("off", marks=patience.THOROUGH)])
def test_direct_return_leaves_nothing_on_a_node_that_goes_back_to_kube_proxy(tmp_path: Path, way: str) -> None:
    """The node returns to kube-proxy after ``cleanup --only=own`` or after a start with direct return off.

    Connections to other Services must continue. With rules in nftables, kube-proxy starts and writes its own rules before
    ``cleanup --only=own`` is run. Finally, direct return is turned off on the cluster's other node, and this other node is
    cleaned up. Without this cleanup, the other node's virtual servers by mark would stay until their connections are over.
    """
    three_nodes.load_tunnels()
    manifests = _write_manifests(tmp_path)
    flags = ("--hostname-override=node-a", *golden_fixtures.profiles()["default"]["flags"].split(), BACKEND)
    is_nftables = cluster.BACKEND is Backend.NFTABLES
    if way == "off" and is_nftables:
        pytest.skip("with rules in nftables, the way back is a cleanup")
    with lab.Lab() as node, contextlib.ExitStack() as leaving:
        leaving.callback(cluster.clear)
        take_overs.add_second_address(node)
        _clean(node, "node")  # an earlier test may have left direct return on the node
        for place in ("node", "remote"):
            node.call("sysctl", namespace=place, values=FORMER)
        golden_state.restore_state(RECORDED)
        with contextlib.ExitStack() as loaded:
            loaded.enter_context(_other_node(node, tmp_path, "on"))
            held = [node.open(*one, timeout_s=20.0) for one in HELD]
            held += [node.open("client", "TCP", *DIRECT, src=CLIENT, timeout_s=20.0) for _ in range(4)]
            check_held = loaded.enter_context(take_overs.undisturbed(node, held, interval_s=patience.seconds(0.5)))
            with program.Program(manifests, tmp_path / "log", *flags, "--ipvs-direct-return=on") as running:
                running.wait_until(lambda: _tunnels_and_settings(node, "node") == UP, "tunnels", WITHIN_S)
                running.wait_until(lambda: _sources(node) == (CLIENT,), "direct", WITHIN_S)
                if is_nftables:
                    running.wait_until(iptables_is_empty, "moved to nftables", WITHIN_S)
                check_held()
            assert _tunnels_and_settings(node, "node") == UP, "a program that ends changes nothing"
            if way == "off":
                with program.Program(manifests, tmp_path / "log", *flags, "--ipvs-direct-return=off") as running:
                    running.wait_until(lambda: not _differing(), "as before", WITHIN_S)
            else:
                if is_nftables:
                    golden_state.restore_rules(RECORDED)
                (done,) = program.run_in_turn(("cleanup", "--only=own"), within_s=300)
                assert done.status == 0, done.output
            assert _differing() == ([] if is_nftables or way == "off" else [LEFT])
            assert not _marked(node, "node")
            assert _tunnels_and_settings(node, "node") == (set(), FORMER)
            assert _sources(node) == tuple(cluster.address(name, Family.IPV4) for name in ("bridge", "node"))
            check_held()
        assert _tunnels_and_settings(node, "remote") == UP
        with _other_node(node, tmp_path, "off"):
            assert _tunnels_and_settings(node, "remote") == (set(), FORMER)
        _clean(node, "remote")
        assert re.search("KUBE|-[Aa] -f", _objects(node, "remote")) is None
        assert _tunnels_and_settings(node, "remote") == (set(), FORMER)


BACKEND = f"--rules-backend={cluster.BACKEND}"
UP = (set(TUNNEL_DEVICES.values()), CHANGED)


def _write_manifests(directory: Path) -> Path:
    """Write each node's manifests, with direct return, to a separate folder; return the folder of the first node."""
    manifests, others = directory / "manifests", directory / "others"
    for folder in (manifests, others):
        folder.mkdir()
    golden_fixtures.World(manifests).apply("P0")
    nodes = three_nodes.nodes(*three_nodes.NODES)
    wanted = [*nodes]
    for path in (manifests / "00-node.yaml", manifests / "08-extip.yaml"):
        objects = [json.loads(text) for text in path.read_text().split("---\n")]
        for one in objects:
            one["metadata"]["annotations"] = nodes[0]["metadata"]["annotations"]
            if one["kind"] != "Node":
                wanted.append(copy.deepcopy(one))
        path.write_text("---\n".join(json.dumps(one) + "\n" for one in objects))
    (manifests / "nodes.yaml").write_text(json.dumps({"kind": "List", "items": nodes[1:]}))
    for one in wanted:
        if "externalIPs" in one.get("spec", {}):  # the other node must not take the address of the first node
            one["spec"]["externalIPs"].remove("172.18.0.2")
    (others / "objects.json").write_text(json.dumps({"kind": "List", "items": wanted}))
    return manifests


@contextlib.contextmanager
def _other_node(node: lab.Lab, directory: Path, direct_return: str) -> Iterator[None]:
    flags = ("--hostname-override=node-b", *cluster.FLAGS[1:], BACKEND, f"--ipvs-direct-return={direct_return}")
    wanted = UP if direct_return == "on" else (set(), FORMER)
    with three_nodes.program_at(node, "remote", directory / "others", directory / "log-remote", *flags) as running:
        running.wait_until(lambda: _tunnels_and_settings(node, "remote") == wanted, "tunnels and settings", WITHIN_S)
        yield


def _marked(node: lab.Lab, place: str) -> bool:
    """Whether a node has rules, sets or virtual servers that only ipvsproxy creates."""
    return re.search("IPVSPROXY|-[Aa] -f", _objects(node, place)) is not None


def _clean(node: lab.Lab, place: str) -> None:
    if place == "node":
        (done,) = program.run_in_turn(("cleanup",), within_s=300)
        assert done.status == 0, done.output
    else:
        with tempfile.TemporaryFile() as output:
            cleaning = forked.Forked(
                in_namespace.run, node.path(place), ("--cleanup",), output=output.fileno(), environment=os.environ
            )
            status = cleaning.wait(WITHIN_S)
            output.seek(0)
            assert status == 0, output.read()


def _tunnels_and_settings(node: lab.Lab, place: str) -> tuple[set[str], dict[str, str]]:
    """The tunnel devices that are up or have an alias, and the settings that direct return changes."""
    links = json.loads(node.run(place, "ip", "-json", "link", "show"))
    used = {one["ifname"] for one in links if "UP" in one["flags"] or one.get("ifalias")}
    values = node.run(place, "cat", *(f"/proc/sys/{path}" for path in FORMER)).split()
    return used & set(TUNNEL_DEVICES.values()), dict(zip(FORMER, values, strict=True))


def _sources(node: lab.Lab) -> tuple[str, ...]:
    """The source addresses that the pods of ``DIRECT`` see.

    The result is empty if a request fails, or if one of the two nodes gets no request.
    """
    seen = node.probe("client", "TCP", *DIRECT, src=CLIENT, count=three_nodes.CLIENTS, timeout_s=20.0)
    return seen.sources if (seen.outcome, seen.backends) == ("ok", ("10.244.0.11", "10.244.1.11")) else ()


def _differing() -> list[tuple[str, str, str]]:
    """The differences between the kernel and the recorded state of kube-proxy, except intended differences."""
    found = golden_state.differences(RECORDED, golden_state.read_state(), golden_state.KERNEL_SECTIONS)
    return [(part, row, kind) for part, row, kind, *_ in golden_fixtures.unaccepted(found)]


def _objects(node: lab.Lab, place: str) -> str:
    """All rules, sets and virtual servers of a node."""
    rules = (("nft", "list", "ruleset"),) if cluster.BACKEND is Backend.NFTABLES else (("iptables-save",), ("ip6tables-save",))
    return "".join(node.run(place, *one) for one in (*rules, ("ipset", "save"), ("ipvsadm", "--save", "--numeric")))
