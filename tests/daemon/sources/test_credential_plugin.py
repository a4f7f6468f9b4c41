"""Covers credential plugins: only one runs at a time, their processes end, and failures are reported.

The tests start real processes.
"""

import asyncio
import json
import pathlib
import stat
import time

import pytest

from ipvsproxy.daemon.sources import credentials
from ipvsproxy.daemon.sources.credentials import Plugin, PluginError, PluginRunner, PluginStatus, PluginVariable
from ipvsproxy.daemon.sources.source import Trouble
from tests.support import api_server
from tests.support.api_server import ApiServer
from tests.support.api_store import SERVICES
from tests.support.following import following, service, wait_for_trouble

VERSION = "client.authentication.k8s.io/v1"


def shell(script: str) -> Plugin:
    return Plugin(api_version=VERSION, command="/bin/sh", args=("-c", script))


def answer(**status: str) -> str:
    return json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "status": status})


def is_running(pid: str) -> bool:
    """Whether a process is still running. A process whose parent has ended is a zombie until its new parent waits for it."""
    try:
        return pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process may end after its file was opened
        return False


def wait_until_ended(pids: list[str]) -> None:
    """A killed process ends only when the kernel schedules it again, which may take seconds on a busy machine."""
    deadline_s = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "a process still runs"
        time.sleep(0.01)


async def test_a_hanging_plugin_is_killed_with_its_child_processes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setattr(credentials, "PLUGIN_TIMEOUT_S", 5.0)
    with pytest.raises(PluginError, match="credential plugin /bin/sh has not ended after 5 s, and was killed"):
        await PluginRunner().ask(shell(f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"))
    plugin, child = pids.read_text().split()
    wait_until_ended([plugin, child])


async def test_concurrent_callers_of_the_same_plugin_share_its_answer(tmp_path: pathlib.Path) -> None:
    runs = tmp_path / "runs"
    plugin = shell(f"echo run >> {runs}; echo '{answer(token='x')}'")
    runner = PluginRunner()
    assert await asyncio.gather(*[runner.ask(plugin) for _ in range(3)]) == [PluginStatus(token="x")] * 3
    assert runs.read_text().split() == ["run"]
    await runner.ask(plugin)
    assert runs.read_text().split() == ["run", "run"], "an answer is not kept: the next one may differ"


async def test_a_second_plugin_waits_until_the_first_plugin_has_ended(tmp_path: pathlib.Path) -> None:
    runs = tmp_path / "runs"
    runner = PluginRunner()
    script = f"echo begin >> {runs}; echo end >> {runs}; echo '{answer(token='x')}'"
    await asyncio.gather(runner.ask(shell(script)), runner.ask(shell(f"true; {script}")))
    assert runs.read_text().split() == ["begin", "end", "begin", "end"]


async def test_a_cancelled_caller_does_not_end_the_plugin_for_other_callers(tmp_path: pathlib.Path) -> None:
    go = tmp_path / "go"
    plugin = shell(f"while ! test -e {go}; do :; done; echo '{answer(token='x')}'")
    runner = PluginRunner()
    leaves, stays = (asyncio.create_task(runner.ask(plugin)) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    go.touch()
    assert await stays == PluginStatus(token="x")
    assert leaves.cancelled()


async def test_a_plugin_receives_its_environment_and_the_request() -> None:
    script = 'printf \'{"apiVersion":"%s","kind":"ExecCredential","status":{"token":"%s"}}\' "$WHICH" "${#KUBERNETES_EXEC_INFO}"'
    plugin = Plugin(VERSION, "/bin/sh", ("-c", script), (PluginVariable("WHICH", VERSION),))
    request = json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "spec": {"interactive": False}})
    assert await PluginRunner().ask(plugin) == PluginStatus(token=str(len(request)))


@pytest.mark.parametrize(
    ("plugin", "sentence"),
    [
        (shell("echo why >&2; exit 3"), "credential plugin /bin/sh: exit status 3. why"),
        (shell("echo '{secret'"), "credential plugin /bin/sh: its answer is not an ExecCredential with a status"),
        (
            shell(f"echo '{answer(expirationTimestamp='secret')}'"),
            "credential plugin /bin/sh: its answer has neither a token nor",
        ),
        (
            shell(f"echo '{answer(clientCertificateData='secret')}'"),
            "credential plugin /bin/sh: its answer has neither a token",
        ),
        (
            shell(f"echo '{answer(token='x').replace('/v1', '/v9')}'"),
            f"credential plugin /bin/sh: its answer is not of version {VERSION}",
        ),
        (Plugin(VERSION, "/absent/plugin"), "credential plugin /absent/plugin cannot be run: No such file or directory"),
        (Plugin(VERSION, "/absent\x00"), "credential plugin /absent\x00 cannot be run: ValueError"),
    ],
)
async def test_a_failing_plugin_is_reported_without_secrets(plugin: Plugin, sentence: str) -> None:
    with pytest.raises(PluginError) as raised:
        await PluginRunner().ask(plugin)
    assert str(raised.value).startswith(sentence)
    assert "secret" not in str(raised.value)


async def test_the_source_reports_a_missing_plugin_and_runs_the_plugin_when_it_exists(tmp_path: pathlib.Path) -> None:
    plugin = tmp_path / "plugin"
    user = {"exec": {"apiVersion": VERSION, "command": str(plugin), "args": None, "env": None}}
    async with ApiServer(token="from-plugin") as server:
        server.put(SERVICES, service("web"))
        async with following(server, tmp_path, user=user) as running:
            await running.source.check()
            await wait_for_trouble(running, Trouble.CREDENTIALS)
            assert f"credential plugin {plugin} cannot be run: No such file" in running.source.describe()
            written = tmp_path / "written"
            written.write_text(f"#!/bin/sh\necho '{answer(token='from-plugin')}'\n")
            written.chmod(written.stat().st_mode | stat.S_IXUSR)
            written.rename(plugin)
            await running.sink.until(running.sink.has("web"))


async def test_the_check_of_the_kubeconfig_does_not_run_a_plugin(tmp_path: pathlib.Path) -> None:
    ran = tmp_path / "ran"
    user = {"exec": {"apiVersion": VERSION, "command": "touch", "args": [str(ran)]}}
    kubeconfig = api_server.write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1", user=user)
    files = credentials.Credentials(kubeconfig, "", tmp_path)
    await files.read(ask_plugin=False)
    assert not ran.exists()
    with pytest.raises(credentials.SourceError, match="credential plugin touch: its answer is not an ExecCredential"):
        await files.read()
    assert ran.exists()
