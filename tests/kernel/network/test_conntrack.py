"""Covers the conntrack driver on a real kernel.

The tests create flows with the program ``conntrack``. Errors are tested with a fake socket.
"""

import contextlib
import errno
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.network import conntrack
from ipvsproxy.model.kernel import Flow, FlowCleaning
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from tests.kernel.drivers import run
from tests.support import fake_netlink

SERVICE = {Family.IPV4: "10.96.0.10", Family.IPV6: "fd00:96::10"}
CLIENT = {Family.IPV4: "10.1.1.{}", Family.IPV6: "fd00:1::{}"}
POD = {Family.IPV4: "10.244.0.{}", Family.IPV6: "fd00:244::{}"}
FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)


@pytest.fixture
def driver(network_namespace: None) -> Iterator[conntrack.ConntrackDriver]:
    with contextlib.closing(conntrack.ConntrackDriver()) as made:
        yield made


def flow(family: Family, client: int, pod: int, *, protocol: str = "udp", port: int = 53, service: str = "") -> None:
    """Adds a tracked flow from a client to a Service; a pod answers the client."""
    source, target = CLIENT[family].format(client), service or SERVICE[family]
    arguments = ["-I", "-p", protocol, "-s", source, "-d", target, "--sport", "1000", "--dport", str(port), "-t", "100"]
    arguments += ["-r", POD[family].format(pod), "-q", source, "--reply-port-src", "5353", "--reply-port-dst", "1000"]
    if protocol != "udp":
        arguments += ["--state", "ESTABLISHED"]
    if protocol == "sctp":
        arguments += ["--orig-vtag", "1", "--reply-vtag", "2"]
    run("conntrack", *arguments)


def clients(family: Family, protocol: str = "udp") -> set[str]:
    """For each tracked flow: the numbers of its client and its pod, joined by a hyphen."""
    lines = run("conntrack", "-L", "-f", "ipv4" if family is Family.IPV4 else "ipv6", "-p", protocol).splitlines()
    words = [[word.partition("=")[2] for word in line.split() if word.startswith("src=")] for line in lines]
    return {f"{one.rpartition('.')[2].rpartition(':')[2]}-{two.rpartition('.')[2].rpartition(':')[2]}" for one, two in words}


def cleaning(family: Family, *keep: int, protocol: Protocol = Protocol.UDP, port: int = 53) -> Operation:
    address = parse_address(SERVICE[family])
    real_servers = frozenset(RealServerKey.of(parse_address(POD[family].format(pod)), 5353) for pod in keep)
    return Operation(Verb.REMOVE, FlowCleaning(Flow(family, protocol, address, port), real_servers))


def removed(outcomes: list[Outcome]) -> list[int]:
    assert not any(outcome.error for outcome in outcomes)
    return [outcome.removed for outcome in outcomes]


@pytest.mark.kernel
@FAMILIES
def test_only_the_flows_to_removed_real_servers_are_deleted(driver: conntrack.ConntrackDriver, family: Family) -> None:
    flow(family, 1, 5)
    flow(family, 2, 6)
    flow(family, 3, 6)
    flow(family, 4, 6, port=54)
    flow(family, 5, 6, service=SERVICE[family][:-1] + "1")
    flow(family, 6, 6, protocol="tcp")
    assert removed(driver.apply([cleaning(family, 5)])) == [2]
    assert clients(family) == {"1-5", "4-6", "5-6"}
    assert clients(family, "tcp") == {"6-6"}
    assert removed(driver.apply([cleaning(family, 5)])) == [0]


@pytest.mark.kernel
@FAMILIES
def test_sctp_flows_to_a_removed_real_server_are_deleted(driver: conntrack.ConntrackDriver, family: Family) -> None:
    flow(family, 1, 5, protocol="sctp")
    flow(family, 2, 6, protocol="sctp")
    flow(family, 3, 6)
    operations = [cleaning(family, 5, protocol=Protocol.SCTP), cleaning(family, 6)]
    assert removed(driver.apply(operations)) == [1, 0]
    assert clients(family, "sctp") == {"1-5"}
    assert clients(family) == {"3-6"}


def fake_flow(pod_number: int = 5, client_number: int = 1) -> bytes:
    def tuple_(source: bytes, target: bytes, ports: bytes) -> bytes:
        addresses = fake_netlink.attribute(1, source) + fake_netlink.attribute(2, target)
        protocol = fake_netlink.attribute(1, b"\x11")
        protocol += fake_netlink.attribute(2, ports[:2]) + fake_netlink.attribute(3, ports[2:])
        return fake_netlink.attribute(0x8001, addresses) + fake_netlink.attribute(0x8002, protocol)

    service, client, pod = (
        parse_address(text) for text in (SERVICE[Family.IPV4], f"10.1.1.{client_number}", f"10.244.0.{pod_number}")
    )
    original = fake_netlink.attribute(0x8001, tuple_(client, service, b"\x03\xe8\0\x35"))
    return bytes(4) + original + fake_netlink.attribute(0x8002, tuple_(pod, client, b"\x14\xe9\x03\xe8"))


