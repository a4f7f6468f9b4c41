"""Covers changes of the configuration file on a real file system: a change is applied, refused, or reported as needing a restart.

``test_reconfigure.py`` covers how new settings reach the kernel objects, and ``tests/test_running.py`` covers changed files on a
real kernel.
"""

import asyncio
import pathlib
import tempfile
from collections.abc import Callable, MutableMapping
from typing import Any
from unittest.mock import Mock

import pytest
import structlog.testing

from ipvsproxy.config import load
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.process import reload
from ipvsproxy.daemon.process.reload import Reloader
from ipvsproxy.model.kernel import ROUTE_PROTOCOL
from ipvsproxy.model.rules import Backend
from tests.config import loading
from tests.support.following import running_task

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n"
NFTABLES = "ipvsproxy: {rulesBackend: nftables}"
WITHIN_S = 60.0

Logs = list[MutableMapping[str, Any]]


class Process:
    """A process with a configuration file. ``applied`` lists the configurations that were applied.

    For each reason in ``failures``, one attempt to apply a configuration fails with this reason. ``outcomes`` has one element for
    each time that the file was read; the element says whether the file is applied.
    """

    def __init__(self, path: pathlib.Path, *flags: str) -> None:
        self.applied: list[Config] = []
        self.failures: list[str] = []
        self.outcomes: list[bool] = []
        self._path = path
        self._arguments = [f"--config={path}", *flags]
        self._has_applied = asyncio.Event()
        self.reloader = Reloader(self.read(), self.read, self._apply, self.outcomes.append)

    def read(self) -> Config:
        return load.load(self._arguments, hostname="node-a", read_file=lambda path: pathlib.Path(path).read_bytes())

    async def _apply(self, config: Config) -> None:
        if self.failures:
            raise CannotStartError(self.failures.pop(0))
        self.applied.append(config)
        self._has_applied.set()

    async def check(self) -> None:
        await self.reloader.check(self._path)

    async def check_changed(self, *lines: str) -> None:
        write(self._path, *lines)
        await self.check()

    async def until_applied(self) -> Config:
        await asyncio.wait_for(self._has_applied.wait(), WITHIN_S)
        self._has_applied.clear()
        return self.applied[-1]


def write(path: pathlib.Path, *lines: str) -> None:
    path.write_text(HEAD + "".join(f"{line}\n" for line in lines))


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    write(tmp_path / "config.conf")
    return tmp_path / "config.conf"


@pytest.fixture
def process(path: pathlib.Path) -> Process:
    return Process(path)


@pytest.fixture
def logs() -> Any:
    with structlog.testing.capture_logs() as captured:
        yield captured


def remove(path: pathlib.Path) -> None:
    path.unlink()


def rename(path: pathlib.Path, *lines: str) -> None:
    fresh = path.with_name("fresh")
    write(fresh, *lines)
    fresh.rename(path)


def swap(path: pathlib.Path, *lines: str) -> None:
    """Replace the file in the same way as the kubelet does in a ConfigMap volume.

    The path of the configuration file leads through two symbolic links into a directory, and this directory is replaced.
    """
    folder = path.parent
    old = (folder / "..data").readlink() if (folder / "..data").is_symlink() else None
    new = pathlib.Path(tempfile.mkdtemp(prefix="..", dir=folder))
    write(new / path.name, *lines)
    (folder / "..data_tmp").symlink_to(new.name)
    (folder / "..data_tmp").rename(folder / "..data")
    if old is None:
        path.unlink(missing_ok=True)
        path.symlink_to(f"..data/{path.name}")
    else:
        (folder / old / path.name).unlink()
        (folder / old).rmdir()


@pytest.mark.parametrize("replace", [write, rename, swap])
async def test_a_new_configuration_file_is_applied_whichever_way_the_old_file_was_replaced(
    path: pathlib.Path, process: Process, replace: Callable[..., None], logs: Logs
) -> None:
    if replace is swap:
        swap(path)
    async with running_task(process.reloader.run()):
        replace(path, "ipvs: {scheduler: wrr}")
        assert (await process.until_applied()).translation.scheduler == "wrr"
        replace(path, "ipvs: {scheduler: lc}")
        assert (await process.until_applied()).translation.scheduler == "lc"
    assert {"event": "configuration_changed", "log_level": "info", "applied": ["ipvs.scheduler"]} in logs


