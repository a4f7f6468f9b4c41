"""Lists the cases that kube-proxy's own tests cover, and finds the tests of this project that cover each case.

A marker at a test gives the numbers of the cases that the test covers: ``@pytest.mark.checklist(13)``. The cases were collected
by reading pkg/proxy/ipvs and pkg/proxy in kubernetes/kubernetes v1.36.2. ``scripts/checklist`` prints all cases with their tests;
its exit status is 1 if a case has no test, or if a test names a case that does not exist.
"""

import collections
import sys
from collections.abc import Mapping, Sequence

import pytest

CASES: Mapping[int, str] = {
    1: "node addresses: loopback is left out",
    2: "node addresses: none with loopback only, or without devices",
    3: "node addresses: IPv4 of every device, of a mixed lot",
    4: "node addresses: two devices, one of them with IPv6 too",
    5: "node addresses: those of kube-ipvs0 are left out",
    6: "node addresses: none with kube-ipvs0 only",
    7: "node addresses: those of the one device besides kube-ipvs0 and lo",
    8: "node addresses: a device named ipvs0 is like any other",
    9: "node addresses: IPv6 of every device, less link-local",
    10: "node addresses: one that kube-ipvs0 carries too stays, being another device's",
    11: "node addresses: which an IPv4 node uses",
    12: "node addresses: which an IPv6 node uses",
    13: "node port TCP: virtual servers for cluster IP and node address, with endpoints of one family",
    14: "node port UDP, match-all range: set entry and rules",
    15: "node port without endpoints: virtual servers without real servers",
    16: "node port SCTP: one virtual server and one set entry per node address",
    17: "node port SCTP, external traffic local: local real servers, both sets, rules in order",
    18: "node port TCP, external traffic local, limited addresses",
    19: "node port IPv6: virtual servers with real servers of that family only",
    20: "an IPv4 Service has nothing in IPv6",
    21: "node port IPv6 without endpoints: virtual servers without real servers",
    22: "node port SCTP IPv6: virtual servers and set entries",
    23: "cluster IPs of two families: IPv4 has its own only",
    24: "cluster IPs of two families: IPv6 has its own only",
    25: "cluster IP without endpoints: a virtual server without real servers",
    26: "a desired real server observed at weight 0 gets its weight back",
    27: "masquerading is fully random exactly where iptables can do it",
    28: "traffic from loopback leaves KUBE-SERVICES first",
    29: "the eleven chains, in order",
    30: "KUBE-SERVICES with cluster, external and load balancer addresses and node ports together",
    31: "external address without endpoints: a virtual server without real servers",
    32: "external addresses of both families, one of them loopback",
    33: "an endpoint port of another protocol is none of this port's",
    34: "external traffic local: the external address leads to local endpoints only",
    35: "load balancer: virtual servers, set, rules of its chain",
    36: "load balancer: KUBE-SERVICES",
    37: "load balancer, external traffic local: both sets, rules, local real servers",
    38: "load balancer with source ranges: sets and firewall rules",
    39: "a load balancer address in mode Proxy is not served; in mode VIP or without mode it is",
    40: "health check ports: those of load balancers with external traffic local",
    41: "health check ports: node port rules besides",
    42: "health check ports: change and deletion",
    43: "health check: ready endpoints on this node count",
    44: "health check: none counts when all are terminating or unready",
    45: "service ports: several Services with several ports, one health check port",
    46: "service ports: ports removed, Services deleted",
    47: "service ports: headless Services have none",
    48: "service ports: ExternalName has none, even with a cluster IP",
    49: "service ports: from cluster IP to load balancer the health check port appears",
    50: "service ports: an equal update changes nothing",
    51: "service ports: back to cluster IP the health check port goes",
    52: "session affinity: its timeout is on every virtual server",
    53: "endpoints: none from nothing",
    54: "endpoints: an unchanged one cleans no flows, and counts as local",
    55: "endpoints: two unchanged slices make one list",
    56: "endpoints: two ports of one address count once",
    57: "endpoints: several Services are counted each for itself",
    58: "endpoints: a slice comes and goes, flows are cleaned",
    59: "endpoints: an address and a port come",
    60: "endpoints: an address and a port go",
    61: "endpoints: a second slice comes",
    62: "endpoints: a second slice goes",
    63: "endpoints: a port gets another name",
    64: "endpoints: a port gets another number",
    65: "endpoints: all kinds of changes over several Services",
    66: "endpoints: a slice that was empty gets addresses",
    67: "an equal virtual server is not touched",
    68: "a virtual server with other flags or scheduler is changed in place",
    69: "an absent virtual server is made and its address bound",
    70: "an address that is bound is not bound again",
    71: "virtual servers that nobody wants go, unless their range is excluded",
    72: "a virtual server that goes takes its real servers with it",
    73: "a virtual server in an excluded range keeps its real servers",
    74: "ports of one Service share the bound address; it goes with the last",
    75: "excluded ranges count in their own family",
    76: "ready endpoints are real servers, local ones are in the hairpin set",
    77: "a deleted slice leaves the virtual server without real servers and the hairpin set without entries",
    78: "internal traffic anywhere: all ready endpoints",
    79: "internal traffic local: endpoints on this node only",
    80: "ready endpoints are preferred; hairpin covers every local one",
    81: "external traffic local with ready, draining and dead endpoints",
    82: "draining endpoints serve when none is ready",
    83: "external traffic local: local draining ones before remote ready ones",
    84: "no-local metric: nothing to say with local endpoints",
    85: "no-local metric: internal",
    86: "no-local metric: external",
    87: "no-local metric: both",
    88: "no-local metric: nothing to say without any endpoint",
    89: "an idle real server is removed at once",
    90: "a real server with connections, active or not, drains at weight 0",
    91: "a UDP real server is removed at once",
    92: "a real server that is not there is no error",
    93: "set entries: missing ones are added, others removed, per type and family",
    94: "ipset versions that are refused and accepted",
    95: "the IPVS probe fails on every step and passes on none failing",
    96: "cleanup removes what is ours and nothing else",
    97: "zone hints count only when complete and when they name this zone",
    98: "node hints come before zone hints",
    99: "hints never limit local traffic",
    100: "traffic policies and what can be reached from outside",
    101: "node port ranges: /0, the other family, overlaps, no match",
    102: "flows that lead to endpoints no longer there are deleted, others stay",
    103: "conntrack maximum: untouched, floor, cap",
    104: "a change of pod ranges matters only where they are used",
}


