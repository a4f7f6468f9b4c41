"""A small cluster for packet tests: the lab, the real program on the lab's node, and the API's objects in a file.

Names represent addresses of both families, so ``p1`` means 10.244.0.11 or fd00:10:244::11.
"""

import dataclasses
import ipaddress
import itertools
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ipvsproxy.kernel import backends
from ipvsproxy.model.kernel import DEVICE, ROUTE_PROTOCOL
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import Binding
from tests.support import golden_state, lab, patience, program

THIS_NODE, OTHER_NODE = "node-a", "node-b"
CHANGED_WITHIN_S = patience.seconds(60.0)
LONGEST_READ = 65536
BACKEND = Backend(os.environ.get("IPVSPROXY_TEST_RULES_BACKEND") or Backend.IPTABLES)
"""The backend of the rules of each program under test, unless the flags of the program name another backend."""
IN_FILE: Mapping[str, str] = {} if BACKEND is Backend.IPTABLES else {"rulesBackend": BACKEND}
"""The field that selects this backend in the section ``ipvsproxy`` of a configuration file."""
FLAGS = (f"--hostname-override={THIS_NODE}", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56", "--ipvs-min-sync-period=0s")

PORTS: Mapping[str, tuple[int, int]] = {"TCP": (80, 8080), "UDP": (53, 8053), "SCTP": (80, 8080)}
"""Two port numbers for each protocol: the port that every Service has, and the port on which the pods listen."""

ADDRESSES: Mapping[str, tuple[str, str]] = {
    "p1": ("10.244.0.11", "fd00:10:244::11"),
    "p2": ("10.244.0.12", "fd00:10:244::12"),
    "r1": ("10.244.1.11", "fd00:10:244:1::11"),
    "r2": ("10.244.1.12", "fd00:10:244:1::12"),
    "node": ("172.18.0.2", "fc00:f853:ccd::2"),
    "remote": ("172.18.0.3", "fc00:f853:ccd::3"),
    "bridge": ("10.244.0.1", "fd00:10:244::1"),
    "client": ("172.18.0.50", "fc00:f853:ccd::50"),
    "client2": ("172.18.1.51", "fc00:f853:ccd::51"),
}
"""The lab's addresses, IPv4 and IPv6. ``bridge`` and ``node`` are both addresses of the node."""

Manifest = dict[str, Any]


def address(name: str, family: Family) -> str:
    """The address that a name represents.

    The name is a key of ``ADDRESSES``, or stands for an address of a Service, as ``cluster 7``, ``balancer 7`` and ``external 7``
    do.
    """
    kind, _, number = name.partition(" ")
    if number:
        ranges = {
            "cluster": ("10.96.0.", "fd00:10:96::"),
            "balancer": ("198.51.100.", "2001:db8:1::"),
            "external": ("192.0.2.", "2001:db8:2::"),
        }
        return f"{ranges[kind][family is Family.IPV6]}{number}"
    return ADDRESSES[name][family is Family.IPV6]


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """An endpoint, given by the name of its pod."""

    pod: str
    ready: bool = True
    terminating: bool = False
    zones: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    def manifest(self, family: Family) -> Manifest:
        """The endpoint's entry in an EndpointSlice."""
        hints = {"forZones": [{"name": zone} for zone in self.zones], "forNodes": [{"name": node} for node in self.nodes]}
        return {
            "addresses": [address(self.pod, family)],
            "conditions": {"ready": self.ready, "serving": True, "terminating": self.terminating},
            "nodeName": THIS_NODE if self.pod.startswith("p") else OTHER_NODE,
            "zone": "zone-a" if self.pod.startswith("p") else "zone-b",
            "hints": {kind: values for kind, values in hints.items() if values},
        }


def service(
    name: str,
    number: int,
    *endpoints: Endpoint | str,
    balancer: bool = False,
    external: bool = False,
    node_port: int = 0,
    protocols: Iterable[str] = PORTS,
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> list[Manifest]:
    """A Service of both families with its EndpointSlices; ``number`` determines the addresses of the Service.

    The Service has one port for each protocol. If an endpoint is a string, the string is the name of a pod, and the endpoint is
    ready. ``spec`` has further fields of the Service's spec, named as in the API. The keys of ``annotations`` are the names of
    ipvsproxy's annotations without the prefix.
    """
    ports: list[Manifest] = [{"name": one.lower(), "protocol": one, "port": PORTS[one][0]} for one in protocols]
    for port in ports if node_port else ():
        port["nodePort"] = node_port
    both = {kind: [address(f"{kind} {number}", family) for family in Family] for kind in ("cluster", "balancer", "external")}
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "default",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": {f"ipvsproxy.io/{key}": value for key, value in (annotations or {}).items()},
        },
        "spec": {
            "type": "LoadBalancer" if balancer else "NodePort" if node_port else "ClusterIP",
            "clusterIP": both["cluster"][0],
            "clusterIPs": both["cluster"],
            "ipFamilies": ["IPv4", "IPv6"],
            "ports": ports,
            **({"externalIPs": both["external"]} if external else {}),
            **spec,
        },
        "status": {"loadBalancer": {"ingress": [{"ip": one} for one in both["balancer"]]}} if balancer else {},
    }
    return [manifest, *slices(name, *endpoints, protocols=protocols)]


