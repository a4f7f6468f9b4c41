"""The ipset driver on a real kernel, checked with the program ipset.

Errors of the netlink socket are tested with a fake socket.

Behaviour that the real kernel and the fake kernel share is tested in test_contract.py.
"""

import contextlib
import errno
import functools
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

import msgspec
import pytest

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.sets_driver import ObservedSet
from ipvsproxy.kernel.ipset import ipset_driver as ipset
from ipvsproxy.kernel.ipset import ipset_message
from ipvsproxy.model.net import Address, Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.sets import IP_SETS, SCOPE_KINDS, SET_CAPACITY, SET_COPY, IpSet, SetEntries, SetEntry, SetKind, SetType
from tests.kernel.drivers import apply, operations, result, run
from tests.support import fake_netlink
from tests.support.polled_sets import observe_changed

CLUSTER_IP = IpSet(SetKind.CLUSTER_IP, Family.IPV4)


@pytest.fixture
def driver(network_namespace: None) -> Iterator[ipset.IpsetDriver]:
    with contextlib.closing(ipset.IpsetDriver()) as made:
        yield made


tool = functools.partial(run, "ipset")


def entry(number: int, name: str = CLUSTER_IP.name) -> SetEntry:
    return SetEntry(name, Address((0x0A000000 + number).to_bytes(4, "big")), Protocol.TCP, 80)


@pytest.mark.kernel
def test_every_set_is_created_with_the_parameters_of_kube_proxy_and_the_lowest_sufficient_revision(
    driver: ipset.IpsetDriver,
) -> None:
    assert not any(outcome.error or outcome.surprise for outcome in apply(driver, Verb.ADD, *IP_SETS.values()))
    made = {line.split()[1]: line.split()[2:] for line in tool("save").splitlines()}
    revisions = dict(re.findall(r"Name: (\S+)\nType: \S+\nRevision: (\d+)", tool("list", "-terse")))
    lowest = {"hash:ip": "0", "hash:ip,port": "1", "hash:ip,port,ip": "1", "hash:ip,port,net": "1", "bitmap:port": "0"}
    assert revisions == {name: "5" if ip_set.gives_marks else lowest[ip_set.type] for name, ip_set in IP_SETS.items()}
    again = []
    for name, ip_set in IP_SETS.items():
        family = "inet" if ip_set.family is Family.IPV4 else "inet6"
        options = ["range", "0-65535"]
        if ip_set.type is not SetType.PORT:
            options = ["family", family, "hashsize", "1024", "maxelem", "65536"]
        assert made[name][: 1 + len(options)] == [ip_set.type, *options]
        rest = [word for word in made[name][1 + len(options) :] if word != "skbinfo"]
        assert set(rest[::2]) <= {"bucketsize", "initval"}
        assert ("skbinfo" in made[name]) == ip_set.gives_marks
        again += [] if ip_set.kind in SCOPE_KINDS else [f"create {name} {ip_set.type} {' '.join(options)} -exist\n"]
    # The command that kube-proxy runs succeeds only if our sets equal the sets that kube-proxy would create.
    tool("restore", stdin="".join(again))


@pytest.mark.kernel
def test_observe_returns_only_entries_with_a_protocol_that_services_can_have(driver: ipset.IpsetDriver) -> None:
    apply(driver, Verb.ADD, CLUSTER_IP)
    tool("add", CLUSTER_IP.name, "10.0.0.1,tcp:80")
    tool("add", CLUSTER_IP.name, "10.0.0.1,udplite:80")
    entries = {SetEntry(CLUSTER_IP.name, parse_address("10.0.0.1"), Protocol.TCP, 80)}
    assert driver.observe([CLUSTER_IP.name]) == {CLUSTER_IP.name: ("hash:ip,port", Family.IPV4, 65536, entries)}


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("made", "difference"),
    [
        (("hash:ip,port", "family", "inet6"), "hash:ip,port IPv6 maxelem 65536"),
        (("hash:ip,port", "maxelem", "100"), "hash:ip,port IPv4 maxelem 100"),
        (("hash:ip",), "hash:ip IPv4 maxelem 65536"),
        (("bitmap:port", "range", "0-65535"), "bitmap:port"),
    ],
)
def test_a_set_with_one_of_our_names_but_other_parameters_is_reported_and_not_used(
    driver: ipset.IpsetDriver, made: tuple[str, ...], difference: str
) -> None:
    tool("create", CLUSTER_IP.name, *made)
    (outcome,) = apply(driver, Verb.ADD, CLUSTER_IP)
    assert outcome.errno == errno.EEXIST
    assert outcome.error == (
        f"add set KUBE-CLUSTER-IP: a set of this name exists, and it is {difference}, not hash:ip,port IPv4 maxelem 65536"
    )
    observed = driver.observe([CLUSTER_IP.name])[CLUSTER_IP.name]
    assert observed.entries == set()
    assert difference in observed.differs_from(CLUSTER_IP)


