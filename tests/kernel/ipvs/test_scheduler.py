"""Covers how the program finds out whether a scheduler is usable, with a fake kernel and with a real kernel."""

import errno

import pytest

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.ipvs import ipvs_driver
from ipvsproxy.kernel.ipvs.ipvs_driver import AbsentIpvs, IpvsDriver
from tests.kernel.ipvs.examples import ipvsadm


@pytest.mark.checklist(95)
@pytest.mark.parametrize(
    ("refusal", "state", "is_usable"),
    [
        (errno.EINVAL, ModuleState.MISSING, True),
        (errno.ENOENT, ModuleState.LOADED, False),
        (errno.EAFNOSUPPORT, ModuleState.LOADABLE, True),
        (errno.EAFNOSUPPORT, ModuleState.UNKNOWN, True),
        (errno.EAFNOSUPPORT, ModuleState.MISSING, False),
    ],
)
def test_module_files_decide_about_a_scheduler_only_if_the_kernel_did_not_look_it_up(
    monkeypatch: pytest.MonkeyPatch, refusal: int, state: ModuleState, *, is_usable: bool
) -> None:
    ipvs = AbsentIpvs()
    monkeypatch.setattr(ipvs, "refusal_with", lambda _: refusal)
    monkeypatch.setattr(ipvs_driver, "module_state", lambda name: state if name == "ip_vs_wlc" else None)
    missing = "the kernel has no scheduler 'wlc': the module ip_vs_wlc is missing or cannot be loaded"
    assert ipvs.why_unusable("wlc") == ("" if is_usable else missing)


@pytest.mark.parametrize("number", [errno.EPERM, netlink.UNANSWERED])
def test_a_kernel_error_is_raised_if_the_query_fails_before_the_kernel_looks_up_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ipvs = AbsentIpvs()
    monkeypatch.setattr(ipvs, "refusal_with", lambda _: number)
    with pytest.raises(KernelError, match="find the schedulers of this kernel: ") as raised:
        ipvs.why_unusable("rr")
    assert raised.value.errno == max(number, 0)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["nosuch", "x" * 40])
def test_if_a_scheduler_is_missing_the_error_names_the_kernel_module_of_the_scheduler(driver: IpvsDriver, name: str) -> None:
    assert driver.why_unusable(name) == (
        f"the kernel has no scheduler {name!r}: the module ip_vs_{name} is missing or cannot be loaded"
    )
    assert ipvsadm("-Sn") == ""
