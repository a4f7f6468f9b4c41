"""The conntrack driver against a real kernel whose flows the conntrack program made; and its faults on a fake socket."""

import contextlib
import errno
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from ipvsproxy.kernel import conntrack
from ipvsproxy.model.kernel import Flow, FlowCleaning
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from tests.kernel import fake_netlink

SERVICE = {Family.IPV4: "10.96.0.10", Family.IPV6: "fd00:96::10"}
CLIENT = {Family.IPV4: "10.1.1.{}", Family.IPV6: "fd00:1::{}"}
POD = {Family.IPV4: "10.244.0.{}", Family.IPV6: "fd00:244::{}"}
FAMILIES = pytest.mark.parametrize("family", Family, ids=lambda family: family.label)


@pytest.fixture
def driver(network_namespace: None) -> Iterator[conntrack.ConntrackDriver]:
    with contextlib.closing(conntrack.ConntrackDriver()) as made:
        yield made


def tool(*arguments: str) -> str:
    """Run conntrack."""
    done = subprocess.run((shutil.which("conntrack") or "conntrack", *arguments), check=True, capture_output=True, text=True)
    return done.stdout


def flow(family: Family, client: int, pod: int, *, protocol: str = "udp", port: int = 53, service: str = "") -> None:
    """A tracked flow of a client to a service, answered by a pod."""
    source, target = CLIENT[family].format(client), service or SERVICE[family]
    arguments = ["-I", "-p", protocol, "-s", source, "-d", target, "--sport", "1000", "--dport", str(port), "-t", "100"]
    arguments += ["-r", POD[family].format(pod), "-q", source, "--reply-port-src", "5353", "--reply-port-dst", "1000"]
    if protocol != "udp":
        arguments += ["--state", "ESTABLISHED"]
    if protocol == "sctp":
        arguments += ["--orig-vtag", "1", "--reply-vtag", "2"]
    tool(*arguments)


def clients(family: Family, protocol: str = "udp") -> set[str]:
    """The client and the pod of each flow that is tracked."""
    lines = tool("-L", "-f", "ipv4" if family is Family.IPV4 else "ipv6", "-p", protocol).splitlines()
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
def test_flows_to_real_servers_that_are_gone_are_deleted_and_exactly_those(
    driver: conntrack.ConntrackDriver, family: Family
) -> None:
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
def test_sctp_flows_are_deleted_too(driver: conntrack.ConntrackDriver, family: Family) -> None:
    flow(family, 1, 5, protocol="sctp")
    flow(family, 2, 6, protocol="sctp")
    flow(family, 3, 6)
    operations = [cleaning(family, 5, protocol=Protocol.SCTP), cleaning(family, 6)]
    assert removed(driver.apply(operations)) == [1, 0]
    assert clients(family, "sctp") == {"1-5"}
    assert clients(family) == {"3-6"}


@pytest.mark.kernel
def test_a_real_server_on_another_port_does_not_keep_a_flow(driver: conntrack.ConntrackDriver) -> None:
    flow(Family.IPV4, 1, 5)
    key = RealServerKey.of(parse_address(POD[Family.IPV4].format(5)), 5354)
    wanted = FlowCleaning(Flow(Family.IPV4, Protocol.UDP, parse_address(SERVICE[Family.IPV4]), 53), frozenset({key}))
    assert removed(driver.apply([Operation(Verb.REMOVE, wanted)])) == [1]


@pytest.mark.kernel
def test_both_families_are_cleaned_in_one_call(driver: conntrack.ConntrackDriver) -> None:
    for family in Family:
        flow(family, 1, 5)
    operations = [cleaning(family) for family in (Family.IPV6, Family.IPV4)]
    outcomes = driver.apply(operations)
    assert removed(outcomes) == [1, 1]
    assert [outcome.operation for outcome in outcomes] == operations


@pytest.mark.kernel
def test_more_flows_than_one_batch_are_deleted(driver: conntrack.ConntrackDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conntrack, "BATCH_SIZE", 2)
    for client in range(1, 6):
        flow(Family.IPV4, client, 5)
    assert removed(driver.apply([cleaning(Family.IPV4)])) == [5]
    assert clients(Family.IPV4) == set()


