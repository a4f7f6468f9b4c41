"""Checks whether a scheduler is usable, with a fake driver and on a real kernel."""

import errno
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs.ipvs_driver import FIRST_PROBE_PORT, PROBE_ADDRESS, IpvsDriver
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.virtual_servers import (
    ObservedVirtualServer,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from tests.kernel.ipvs.examples import ipvsadm

FIRST = VirtualServerKey(Protocol.TCP, PROBE_ADDRESS, FIRST_PROBE_PORT)
OTHER = VirtualServerKey(Protocol.TCP, parse_address("10.96.0.1"), 443)


class Ipvs(IpvsDriver):
    """A fake driver whose virtual servers have these schedulers, with the given failures.

    The fake kernel has no IPVS for IPv6.
    """

    def __init__(self, servers: Mapping[VirtualServerKey, str] | None = None, failures: Mapping[Verb, int] | None = None) -> None:
        self.servers = dict(servers or {})
        self.failures = failures or {}
        self.calls: list[tuple[Verb, VirtualServerKey, str]] = []
        self.surprise = False
        self.refusal = errno.EAFNOSUPPORT

    def refusal_with(self, scheduler: str) -> int:
        return self.refusal

    def observe(self, families: Iterable[Family] = tuple(Family)) -> dict[VirtualServerKey, ObservedVirtualServer]:
        return {key: ObservedVirtualServer(VirtualServerSettings(name), {}) for key, name in self.servers.items()}

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        (operation,) = operations
        assert isinstance(operation.item, VirtualServer)
        self.calls.append((operation.verb, operation.item.key, operation.item.settings.scheduler))
        number = self.failures.get(operation.verb, 0)
        return [Outcome(operation, "it says no" if number else "", number, surprise=self.surprise)]


@pytest.mark.parametrize(("refusal", "is_usable"), [(errno.EINVAL, True), (errno.ENOENT, False)])
def test_the_result_of_adding_a_virtual_server_shows_whether_the_kernel_has_its_scheduler(
    refusal: int, *, is_usable: bool
) -> None:
    ipvs = Ipvs()
    ipvs.refusal = refusal
    assert (ipvs.why_unusable("wlc") == "") == is_usable
    assert ipvs.calls == [], "nothing that a kill could leave behind"


@pytest.mark.checklist(95)
def test_a_scheduler_is_checked_by_adding_a_virtual_server_that_is_removed_at_once() -> None:
    ipvs = Ipvs({OTHER: "rr"})
    assert ipvs.why_unusable("wlc") == ""
    assert ipvs.calls == [(Verb.ADD, FIRST, "wlc"), (Verb.REMOVE, FIRST, "wlc")]


@pytest.mark.checklist(95)
def test_no_virtual_server_is_added_if_an_existing_one_already_has_the_scheduler() -> None:
    ipvs = Ipvs({OTHER: "wlc"})
    assert ipvs.why_unusable("wlc") == ""
    assert ipvs.calls == []


def test_a_virtual_server_of_another_program_at_the_probe_address_is_not_changed() -> None:
    ipvs = Ipvs({FIRST: "rr", msgspec.structs.replace(FIRST, port=20001): "rr"})
    assert ipvs.why_unusable("wlc") == ""
    assert {key for _, key, _ in ipvs.calls} == {msgspec.structs.replace(FIRST, port=20002)}


def test_a_virtual_server_that_another_program_added_during_the_check_is_not_removed() -> None:
    ipvs = Ipvs()
    ipvs.surprise = True
    assert ipvs.why_unusable("wlc") == ""
    assert [verb for verb, _, _ in ipvs.calls] == [Verb.ADD]


@pytest.mark.checklist(95)
@pytest.mark.parametrize("verb", [Verb.ADD, Verb.REMOVE])
def test_a_probe_virtual_server_that_cannot_be_added_or_removed_is_an_error(verb: Verb) -> None:
    with pytest.raises(KernelError, match="find the schedulers of this kernel: it says no") as raised:
        Ipvs(failures={verb: errno.EPERM}).why_unusable("rr")
    assert raised.value.errno == errno.EPERM


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["nosuch", "x" * 40])
def test_the_error_for_a_missing_scheduler_names_its_kernel_module(driver: IpvsDriver, name: str) -> None:
    assert driver.why_unusable(name) == (
        f"the kernel has no scheduler {name!r}: the module ip_vs_{name} is missing or cannot be loaded"
    )
    assert ipvsadm("-Sn") == ""


@pytest.mark.kernel
def test_virtual_servers_of_other_programs_at_the_probe_address_are_not_removed(driver: IpvsDriver) -> None:
    ipvsadm("-A", "-t", "198.51.100.0:20000", "-s", "sh")
    before = ipvsadm("-Sn")
    driver.refusal_with = lambda scheduler: errno.EAFNOSUPPORT  # type: ignore[method-assign]  # a kernel without IPVS for IPv6
    assert driver.why_unusable("wlc") == ""
    assert ipvsadm("-Sn") == before