def slices(name: str, *endpoints: Endpoint | str, protocols: Iterable[str] = PORTS) -> list[Manifest]:
    """The EndpointSlices of a Service, one for each family."""
    listed = [Endpoint(one) if isinstance(one, str) else one for one in endpoints]
    return [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{name}-{family.label.lower()}",
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": family.label,
            "ports": [{"name": one.lower(), "protocol": one, "port": PORTS[one][1]} for one in protocols],
            "endpoints": [endpoint.manifest(family) for endpoint in listed],
        }
        for family in Family
    ]


def node(**labels: str) -> Manifest:
    """The Node object of the node under test, with these additional labels. By default, its zone is zone-a."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": THIS_NODE, "labels": {"topology.kubernetes.io/zone": "zone-a"} | labels},
        "status": {"addresses": [{"type": "InternalIP", "address": one} for one in ADDRESSES["node"]]},
    }


def clear() -> None:
    """Remove what a program under test has left in the node's kernel."""
    golden_state.clear_state()
    backends.remove_table()


class Cluster:
    """Runs the program on the node of ``lab`` while the ``with`` block runs.

    Before the block, the node's kernel has no objects of the program.

    ``starter`` is passed to ``program.Program``.
    """

    def __init__(self, laboratory: lab.Lab, directory: Path, *flags: str, starter: Sequence[str] = ()) -> None:
        self.lab = laboratory
        self._starter = starter
        self._manifests = directory / "manifests"
        self._manifests.mkdir(exist_ok=True)
        self._log = directory / "log"
        # ``--rules-backend`` is left out for an older version, because an older version may not know the flag. It is also left
        # out with a configuration file, because the flag would override the file.
        is_left_out = program.OTHER_VERSION and BACKEND is Backend.IPTABLES
        is_in_file = any(flag.startswith("--config=") for flag in flags)
        backend = () if is_left_out or is_in_file else (f"--rules-backend={BACKEND}",)
        self._flags = (*FLAGS, *backend, *flags)
        self.objects: list[Manifest] = []
        """The API's objects that the next ``show`` writes; ``show`` adds a Node if there is none."""
        self.program = program.Program(self._manifests, self._log, *self._flags, starter=starter)

    def __enter__(self) -> Self:
        clear()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.program.__exit__()

    def start(self, *flags: str) -> None:
        """Start the program with these additional flags, and wait until it has programmed everything."""
        before = self.synced
        self.begin(*flags)
        self.program.wait_until(lambda: self.synced > before, "synced", program.SYNCED_WITHIN_S)

    def begin(self, *flags: str) -> None:
        """Start the program with these additional flags, and return at once."""
        self.program = program.Program(self._manifests, self._log, *self._flags, *flags, starter=self._starter)
        self.show()
        self.program.__enter__()

    def run(self, *commands: str) -> list[program.Ended]:
        """Run commands of ipvsproxy that end by themselves.

        Each command gets the flags of the running program and the API's objects.
        """
        flags = [f"--manifests={self._manifests}", *self._flags]
        return program.run_in_turn(*([*command.split(), *flags] for command in commands), within_s=300)

    def wait_until(self, reached: Callable[[], bool], what: str, within_s: float = CHANGED_WITHIN_S) -> None:
        """Poll until a condition holds, like ``Program.wait_until``."""
        self.program.wait_until(reached, what, within_s)

    def have(self, *manifests: Iterable[Manifest]) -> None:
        """Set the API's objects, and wait until they are programmed."""
        shown = self.objects
        self.objects = list(itertools.chain.from_iterable(manifests))
        if self.objects == shown:
            return
        before = self.synced_services
        self.show()
        self.wait_until(lambda: self.synced_services > before, "synced")

    def settle(self) -> None:
        """Wait until the last sync has left no failed or pending operation, or until ``verify`` finds no problem.

        On a busy machine, the device and the rules may be written after the first sync.

        If an operation seemed to be late, but the next read of the kernel shows that the operation has succeeded, no further sync
        is logged. Then only ``verify`` shows that the kernel has the desired state.
        """
        self.wait_until(
            lambda: " failed=0 pending=0 " in self.logged("event=synced")[-1] or self.run("verify")[0].status == 0, "settled"
        )

    def show(self) -> None:
        """Replace the manifest file in one step by a file with all of the API's objects."""
        has_node = any(one["kind"] == "Node" for one in self.objects)
        draft = self._manifests / ".draft"
        draft.write_text(json.dumps({"kind": "List", "items": self.objects if has_node else [node(), *self.objects]}))
        draft.rename(self._manifests / "objects.json")

    @property
    def synced(self) -> int:
        """How many syncs the program has logged."""
        return self._log.read_bytes().count(b"event=synced") if self._log.exists() else 0

    @property
    def synced_services(self) -> int:
        """How many syncs with changed Services the program has logged. Syncs caused only by a read of the kernel do not count."""
        return len(self.logged(r"event=synced services=[1-9]")) if self._log.exists() else 0

    def logged(self, pattern: str) -> list[str]:
        """The lines of the log that match a pattern."""
        return [line for line in self._log.read_text().splitlines() if re.search(pattern, line)]

    def real_servers(self, protocol: str, address: str, port: int) -> dict[str, int]:
        """The weights of a virtual server's real servers by address; empty if there are no real servers."""
        return ipvs_table().get((protocol, address, port), {})

    def local_addresses(self, *ways: Binding) -> set[str]:
        """The Service addresses that the bindings in ``ways`` have made local on the node.

        Without ``ways``, both bindings count.
        """
        found: set[str] = set()
        if Binding.ADDRESSES in (ways or Binding):
            listing = json.loads(self.lab.run("node", "ip", "-json", "address", "show") or "[]")
            found |= {one["local"] for link in listing if link.get("ifname") == DEVICE for one in link["addr_info"]}
        for option in ("-4", "-6") if Binding.ROUTES in (ways or Binding) else ():
            listing = self.lab.run("node", "ip", option, "route", "show", "table", "local", "protocol", str(ROUTE_PROTOCOL))
            found |= {line.split()[1] for line in listing.splitlines()}
        return found

    def set_contents(self, name: str) -> str:
        """The entries of a set in the tested backend, written as ipset prints them."""
        if BACKEND is Backend.NFTABLES:
            listed = self.lab.run("node", "nft", "list", "set", "inet", "ipvsproxy", name)
            return re.sub(r" \. (tcp|udp|sctp) \. ", r",\1:", listed)
        return self.lab.run("node", "ipset", "list", name).partition("Members:\n")[2]

    def virtual_servers(self) -> Iterable[tuple[str, str, int]]:
        """Protocol, address and port of all virtual servers."""
        return ipvs_table().keys()


