"""Covers the lock of the node, the variant of iptables, slow steps of the start, and the preparation of a node with --init-only.

``test_app`` covers missing requirements, and ``tests/test_running.py`` covers the preparation on a real kernel.
"""

import asyncio
import contextlib
import errno
import os
import signal
import threading
from collections.abc import AsyncIterator
from types import ModuleType
from typing import NoReturn
from unittest.mock import Mock

import pytest
import structlog.testing

from ipvsproxy.config.settings import Drivers
from ipvsproxy.daemon.base import log
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.base.timing import Bucket
from ipvsproxy.daemon.process import lifecycle, requirements
from ipvsproxy.kernel import host, instance
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.variant import Variant, VariantChoice
from ipvsproxy.kernel.sysctls import SysctlDriver
from ipvsproxy.model.kernel import TUNNEL_RECORD, InterfaceAddress, render_record
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.translate.translation_settings import device_flags
from tests.config import loading
from tests.support import memory_node
from tests.support.summaries import Clock

NAME = "\0ipvsproxy-test-requirements"


@pytest.fixture(autouse=True)
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A lock that only this process uses."""
    own = f"{NAME}-{os.getpid()}"
    monkeypatch.setattr(requirements, "Instance", lambda: instance.Instance(own))
    return own


LEGACY = VariantChoice(iptables.COMMANDS, Variant.LEGACY, "it is the only one")


@pytest.fixture
def host_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that meets all requirements, with the legacy variant of iptables."""
    for check in ("missing_privileges", "missing_features"):
        monkeypatch.setattr(host, check, lambda **_: ())
    monkeypatch.setattr(host, "load_modules", lambda *_: "")
    monkeypatch.setattr(iptables_variant, "choose", lambda _: LEGACY)


async def test_no_second_process_gets_the_lock_of_the_node_while_the_first_process_holds_it() -> None:
    with requirements.only_instance():
        for _ in range(2):
            with pytest.raises(CannotStartError) as caught, requirements.only_instance():
                raise AssertionError
            assert caught.value.reasons[0].startswith("another ipvsproxy (process ")
    with requirements.only_instance():
        pass


async def test_the_start_continues_with_a_warning_if_another_program_holds_the_lock(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(instance, "_CREDENTIALS", Mock(size=12, unpack=lambda _: (4711, 1000, 1000)))  # of another user
    with (
        contextlib.closing(instance.Instance(name)),
        structlog.testing.capture_logs() as logs,
        requirements.only_instance(),
    ):
        (warning,) = logs
    assert (warning["log_level"], warning["held_by"]) == ("warning", "a process of user 1000")


@pytest.mark.usefixtures("host_with_everything")
@pytest.mark.parametrize(("left_behind", "warnings"), [(None, 0), (Variant.LEGACY, 1)])
async def test_the_program_uses_the_chosen_iptables_variant_and_warns_of_rules_in_the_other_variant(
    monkeypatch: pytest.MonkeyPatch, left_behind: Variant | None, warnings: int
) -> None:
    made: list[object] = []
    choice = VariantChoice(iptables_variant.commands(Variant.NF_TABLES), Variant.NF_TABLES, "there are signs", left_behind)
    monkeypatch.setattr(iptables_variant, "choose", lambda _: choice)
    monkeypatch.setattr(requirements, "NodeKernel", lambda *_, chosen, **__: made.append(chosen.commands))
    with structlog.testing.capture_logs() as logs:
        async with requirements.running_kernel(Drivers()):
            pass
    assert made == [choice.commands] != [iptables.COMMANDS]
    chosen = ("info", "iptables_variant_chosen", "nf_tables", "there are signs")
    left = ("warning", "rules_left_in_other_variant", "legacy", None)
    lines = [(line["log_level"], line["event"], line["variant"], line.get("reason")) for line in logs]
    assert lines == [chosen, *[left] * warnings]


def test_a_slow_kernel_is_logged_at_most_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr("time.monotonic", clock)
    bucket = Bucket(1, requirements.SLOW_LOG_S, clock())
    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            requirements._log_slow(bucket)
            clock.now += requirements.SLOW_LOG_S / 2
    assert [(line["event"], line["after_s"]) for line in logged] == [("kernel_slow", 5.0)] * 2


@pytest.mark.usefixtures("host_with_everything")
async def test_a_slow_kernel_call_is_logged_while_it_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    monkeypatch.setattr(requirements, "NodeKernel", Mock())
    monkeypatch.setattr("ipvsproxy.kernel.thread.SLOW_S", 0.01)
    is_logged = asyncio.Event()
    monkeypatch.setattr(requirements, "_log_slow", lambda _: is_logged.set())
    async with requirements.running_kernel(Drivers()) as kernel:
        waiting = asyncio.create_task(kernel.call(lambda _: answers.wait(60)))
        await asyncio.wait_for(is_logged.wait(), 60)
        assert not waiting.done()
        answers.set()
        assert await waiting


@pytest.mark.usefixtures("host_with_everything")
@pytest.mark.parametrize(
    ("step", "module", "function"),
    [
        ("load_modules", host, "load_modules"),
        ("choose_iptables_variant", iptables_variant, "choose"),
        ("open_kernel_sockets", requirements, "NodeKernel"),
    ],
)
async def test_a_slow_step_of_the_start_is_logged_by_name_while_it_still_runs(
    monkeypatch: pytest.MonkeyPatch, step: str, module: ModuleType, function: str
) -> None:
    may_end = threading.Event()
    logged: list[tuple[object, object]] = []

    def hang(*_: object, **__: object) -> object:
        assert may_end.wait(10)
        return {"load_modules": "", "choose": LEGACY}.get(function, Mock())

    def note(event: str, **keys: object) -> None:
        logged.append((event, keys["step"]))
        if keys["step"] == step:
            may_end.set()

    monkeypatch.setattr(requirements, "NodeKernel", Mock())
    monkeypatch.setattr(module, function, hang)
    monkeypatch.setattr(requirements, "SLOW_S", 0.05)
    monkeypatch.setattr(requirements, "log", Mock(warning=note))
    async with requirements.running_kernel(Drivers()):
        assert ("start_step_waits", step) in logged, "only this line lets the step end"


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "set_up", lambda **_: None)