def entries_of(found: Mapping[str, ObservedSet | None]) -> dict[str, AbstractSet[SetEntry] | None]:
    return {name: held.entries if held else None for name, held in found.items()}


@pytest.mark.kernel
def test_an_unchanged_set_is_not_returned_again(driver: ipset.IpsetDriver) -> None:
    names = [CLUSTER_IP.name, "KUBE-NODE-PORT-TCP", "KUBE-LOOP-BACK"]
    apply(driver, Verb.ADD, CLUSTER_IP, IP_SETS["KUBE-NODE-PORT-TCP"], entry(1))
    none = {"KUBE-LOOP-BACK": None}
    assert entries_of(observe_changed(driver, names)) == none | {CLUSTER_IP.name: {entry(1)}, "KUBE-NODE-PORT-TCP": set()}
    assert observe_changed(driver, names) == none
    tool("add", "KUBE-NODE-PORT-TCP", "30001")
    assert [*observe_changed(driver, names)] == ["KUBE-NODE-PORT-TCP", "KUBE-LOOP-BACK"]
    tool("flush", CLUSTER_IP.name)
    tool("destroy", "KUBE-NODE-PORT-TCP")
    assert entries_of(observe_changed(driver, names)) == none | {CLUSTER_IP.name: set(), "KUBE-NODE-PORT-TCP": None}


@pytest.mark.kernel
def test_a_full_set_is_replaced_by_a_larger_set_of_the_same_name(driver: ipset.IpsetDriver) -> None:
    apply(driver, Verb.ADD, CLUSTER_IP)
    assert not any(outcome.error for outcome in apply(driver, Verb.ADD, *(entry(number) for number in range(SET_CAPACITY))))
    assert "maxelem 65536" in tool("list", "-terse", CLUSTER_IP.name), "below that its size stays"
    tool("create", SET_COPY.name, "hash:ip,port")  # as if a process had been killed while it enlarged a set.
    # The kernel checks the limit per region of the hash, so slightly more entries than the limit may be added.
    more = [entry(SET_CAPACITY + number) for number in range(100)]
    outcomes = apply(driver, Verb.ADD, *more)
    assert not any(outcome.error for outcome in outcomes)
    assert "maxelem 131072" in tool("list", "-terse", CLUSTER_IP.name)
    assert tool("list", "-name").split() == [CLUSTER_IP.name], "the copy is gone"
    assert len(driver.observe([CLUSTER_IP.name])[CLUSTER_IP.name].entries) == SET_CAPACITY + 100
    assert result(driver, Verb.ADD, CLUSTER_IP) == ("", True), "it counts as the set that was asked for"
    assert {outcome[1:] for outcome in apply(driver, Verb.REMOVE, *map(entry, range(5000)))} == {("", 0, False, 0)}
    assert len(driver.observe([CLUSTER_IP.name])[CLUSTER_IP.name].entries) == SET_CAPACITY + 100 - 5000