def ended(data: bytes) -> list[fake_netlink.Answer]:
    return [fake_netlink.done(fake_netlink.sequences(data)[0])]


def fake_flow() -> bytes:
    def tuple_(source: bytes, target: bytes, ports: bytes) -> bytes:
        addresses = fake_netlink.attribute(1, source) + fake_netlink.attribute(2, target)
        protocol = fake_netlink.attribute(1, b"\x11")
        protocol += fake_netlink.attribute(2, ports[:2]) + fake_netlink.attribute(3, ports[2:])
        return fake_netlink.attribute(0x8001, addresses) + fake_netlink.attribute(0x8002, protocol)

    service, client, pod = (parse_address(text) for text in (SERVICE[Family.IPV4], "10.1.1.1", "10.244.0.5"))
    original = fake_netlink.attribute(0x8001, tuple_(client, service, b"\x03\xe8\0\x35"))
    return bytes(4) + original + fake_netlink.attribute(0x8002, tuple_(pod, client, b"\x14\xe9\x03\xe8"))


def test_a_flow_is_deleted_by_its_tuple_and_its_zone_as_they_were_listed() -> None:
    deleted: list[bytes] = []
    zone = fake_netlink.attribute(18, b"\0\x07")

    def answer(data: bytes) -> list[fake_netlink.Answer]:
        ((_, kind, _, sequence, payload),) = fake_netlink.split(data)
        if kind == 0x101:
            listed = fake_flow() + fake_netlink.attribute(8, bytes(4)) + zone
            return [fake_netlink.message(sequence, listed), fake_netlink.done(sequence)]
        deleted.append(payload)
        return [fake_netlink.error(sequence)]

    driver = conntrack.ConntrackDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    assert removed(driver.apply([cleaning(Family.IPV4)])) == [1]
    original = fake_flow()[4 : 4 + int.from_bytes(fake_flow()[4:6], "little")]
    assert deleted == [bytes((Family.IPV4, 0, 0, 0)) + original + zone]


@pytest.mark.parametrize(
    ("number", "count", "text"),
    [(0, 1, ""), (errno.ENOENT, 0, ""), (errno.EPERM, 0, "Operation not permitted"), (None, 0, "answer was lost")],
)
def test_a_flow_that_ended_meanwhile_is_no_error_and_does_not_count(number: int | None, count: int, text: str) -> None:
    def answer(data: bytes) -> list[fake_netlink.Answer]:
        ((_, kind, _, sequence, payload),) = fake_netlink.split(data)
        if kind == 0x101:
            return [fake_netlink.message(sequence, fake_flow()), fake_netlink.done(sequence)]
        assert kind == 0x102
        assert len(payload) > 4, "a deletion without a tuple would delete all flows"
        return [] if number is None else [fake_netlink.error(sequence, number)]

    driver = conntrack.ConntrackDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    (outcome,) = driver.apply([cleaning(Family.IPV4)])
    assert outcome.removed == count
    assert text in outcome.error
    assert bool(outcome.error) is bool(text)


def test_a_kernel_that_cannot_list_flows_is_explained_and_the_other_family_is_cleaned() -> None:
    def answer(data: bytes) -> list[fake_netlink.Answer]:
        family = data[16]
        sequence = fake_netlink.sequences(data)[0]
        return [fake_netlink.error(sequence, errno.EINVAL)] if family == Family.IPV4 else ended(data)

    driver = conntrack.ConntrackDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    four, six = driver.apply([cleaning(Family.IPV4), cleaning(Family.IPV6)])
    assert "the module nf_conntrack_netlink is not there or cannot be loaded" in four.error
    assert (six.error, six.removed) == ("", 0)


def test_nothing_is_listed_for_families_without_a_cleaning() -> None:
    listed: list[int] = []

    def answer(data: bytes) -> list[fake_netlink.Answer]:
        listed.append(data[16])
        return ended(data)

    driver = conntrack.ConntrackDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    driver.apply([cleaning(Family.IPV6), cleaning(Family.IPV6, port=54)])
    assert listed == [Family.IPV6]