@pytest.mark.usefixtures("quiet")
def test_a_signal_before_the_end_of_a_run_causes_a_failure_if_the_flag_init_only_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def hang(_chosen: object) -> AsyncIterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(requirements, "running_kernel", hang)
    assert requirements.init_only(loading.from_flags("--init-only")) == lifecycle.FAILED


@pytest.mark.usefixtures("quiet")
def test_a_missing_requirement_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_chosen: object) -> contextlib.AbstractAsyncContextManager[None]:
        raise CannotStartError("it is not there: get it")

    monkeypatch.setattr(requirements, "running_kernel", refuse)
    assert requirements.init_only(loading.from_flags("--init-only")) == lifecycle.CANNOT_START
    assert "ipvsproxy: it is not there: get it\n" in capsys.readouterr().err


def _cannot_be_read(*_: object) -> NoReturn:
    raise KernelError(action="read the alias", errno=errno.EIO)


def test_settings_of_direct_return_are_kept_and_reported_while_another_program_may_use_a_tunnel_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = memory_node.new_kernel()
    monkeypatch.setattr(SysctlDriver, "observe", lambda *_: kernel.sysctls)
    kernel.sysctls[TUNNEL_RECORD] = "uplink"
    assert requirements.end_direct_return(kernel)
    assert capsys.readouterr().out == "", "the alias is of another program"
    kernel.sysctls[TUNNEL_RECORD] = render_record({"net/ipv4/vs/sloppy_tcp": "0"})
    kernel.unreadable.add("interface_addresses")
    assert not requirements.end_direct_return(kernel)
    assert "interface_addresses cannot be read" in capsys.readouterr().out
    kernel.unreadable.clear()
    kernel.host_addresses.append(InterfaceAddress("tunl0", parse_address("10.244.1.0"), 32))
    assert not requirements.end_direct_return(kernel)
    assert "another program has an address on a tunnel device" in capsys.readouterr().out
    assert kernel.applied == []


def test_settings_that_an_earlier_process_has_changed_for_direct_return_are_restored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = memory_node.new_kernel()
    kernel.sysctls |= {"net/ipv4/vs/sloppy_tcp": "1", "net/ipv4/conf/all/rp_filter": "0"}
    kernel.sysctls[TUNNEL_RECORD] = render_record({"net/ipv4/vs/sloppy_tcp": "0", "net/ipv4/conf/all/rp_filter": "2"})
    monkeypatch.setattr(SysctlDriver, "observe", lambda *_: {})
    assert requirements.end_direct_return(kernel)
    assert kernel.applied == [], "there is no record"
    monkeypatch.setattr(SysctlDriver, "observe", _cannot_be_read)
    assert not requirements.end_direct_return(kernel)
    assert kernel.applied == [], "the record cannot be read"
    assert "kernel_setting_not_restored" in capsys.readouterr().out
    monkeypatch.setattr(SysctlDriver, "observe", lambda *_: kernel.sysctls)
    kernel.fail(lambda operation: operation.item.key == "net/ipv4/vs/sloppy_tcp")
    assert requirements.end_direct_return(kernel), "no tunnel device is up"
    assert kernel.sysctls["net/ipv4/conf/all/rp_filter"] == "2"
    assert kernel.sysctls[TUNNEL_RECORD] == render_record({"net/ipv4/vs/sloppy_tcp": "0"})
    shown = capsys.readouterr().out
    assert "kernel_setting_restored" in shown
    assert "kernel_setting_not_restored" in shown
    device = device_flags(Family.IPV4)
    kernel.sysctls |= {device: "0x81", TUNNEL_RECORD: render_record({device: "0x80"})}
    kernel.fail(lambda operation: operation.item.key == device)
    assert not requirements.end_direct_return(kernel)
    assert requirements.end_direct_return(kernel), "tried again"
    assert kernel.sysctls[device] == "0x80"