LISTING, DELETION = 0x100 | 1, 0x100 | 2
Answers = Callable[[int], list[fake_netlink.Answer]]


def done(number: int = 0) -> Answers:
    return lambda sequence: [fake_netlink.error(sequence, number)]


DONE = done()


class Table:
    """Fake sockets of a kernel that gives these answers to listings and deletions.

    The sockets record the queries and the deletions.
    """

    def __init__(self, *attempts: Answers, deletion: Answers = DONE) -> None:
        self.queries: list[bytes] = []
        self.deleted: list[bytes] = []
        self._attempts = list(attempts)
        self._deletion = deletion

    def connect(self, _protocol: int) -> fake_netlink.FakeSocket:
        return fake_netlink.FakeSocket(self.answer)

    def answer(self, data: bytes) -> list[fake_netlink.Answer]:
        found = fake_netlink.split(data)
        if found[0][1] == LISTING:
            self.queries.append(found[0][4])
            return self._attempts.pop(0)(found[0][3])
        self.deleted += [payload for *_, payload in found]
        return self._deletion(found[-1][3])


def listed(*flows: bytes, flags: int = 0) -> Answers:
    return lambda sequence: [
        *(fake_netlink.message(sequence, one, flags=flags) for one in flows),
        fake_netlink.done(sequence, flags=flags),
    ]


def test_a_flow_is_deleted_by_its_listed_tuple_and_zone() -> None:
    zone = fake_netlink.attribute(18, b"\0\x07")
    table = Table(listed(fake_flow() + fake_netlink.attribute(8, bytes(4)) + zone))
    assert removed(conntrack.ConntrackDriver(table.connect).apply([cleaning(Family.IPV4)])) == [1]
    original = fake_flow()[4 : 4 + int.from_bytes(fake_flow()[4:6], "little")]
    assert table.deleted == [bytes((Family.IPV4, 0, 0, 0)) + original + zone], "without a tuple, all flows would be deleted"


@pytest.mark.parametrize(("port", "count"), [(5353, 0), (5354, 1)])
def test_a_flow_is_deleted_even_if_the_pod_is_still_a_real_server_on_another_port(port: int, count: int) -> None:
    desired = cleaning(Family.IPV4).item
    assert isinstance(desired, FlowCleaning)
    desired = desired._replace(keep=frozenset({RealServerKey.of(parse_address("10.244.0.5"), port)}))
    table = Table(listed(fake_flow()))
    assert removed(conntrack.ConntrackDriver(table.connect).apply([Operation(Verb.REMOVE, desired)])) == [count]


@pytest.mark.parametrize(
    ("deletion", "count", "text"),
    [
        (DONE, 1, ""),
        (done(errno.ENOENT), 0, ""),
        (done(errno.EPERM), 0, "Operation not permitted"),
        (lambda _: [], 0, "answer was lost"),
    ],
    ids=["done", "ended before", "refused", "lost"],
)
def test_a_flow_that_ends_before_its_deletion_causes_no_error_and_is_not_counted(
    deletion: Answers, count: int, text: str
) -> None:
    table = Table(listed(fake_flow()), deletion=deletion)
    (outcome,) = conntrack.ConntrackDriver(table.connect).apply([cleaning(Family.IPV4)])
    assert (outcome.removed, bool(outcome.error)) == (count, bool(text))
    assert text in outcome.error


def test_if_the_flows_of_one_family_cannot_be_listed_the_flows_of_the_other_family_are_still_deleted() -> None:
    table = Table(done(errno.EINVAL), done(errno.EINVAL), listed())
    four, six = conntrack.ConntrackDriver(table.connect).apply([cleaning(Family.IPV4), cleaning(Family.IPV6)])
    assert "the module nf_conntrack_netlink is missing or cannot be loaded" in four.error
    assert (six.error, six.removed) == ("", 0)