@pytest.mark.kernel
def test_operations_on_several_sets_keep_their_order(driver: ipset.IpsetDriver) -> None:
    other = IpSet(SetKind.EXTERNAL_IP, Family.IPV4)
    there, elsewhere = entry(1), entry(1, other.name)
    changes = [
        *operations(Verb.ADD, there, CLUSTER_IP, there, other, elsewhere),
        *operations(Verb.REMOVE, there),
        *operations(Verb.ADD, there),
        *operations(Verb.REMOVE, elsewhere, other, other),
    ]
    outcomes = driver.apply(changes)
    assert [outcome.operation for outcome in outcomes] == changes
    assert [bool(outcome.error) for outcome in outcomes] == [True, *[False] * 9]
    assert [outcome.surprise for outcome in outcomes] == [*[False] * 9, True]
    assert driver.observe(IP_SETS) == {CLUSTER_IP.name: ("hash:ip,port", Family.IPV4, 65536, {there})}


def test_all_entries_fail_without_a_second_attempt_if_the_answer_of_the_kernel_is_lost() -> None:
    sockets: list[fake_netlink.FakeSocket] = []

    def connect(_protocol: int) -> fake_netlink.FakeSocket:
        sockets.append(fake_netlink.FakeSocket(lambda _data: []))
        return sockets[-1]

    driver = ipset.IpsetDriver(connect)
    outcomes = apply(driver, Verb.ADD, *(entry(number) for number in range(10)))
    assert all("answer was lost" in outcome.error for outcome in outcomes)
    assert [len(socket.sent) for socket in sockets] == [1]
    assert "answer was lost" in result(driver, Verb.REMOVE, CLUSTER_IP)[0]


def test_the_error_names_the_set_type_that_the_kernel_does_not_have() -> None:
    assert result(ipset.IpsetDriver(fake_netlink.refusing(4098)), Verb.ADD, CLUSTER_IP) == (
        "add set KUBE-CLUSTER-IP: this kernel has no set type hash:ip,port: its module is missing or cannot be loaded",
        False,
    )


@pytest.mark.kernel
def test_the_copy_of_a_set_is_observed_and_destroyed_if_a_killed_process_has_left_the_copy(
    driver: ipset.IpsetDriver,
) -> None:
    assert not driver.has_copy()
    tool("create", SET_COPY.name, "hash:ip,port", "maxelem", "131072")
    assert driver.has_copy()
    remove = Operation(Verb.REMOVE, SET_COPY)
    assert driver.apply([remove, remove]) == [Outcome(remove), Outcome(remove, surprise=True)]
    assert tool("list", "-name") == ""


@pytest.mark.kernel
def test_an_existing_set_is_used_and_not_recreated_even_if_its_revision_differs_from_ours(driver: ipset.IpsetDriver) -> None:
    tool("create", CLUSTER_IP.name, "hash:ip,port", "family", "inet", "hashsize", "1024", "maxelem", "65536")
    tool("add", CLUSTER_IP.name, "10.0.0.1,tcp:80")
    header = tool("list", "-terse", CLUSTER_IP.name).partition("Size in memory")[0]
    (created, added) = apply(driver, Verb.ADD, CLUSTER_IP, entry(2))
    assert (created.error, created.surprise, added.error) == ("", True, "")
    assert tool("list", "-terse", CLUSTER_IP.name).partition("Size in memory")[0] == header
    members = tool("list", CLUSTER_IP.name).partition("Members:\n")[2].split()
    assert set(members) == {"10.0.0.1,tcp:80", "10.0.0.2,tcp:80"}


def with_revisions(newest: bytes, lowest: bytes, created: list[int]) -> ipset.IpsetDriver:
    """A driver on a fake kernel that supports the revisions from ``lowest`` to ``newest`` of each set type.

    ``created`` receives the revision of each set that the fake kernel creates.
    """

    def answer(data: bytes) -> list[fake_netlink.Answer]:
        ((_, kind, _, sequence, payload),) = fake_netlink.split(data)
        if kind & 0xFF == 13:
            revisions = fake_netlink.attribute(4, newest) + fake_netlink.attribute(10, lowest)
            return [fake_netlink.message(sequence, bytes(4) + revisions)]
        first, last = message.attributes(payload, 4, len(payload))[4]
        created.append(int.from_bytes(payload[first:last], "big"))
        return [fake_netlink.error(sequence)]

    return ipset.IpsetDriver(lambda _protocol: fake_netlink.FakeSocket(answer))