async def test_a_change_that_inotify_does_not_report_is_noticed_by_polling(
    path: pathlib.Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "POLL_S", 0.05)
    monkeypatch.setattr("ipvsproxy.daemon.base.inotify._libc.inotify_init1", lambda _: -1, raising=False)
    async with running_task(process.reloader.run()):
        write(path, "ipvs: {scheduler: wrr}")
        assert (await process.until_applied()).translation.scheduler == "wrr"


async def test_a_refused_file_is_not_applied_but_reported_with_its_field_and_line(
    path: pathlib.Path, process: Process, logs: Logs
) -> None:
    await process.check()
    await process.check_changed("oomScoreAdj: x")
    await process.check()
    (line,) = logs
    assert line["event"] == "configuration_refused"
    assert line["error"] == f"{path}:4: oomScoreAdj: 'x' must be a whole number"
    assert process.applied == []
    remove(path)
    await process.check()
    assert logs[-1]["error"].endswith(" cannot be read: No such file or directory")
    await process.check_changed("oomScoreAdj: 5")
    assert [config.oom_score_adj for config in process.applied] == [5]


async def test_a_configuration_file_that_could_not_be_read_is_read_again_even_if_it_does_not_change(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, logs: Logs
) -> None:
    monkeypatch.setattr(reload, "LONGEST_RETRY_S", 0.0)
    process = Process(path)
    write(path, "ipvs: {scheduler: wrr}")
    content = Mock(read_bytes=Mock(return_value=await asyncio.to_thread(path.read_bytes)))  # a moment before
    remove(path)
    for _ in range(3):
        await process.reloader.check(content)
    await process.check_changed("ipvs: {scheduler: wrr}")
    assert [config.translation.scheduler for config in process.applied] == ["wrr"]
    assert process.outcomes == [False, False, False, True]
    assert [line["event"] for line in logs] == ["configuration_refused", "configuration_changed"]


async def test_the_configuration_is_logged_as_unchanged_if_a_refused_file_is_reverted(process: Process, logs: Logs) -> None:
    await process.check()
    await process.check_changed("oomScoreAdj: x")
    await process.check_changed()
    await process.check()
    assert [line["event"] for line in logs] == ["configuration_refused", "configuration_unchanged"]
    assert process.applied == []


async def test_the_previous_configuration_stays_applied_if_a_new_configuration_cannot_be_applied(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, logs: Logs
) -> None:
    monkeypatch.setattr(reload, "LONGEST_RETRY_S", 0.0)
    process = Process(path)
    before = process.reloader.config
    process.failures = ["no memory", "no memory", "no buffers"]
    write(path, "ipvs: {scheduler: wrr}", "metricsBindAddress: 127.0.0.1:1")
    for _ in range(3):
        await process.check()
        assert process.reloader.config is before
    await process.check()
    await process.check()
    assert [config.translation.scheduler for config in process.applied] == ["wrr"]
    assert process.reloader.config is process.applied[0]
    assert process.outcomes == [False, False, False, True]
    assert [(line["event"], line.get("error")) for line in logs] == [
        ("reload_failed", "no memory"),
        ("reload_failed", "no buffers"),
        ("configuration_changed", None),
        ("restart_needed", None),
    ]
    assert logs[0]["settings"] == ["ipvs.scheduler"]


@pytest.mark.parametrize("how", ["asked", "changed"])
async def test_a_failed_configuration_is_retried_at_once_after_a_signal_or_a_change_of_the_file(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, logs: Logs, how: str
) -> None:
    monkeypatch.setattr(reload, "FIRST_RETRY_S", 1000.0)
    monkeypatch.setattr(reload, "LONGEST_RETRY_S", 1000.0)
    process = Process(path)
    process.failures = ["no memory"]
    await process.check_changed("ipvs: {scheduler: wrr}")
    await process.check()
    assert process.outcomes == [False]
    assert logs[-1]["retry_in_s"] >= 500
    if how == "asked":
        process.reloader.ask()
    else:
        write(path, "ipvs: {scheduler: wrr}", "oomScoreAdj: 5")
    await process.check()
    assert [config.translation.scheduler for config in process.applied] == ["wrr"]


