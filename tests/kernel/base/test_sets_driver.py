"""The code shared by the drivers of sets, with in-memory sets instead of a kernel."""

import struct
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ipvsproxy.kernel.base import message, netlink, sets_driver
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.sets_driver import ObservedSet, SetsDriver
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.sets import IP_SETS, IpSet, SetEntries, SetEntry, SetKind, SetType

NAMES = ("KUBE-NODE-PORT-TCP", "KUBE-NODE-PORT-UDP")
CLUSTER_IP = IpSet(SetKind.CLUSTER_IP, Family.IPV4).name


class InMemory(SetsDriver):
    """A sets driver that keeps sets of port numbers in the dictionary ``kernel``.

    A read of a set fails if ``failing`` contains the name of the set.
    """

    most_at_once = 1

    def __init__(self) -> None:
        super().__init__()
        self.kernel: dict[str, set[int]] = {}
        self.failing: set[str] = set()

    def _dump(self, name: str, *, header_only: bool = False) -> Sequence[netlink.Reply] | None:
        if name in self.failing:
            raise KernelError(action=f"list the set {name}", detail="the answer was lost")
        ports = sorted(self.kernel.get(name, ()))
        data = bytes(message.NETFILTER_HEADER) + struct.pack(f"={len(ports)}H", *ports) * (not header_only)
        return [netlink.Reply(data, 0, len(data))] if name in self.kernel else None

    def _read(self, name: str, parts: Sequence[netlink.Reply]) -> ObservedSet:
        numbers = struct.iter_unpack("=H", parts[0].data[message.NETFILTER_HEADER :])
        entries = frozenset(SetEntry(name, port=port) for (port,) in numbers)
        return ObservedSet(*sets_driver.parameters(IP_SETS[name]), entries)

    def _create(self, ip_set: IpSet) -> int:
        self.kernel[ip_set.name] = set()
        return 0

    def _destroy(self, name: str) -> int:
        del self.kernel[name]
        return 0

    def _explain(self, number: int, set_type: SetType | None) -> str:
        raise AssertionError("the driver in memory refuses nothing")

    def _encode(self, entry: SetEntry) -> bytes:
        return struct.pack("=H", entry.port)

    def _send(self, pending: Sequence[sets_driver.Part]) -> None:
        for verb, part in pending:
            ports, held = {one.entry.port for one in part}, self.kernel[part[0].entry.set]
            self.kernel[part[0].entry.set] = held - ports if verb is Verb.REMOVE else held | ports


EVENTS = st.tuples(
    st.sampled_from(("write", "undo", "change", "destroy", "create", "fail", "observe", "poll", "poll")), st.sampled_from(NAMES)
)


@given(st.lists(EVENTS, min_size=20, max_size=60))
def test_polls_find_changes_by_other_programs_even_after_failed_reads(
    history: list[tuple[str, str]],
) -> None:
    driver = InMemory()
    view: dict[str, ObservedSet | None] = {}
    for kind, name in [*history, ("poll", ""), ("poll", "")]:
        match kind:
            case "write" | "undo" if name in driver.kernel:  # for "undo", another program undoes our write before the set is read
                before = set(driver.kernel[name])
                driver.apply([Operation(Verb.ADD, SetEntries.of(SetEntry(name, port=1)))])
                view[name] = None
                driver.kernel[name] = before if kind == "undo" else driver.kernel[name]
            case "change" if name in driver.kernel:
                driver.kernel[name] = driver.kernel[name] ^ {1}
            case "destroy":
                driver.kernel.pop(name, None)
            case "create":
                driver.kernel.setdefault(name, {1})
            case "fail":
                driver.failing.add(name)
            case "observe" if not driver.failing:
                driver.observe(NAMES)
                view.clear()  # the next poll returns every set
            case "poll":
                try:
                    for one in NAMES:
                        view |= driver.observe_changed(one)
                except KernelError:
                    driver.failing.clear()
                else:
                    observed = {one: found for one, found in view.items() if found is not None}
                    assert {one: {entry.port for entry in found.entries} for one, found in observed.items()} == driver.kernel


def entry(number: int) -> SetEntry:
    return SetEntry(CLUSTER_IP, parse_address(f"10.0.0.{number}"), Protocol.TCP, 80)


def test_successive_operations_with_the_same_set_and_the_same_verb_are_grouped_into_one_run() -> None:
    other = SetEntry("KUBE-NODE-PORT-TCP", port=80)
    several = SetEntries(CLUSTER_IP, (entry(5), entry(6)))
    added = [Operation(Verb.ADD, item) for item in (*map(SetEntries.of, (entry(1), entry(2), other, entry(3))), several)]
    assert list(sets_driver.runs([*added, Operation(Verb.REMOVE, SetEntries.of(entry(4)))])) == [
        (Verb.ADD, [entry(1), entry(2)]),
        (Verb.ADD, [other]),
        (Verb.ADD, [entry(3), entry(5), entry(6)]),
        (Verb.REMOVE, [entry(4)]),
    ]
    assert not list(sets_driver.runs([]))