@pytest.mark.parametrize("stale", [False, True], ids=["kept", "stale"])
def test_the_memory_for_a_listing_of_flows_does_not_depend_on_the_number_of_flows(*, stale: bool) -> None:
    """Each datagram of a listing has 32 kB, so keeping a hundred datagrams would take at least 3.2 MB."""

    def answer(data: bytes) -> list[fake_netlink.Answer]:
        ((_, kind, _, sequence, _), *_) = found = fake_netlink.split(data)
        if kind == DELETION:
            return [fake_netlink.error(found[-1][3])]
        one = fake_netlink.message(sequence, fake_flow())
        return [*[one * (32_000 // len(one))] * 100, fake_netlink.done(sequence)]

    class Forgetful(fake_netlink.FakeSocket):
        def send(self, data: bytes, /) -> int:
            self.sent.clear()
            return super().send(data)

    driver = conntrack.ConntrackDriver(lambda _protocol: Forgetful(answer))
    desired = cleaning(Family.IPV4) if stale else cleaning(Family.IPV4, 5)
    removed(driver.apply([cleaning(Family.IPV4, 5, port=54)]))  # the first call allocates the memory that later calls share
    tracemalloc.start()
    try:
        (count,) = removed(driver.apply([desired]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bool(count) is stale
    assert peak < 2_000_000


def lost(*flows: bytes) -> Answers:
    return lambda sequence: [*(fake_netlink.message(sequence, one) for one in flows), fake_netlink.OVERRUN]


@pytest.mark.parametrize("first", [listed(fake_flow(5), flags=0x10), lost(fake_flow(5))], ids=["inconsistent", "lost"])
def test_the_count_includes_flows_that_were_deleted_before_an_incomplete_listing_was_repeated(first: Answers) -> None:
    table = Table(first, listed(fake_flow(5, client_number=2), fake_flow(6)))
    driver = conntrack.ConntrackDriver(table.connect)
    assert removed(driver.apply([cleaning(Family.IPV4, 6)])) == [2]
    assert len(table.queries) == len(table.deleted) == 2


def test_the_failed_outcome_has_the_number_of_deleted_flows_if_every_listing_is_incomplete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(netlink, "DUMP_PAUSES_S", (0.0, 0.0))
    table = Table(lost(fake_flow(5)), lost())
    (outcome,) = conntrack.ConntrackDriver(table.connect).apply([cleaning(Family.IPV4)])
    assert "the dump broke off" in outcome.error
    assert (outcome.errno, outcome.removed) == (errno.ENOBUFS, 1)


def test_all_flows_are_listed_if_the_kernel_refuses_the_filter() -> None:
    table = Table(done(errno.EOPNOTSUPP), listed(fake_flow(5)))
    assert removed(conntrack.ConntrackDriver(table.connect).apply([cleaning(Family.IPV4)])) == [1]
    filtered, unfiltered = table.queries
    assert len(filtered) > len(unfiltered) == 4


def destination(query: bytes) -> tuple[object, ...]:
    """The family of a query, the flags of its filter, and the protocol, address and port that the filter selects."""

    def at(*path: int) -> bytes:
        start, end = 4, len(query)
        for kind in path:
            inside = message.attributes(query, start, end)
            if kind not in inside:
                return b""
            start, end = inside[kind]
        return query[start:end]

    return query[0], int.from_bytes(at(25, 1), "little"), at(1, 2, 1), at(1, 1, 2) or at(1, 1, 4), at(1, 2, 3)


V4, V6 = (parse_address(SERVICE[family]) for family in Family)


@pytest.mark.parametrize(
    ("cleanings", "desired"),
    [
        ([cleaning(Family.IPV4)], (Family.IPV4, 0x2A, b"\x11", V4, b"\0\x35")),
        ([cleaning(Family.IPV6)], (Family.IPV6, 0x28, b"\x11", b"", b"\0\x35")),
        ([cleaning(Family.IPV4), cleaning(Family.IPV4, port=54)], (Family.IPV4, 0x0A, b"\x11", V4, b"")),
        ([cleaning(Family.IPV4), cleaning(Family.IPV4, protocol=Protocol.SCTP)], (Family.IPV4, 0, b"", b"", b"")),
    ],
    ids=["one", "IPv6", "two ports", "two protocols"],
)
def test_the_kernel_is_asked_to_filter_by_the_fields_that_all_removed_real_servers_share(
    cleanings: list[Operation], desired: tuple[object, ...]
) -> None:
    table = Table(listed())
    conntrack.ConntrackDriver(table.connect).apply(cleanings)
    assert [destination(query) for query in table.queries] == [desired]


@pytest.mark.kernel
@FAMILIES
def test_the_kernel_lists_only_flows_to_the_removed_real_servers_if_it_can_filter_flows(
    driver: conntrack.ConntrackDriver, family: Family
) -> None:
    if not conntrack.filters_listings():
        pytest.skip("this kernel has no filter for connections")
    flow(family, 1, 5)
    flow(family, 2, 5, port=54)
    flow(family, 3, 5, protocol="tcp")
    flow(family, 4, 5, service=SERVICE[family][:-1] + "1")
    parts: list[int] = []
    gather = driver._listing.gather

    def counting(request: bytes, action: str, read: Callable[[list[netlink.Reply]], list[object]]) -> list[object]:
        def count(part: list[netlink.Reply]) -> list[object]:
            parts.append(len(part))
            return list(read(part))

        return gather(request, action, count)

    driver._listing.gather = counting  # type: ignore[method-assign, assignment]  # only the test can see what is listed
    assert removed(driver.apply([cleaning(family)])) == [1]
    assert sum(parts) == (1 if family is Family.IPV4 else 2), "of IPv6 addresses the kernel has the filter the wrong way round"