async def test_a_failed_reload_is_logged_once_if_the_file_changes_during_the_reading(
    path: pathlib.Path, process: Process, logs: Logs
) -> None:
    process.failures = ["no memory"] * 3
    write(path, "ipvs: {scheduler: wrr}")
    await process.reloader.check(Mock(read_bytes=HEAD.encode))  # this read returns the content before the change
    await process.check()
    assert process.outcomes == [False, False]
    assert [line["event"] for line in logs] == ["reload_failed"]
    process.reloader.ask()
    await process.check()
    assert [line["event"] for line in logs] == ["reload_failed"] * 2, "a signal has a line"


async def test_a_configuration_that_could_not_be_applied_is_forgotten_when_the_file_is_reverted(
    process: Process, logs: Logs
) -> None:
    process.failures = ["no memory"] * 3
    for line in ("", "oomScoreAdj: x", ""):
        await process.check_changed("ipvs: {scheduler: wrr}")
        await process.check_changed(line)
        await process.check()
    failed, back, refused = "reload_failed", "configuration_unchanged", "configuration_refused"
    assert [line["event"] for line in logs] == [failed, back, failed, refused, failed, back]
    assert (process.outcomes, process.applied) == ([False, True, False, False, False, True], [])


async def test_a_change_of_a_setting_that_needs_a_restart_is_reported_but_not_applied(process: Process, logs: Logs) -> None:
    await process.check_changed("hostnameOverride: other", "metricsBindAddress: 127.0.0.1:1", "ipvs: {strictARP: true}", NFTABLES)
    (config,) = process.applied
    assert (config.node_name, config.strict_arp) == ("node-a", True)
    assert config.drivers.rules_backend is Backend.IPTABLES
    assert config.on_host({}, "rr", Backend.IPTABLES, ()).settings.node_name == "node-a"
    assert config.servers == process.reloader.config.servers
    assert str(config.servers.metrics) == "127.0.0.1:10249"
    assert config.values["metricsBindAddress"] == "127.0.0.1:10249"
    assert logs[-1] == {
        "event": "restart_needed",
        "log_level": "warning",
        "settings": ["hostnameOverride", "ipvsproxy.rulesBackend", "metricsBindAddress"],
    }


async def test_each_option_that_needs_a_restart_keeps_its_value_while_another_option_is_applied(process: Process) -> None:
    allowed = "ipvsproxy: {allowServiceAddresses: [192.0.2.0/24], routeProtocol: 99, serviceMetricsLimit: 7, drainDeadline: 9s}"
    await process.check_changed(allowed)
    (config,) = process.applied
    assert config.policy.drain_deadline_s == 9
    assert (config.translation.allowed_addresses, config.drivers.route_protocol) == ((), ROUTE_PROTOCOL)
    assert config.servers.service_metrics_limit == 20_000


async def test_a_flag_overrides_the_configuration_file_even_after_the_file_has_changed(path: pathlib.Path, logs: Logs) -> None:
    process = Process(path, "--hostname-override=node-b", "-v=2")
    await process.check_changed("hostnameOverride: other", "logging: {verbosity: 9}", "iptables: {masqueradeBit: 15}")
    (config,) = process.applied
    assert (config.node_name, config.logging.verbosity, config.translation.masquerade_bit) == ("node-b", 2, 15)
    assert logs[-1]["applied"] == ["iptables.masqueradeBit"]


async def test_an_unchanged_file_is_read_again_after_a_hangup_signal(process: Process, logs: Logs) -> None:
    await process.check()
    assert logs == []
    process.reloader.ask()
    await process.check()
    assert [line["event"] for line in logs] == ["configuration_unchanged"]


async def test_a_hangup_signal_is_logged_if_there_is_no_configuration_file(logs: Logs) -> None:
    config = loading.from_flags()

    async def apply(_: Config) -> None:
        raise AssertionError

    reloader = Reloader(config, lambda: config, apply)
    reloader.ask()
    async with running_task(reloader.run()):
        await asyncio.sleep(0)
    assert logs[0]["event"] == "no_configuration_file"
