"""Runs a credential plugin of a kubeconfig: one at a time, for a bounded time, and without a leftover of its process group.

The protocol is on the page "Authenticating", section "client-go credential plugins". The client library has a runner of its own,
which does not end a program that hangs.
"""

import asyncio
import contextlib
import json
import os
import signal
from typing import Annotated

import msgspec

TIMEOUT_S = 15.0
"""Shorter than the wait of a command for its first lists, so that its last message names the plugin."""


class PluginError(Exception):
    """The plugin has given no credentials. The message names it."""


class Variable(msgspec.Struct, frozen=True):
    """A variable of the plugin's environment."""

    name: str
    value: str


class Plugin(msgspec.Struct, frozen=True, rename="camel"):
    """The used fields of the entry ``exec`` of a user of a kubeconfig."""

    api_version: str
    command: Annotated[str, msgspec.Meta(min_length=1)]
    args: tuple[str, ...] | None = None
    env: tuple[Variable, ...] | None = None


class Status(msgspec.Struct, frozen=True, rename="camel"):
    """The credentials: a token, or a client certificate and its key in PEM, or both."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""


class _Answer(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    status: Status


class Runner:
    """Runs at most one plugin. Callers that ask the same plugin at the same time share its answer."""

    def __init__(self) -> None:
        self._plugin: Plugin | None = None
        self._run: asyncio.Task[Status] | None = None

    async def ask(self, plugin: Plugin) -> Status:
        """The present credentials of a plugin.

        Raises:
            PluginError: the plugin cannot be run, fails, does not end in time, or gives no credentials.
        """
        while self._run and not self._run.done() and self._plugin != plugin:
            await asyncio.wait([self._run])
        if not self._run or self._run.done():
            self._plugin, self._run = plugin, asyncio.create_task(_ask(plugin), name="credential plugin")
        return await asyncio.shield(self._run)


async def _ask(plugin: Plugin) -> Status:
    name = f"credential plugin {plugin.command}"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            status, output, errors = await _output(plugin)
    except TimeoutError as error:
        raise PluginError(f"{name} has not ended after {TIMEOUT_S:.0f} s, and was killed") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else ""
        raise PluginError(f"{name} cannot be run: {reason or type(error).__name__}") from error
    if status:
        raise PluginError(f"{name}: exit status {status}. {errors.decode(errors='replace').strip()}")
    try:
        answer = msgspec.json.decode(output, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # Not repeated: it may contain secrets.
        raise PluginError(f"{name}: its answer is no ExecCredential with a status") from error
    if answer.api_version != plugin.api_version:
        raise PluginError(f"{name}: its answer is not of version {plugin.api_version}")
    if not answer.status.token and not (answer.status.client_certificate_data and answer.status.client_key_data):
        raise PluginError(f"{name}: its answer has neither a token nor a certificate with its key")
    return answer.status


async def _output(plugin: Plugin) -> tuple[int, bytes, bytes]:
    """Exit status, standard output, standard error. Kills the plugin's process group in any case."""
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
    given = {variable.name: variable.value for variable in plugin.env or ()}
    process = await asyncio.create_subprocess_exec(
        plugin.command,
        *(plugin.args or ()),
        env={**os.environ, **given, "KUBERNETES_EXEC_INFO": json.dumps(info)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return process.returncode or 0, output, errors