MARKS_NEED = (
    "this kernel's hash:ip,port carries no marks, as revision 5 does: "
    "use a newer kernel, or --ipvs-traffic-scopes=kube-proxy, which needs none"
)


@pytest.mark.parametrize(
    ("kind", "lowest", "newest", "created", "reason"),
    [
        (SetKind.CLUSTER_IP, 0, 6, [1], ""),
        (SetKind.CLUSTER_IP, 2, 6, [2], ""),
        (SetKind.CLUSTER_IP, 0, 0, [0], ""),
        (SetKind.SCOPE, 0, 5, [5], ""),
        (SetKind.SCOPE, 0, 4, [], MARKS_NEED),
    ],
)
def test_a_set_gets_the_nearest_revision_unless_its_marks_need_a_revision_that_the_kernel_lacks(
    kind: SetKind, lowest: int, newest: int, created: list[int], reason: str
) -> None:
    requested: list[int] = []
    (outcome,) = apply(with_revisions(bytes([newest]), bytes([lowest]), requested), Verb.ADD, IpSet(kind, Family.IPV4))
    assert (outcome.error.partition(": ")[2], outcome.errno) == (reason, errno.EOPNOTSUPP if reason else 0)
    assert requested == created


@pytest.mark.parametrize("revision", [b"", b"\0\x05"])
@pytest.mark.parametrize("is_newest", [True, False])
def test_an_answer_with_a_revision_that_is_not_exactly_one_byte_long_is_a_kernel_error(
    revision: bytes, *, is_newest: bool
) -> None:
    driver = with_revisions(revision, b"\0", []) if is_newest else with_revisions(b"\x05", revision, [])
    assert "the kernel's answer cannot be parsed" in result(driver, Verb.ADD, CLUSTER_IP)[0]


def test_an_entry_that_cannot_be_encoded_does_not_prevent_sending_the_other_entries() -> None:
    sent: list[bytes] = []

    def answer(data: bytes) -> list[fake_netlink.Answer]:
        """Refuse the last message of each ``send``.

        The first ``send`` has one message with both entries, the second has one message for each entry.
        """
        sent.append(data)
        *_, last = fake_netlink.sequences(data)
        return [fake_netlink.error(last, errno.EINVAL)]

    entries = [entry(1), msgspec.structs.replace(entry(2), protocol=None), entry(3)]
    _, wrong, refused = (Operation(Verb.ADD, SetEntries.of(one)) for one in entries)
    driver = ipset.IpsetDriver(lambda _protocol: fake_netlink.FakeSocket(answer))
    assert driver.apply([Operation(Verb.ADD, SetEntries.of(*entries))]) == [
        Outcome(Operation(Verb.ADD, SetEntries.of(entry(1)))),
        Outcome(wrong, f"{wrong}: the protocol is missing", errno.EINVAL),
        Outcome(refused, f"{refused}: Invalid argument", errno.EINVAL),
    ]
    together, alone = sent
    codec = ipset_message.codec(CLUSTER_IP.name)
    assert together.endswith(codec.encode(entry(1)) + codec.encode(entry(3)))
    assert codec.encode(entry(1)) in alone
    assert alone.endswith(codec.encode(entry(3)))


@pytest.mark.parametrize(
    ("number", "set_type", "text"),
    [
        (4352, SetType.ADDRESS_PORT, "the set is full: it holds at most 65536 entries"),
        (4352, SetType.PORT, "the port lies outside the set's range"),
        (
            4104,
            SetType.ADDRESS_PORT_NETWORK,
            "the kernel refuses this prefix length (a set takes no /0 range; two /1 ranges are the same)",
        ),
        (4100, None, "the set is in use by a rule"),
        (4999, SetType.PORT, "ipset error 4999"),
        (errno.EPERM, None, "Operation not permitted"),
        (netlink.UNANSWERED, None, "the kernel's answer was lost, so this may or may not be in force"),
    ],
)
def test_error_numbers_are_translated_to_readable_texts(number: int, set_type: SetType | None, text: str) -> None:
    assert ipset.explain(number, set_type) == text