def ipvs_table() -> dict[tuple[str, str, int], dict[str, int]]:
    """The weights of all real servers by address, for each virtual server (protocol, address, port).

    A table that fits into one ``read`` is taken from ``/proc/net/ip_vs``, because starting ipvsadm takes long on user-mode Linux.
    If the table is larger and another network namespace also has virtual servers, the file may omit virtual servers. The kernel
    includes those of other namespaces in the position at which the next ``read`` continues (``ip_vs_info_seq_next`` in
    net/netfilter/ipvs/ip_vs_ctl.c).
    """
    with Path("/proc/net/ip_vs").open("rb", buffering=0) as file:
        text, is_larger = (file.read(LONGEST_READ) or b"").decode(), bool(file.read(1))
    base = 16
    if is_larger:
        text, base = subprocess.run(("ipvsadm", "-Ln"), check=True, capture_output=True, text=True).stdout, 10
    table: dict[tuple[str, str, int], dict[str, int]] = {}
    for line in text.splitlines()[3:]:
        words = line.split()
        if words[0] == "->":
            table[next(reversed(table))][_address_and_port(words[1], base)[0]] = int(words[3])
        elif words[0] == "FWM":
            table[(words[0], "", int(words[1], base))] = {}
        else:
            table[(words[0], *_address_and_port(words[1], base))] = {}
    return table


def _address_and_port(text: str, base: int) -> tuple[str, int]:
    """Parse an address and a port: in hexadecimal (``base`` 16, as in ``/proc/net/ip_vs``) or as ipvsadm prints them (10)."""
    host, _, port = text.rpartition(":")
    is_number = base == 16 and host[0] != "["
    return str(ipaddress.ip_address(int(host, 16) if is_number else host.strip("[]"))), int(port, base)