class _Collector:
    """A pytest plugin that records which tests cover each case of the checklist."""

    def __init__(self) -> None:
        self.tests: dict[int, set[str]] = collections.defaultdict(set)
        self.errors: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for marker in item.iter_markers("checklist"):
                for number in marker.args:
                    self.tests[number].add(item.nodeid.partition("[")[0])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(report.nodeid)


def main(arguments: Sequence[str]) -> int:
    """Print every case with its tests; returns the exit status of ``scripts/checklist``."""
    collector = _Collector()
    pytest.main(["--collect-only", "-p", "no:terminal", *arguments], plugins=[collector])
    for number, title in CASES.items():
        tests = sorted(collector.tests[number])
        print(f"{number:3} {title}", *(tests or ["(no test)"]), sep="\n      ")  # noqa: T201 - output for a person
    missing = [number for number in CASES if not collector.tests[number]]
    unknown = {number: tests for number, tests in collector.tests.items() if number not in CASES}
    print(f"{len(CASES) - len(missing)} of {len(CASES)} cases have a test; missing:", *(missing or ("none",)))  # noqa: T201 - output for a person
    for number, names in unknown.items():
        print(f"there is no case {number!r}:", *names)  # noqa: T201 - output for a person
    for name in collector.errors:
        print(f"could not be collected: {name}")  # noqa: T201 - output for a person
    return 1 if missing or unknown or collector.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
