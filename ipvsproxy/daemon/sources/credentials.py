"""The address and the credentials of the API server.

The credentials come from a kubeconfig, ``--master``, or the service account of the pod. The library kubernetes-asyncio reads the
address and the credentials. If the kubeconfig names a credential plugin, this module runs the plugin, and passes the plugin's
answer to the library. Messages of the library and of the YAML parser are not shown if the messages might contain secrets.

Only one process of a credential plugin runs at a time. The plugin runs for a limited time, and no process of its process group
remains afterwards. Kubernetes documents the protocol of credential plugins on the page "Authenticating", section "client-go
credential plugins". The client library could run plugins itself, but the library does not end a plugin that hangs.

The library's package ``client`` imports all of its 800 modules of models and APIs, and every module of the library imports
``client``. Importing all 800 modules would take 34 MB of memory and 0.3 to 1 s, for classes that are not used. The package
``client`` contains only imports, so its code need not be executed (see ``packages``). If another module imports the library, that
module still gets the whole library. A version of the library that cannot be imported in parts is imported as a whole, which takes
more memory and time.
"""

import asyncio
import base64
import contextlib
import importlib
import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import yaml

from ipvsproxy.kernel.base import packages

LIBRARY = "kubernetes_asyncio"
UNUSED = "urllib3"
"""A package that the library imports for a single function, which ipvsproxy never calls. The package has 30 modules, and its
import takes 10 ms (60 ms on the test kernel)."""
PARTS = (f"{LIBRARY}.client.rest", f"{LIBRARY}.config.incluster_config", f"{LIBRARY}.config.kube_config")


@contextlib.contextmanager
def _in_parts() -> Iterator[None]:
    """Inside the ``with`` block, only the needed parts of the library are imported.

    If these parts cannot be imported alone, the whole library is imported.
    """
    if LIBRARY not in sys.modules:
        try:
            _import_parts()
        except Exception:  # noqa: BLE001 - another version of the library may raise any exception
            for name in [name for name in sys.modules if name.partition(".")[0] in {LIBRARY, UNUSED}]:
                del sys.modules[name]
    yield


def _import_parts() -> None:
    packages.defer(UNUSED)
    packages.defer(LIBRARY)
    names = vars(packages.defer(f"{LIBRARY}.client"))
    names["Configuration"] = importlib.import_module(f"{LIBRARY}.client.configuration").Configuration
    names["ApiClient"] = type("ApiClient", (), {})  # functions of kube_config that are never called refer to this name
    for part in PARTS:
        importlib.import_module(part)
    del names["ApiClient"]


with _in_parts():
    from kubernetes_asyncio.client.configuration import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject
    from kubernetes_asyncio.config.config_exception import ConfigException
    from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

__all__ = ["Configuration", "Credentials", "RESTClientObject", "SourceError"]

PLUGIN_TIMEOUT_S = 15.0
"""The longest time for which a plugin may run. A command such as ``verify`` waits longer than this for its first lists. If a
plugin hangs, the command can therefore name the plugin in its last message."""


class PluginError(Exception):
    """The credential plugin has given no credentials. The message of the error contains the name of the plugin."""


class PluginVariable(msgspec.Struct, frozen=True):
    """An environment variable for the plugin."""

    name: str
    value: str


class Plugin(msgspec.Struct, frozen=True, rename="camel"):
    """The fields that ipvsproxy uses from the ``exec`` entry of a user in a kubeconfig."""

    api_version: str
    command: Annotated[str, msgspec.Meta(min_length=1)]
    args: tuple[str, ...] | None = None
    env: tuple[PluginVariable, ...] | None = None


class PluginStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The credentials from a plugin: a token, or a client certificate and its key in PEM, or both."""

    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""


class _Answer(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    status: PluginStatus


class PluginRunner:
    """Runs at most one plugin process at a time. Callers that request the same plugin at the same time share one answer."""

    def __init__(self) -> None:
        self._plugin: Plugin | None = None
        self._run: asyncio.Task[PluginStatus] | None = None

    async def ask(self, plugin: Plugin) -> PluginStatus:
        """The current credentials of a plugin.

        Raises:
            PluginError: the plugin cannot be run, fails, does not end in time, or gives no credentials.
        """
        while self._run and not self._run.done() and self._plugin != plugin:
            await asyncio.wait([self._run])
        if not self._run or self._run.done():
            self._plugin, self._run = plugin, asyncio.create_task(_ask(plugin), name="credential plugin")
        return await asyncio.shield(self._run)


async def _ask(plugin: Plugin) -> PluginStatus:
    name = f"credential plugin {plugin.command}"
    try:
        async with asyncio.timeout(PLUGIN_TIMEOUT_S):
            status, output, errors = await _output(plugin)
    except TimeoutError as error:
        raise PluginError(f"{name} has not ended after {PLUGIN_TIMEOUT_S:.0f} s, and was killed") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else ""
        raise PluginError(f"{name} cannot be run: {reason or type(error).__name__}") from error
    if status:
        raise PluginError(f"{name}: exit status {status}. {errors.decode(errors='replace').strip()}")
    try:
        answer = msgspec.json.decode(output, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the answer is not shown, because the answer may contain secrets
        raise PluginError(f"{name}: its answer is not an ExecCredential with a status") from error
    if answer.api_version != plugin.api_version:
        raise PluginError(f"{name}: its answer is not of version {plugin.api_version}")
    if not answer.status.token and not (answer.status.client_certificate_data and answer.status.client_key_data):
        raise PluginError(f"{name}: its answer has neither a token nor a certificate with its key")
    return answer.status


async def _output(plugin: Plugin) -> tuple[int, bytes, bytes]:
    """Runs the plugin; returns its exit status, standard output and standard error.

    Always kills the plugin's process group at the end.
    """
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


SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
LONGEST_MESSAGE = 300


class SourceError(Exception):
    """The configuration of the source cannot work. The message of the error is one sentence for the operator."""


class Credentials:
    """The credential files of the operator, which are read again for each connection.

    ``kubeconfig`` is a path, and ``master`` is a URL that overrides the URL in the kubeconfig. If both ``kubeconfig`` and
    ``master`` are empty, the service account is used.
    """

    def __init__(self, kubeconfig: str, master: str, service_account: pathlib.Path) -> None:
        self._kubeconfig = kubeconfig
        self._master = master
        self._service_account = service_account
        self._plugins = PluginRunner()

    async def read(self, *, ask_plugin: bool = True) -> Configuration:
        """Makes the configuration object of the library kubernetes-asyncio from the current files.

        If ``ask_plugin`` is false, no credential plugin runs. At the start, a failing plugin counts as an API server that does
        not answer, not as a wrong configuration.

        Raises:
            SourceError: the credentials cannot work.
        """
        plugins = self._plugins if ask_plugin else None
        configuration = Configuration(host="")
        if self._kubeconfig:
            await _load_kubeconfig(pathlib.Path(self._kubeconfig), configuration, plugins)
        elif not self._master:
            _load_service_account(self._service_account, configuration)
        host = (self._master or configuration.host or "").rstrip("/")
        if any(mark in host for mark in "@?#"):  # the URL is not shown, because a URL may contain a password
            raise SourceError(f"{self._kubeconfig or '--master'}: the API server's URL must not hold credentials, or a query")
        if not host.startswith(("http://", "https://")):
            raise SourceError(f"{self._kubeconfig or '--master'}: {host!r} is not the URL of an API server")
        configuration.host = host
        if not configuration.api_key.get("BearerToken", "").strip().isprintable():
            raise SourceError("the bearer token holds characters that cannot be part of a token")
        return configuration


async def _load_kubeconfig(path: pathlib.Path, configuration: Configuration, plugins: PluginRunner | None) -> None:
    try:
        await _Loader(path, _content(path), plugins).load_and_set(configuration)
    except OSError as error:
        file = error.filename or "credentials"
        raise SourceError(f"kubeconfig {path}: {file}: {error.strerror or 'cannot be read'}") from error
    except (ConfigException, PluginError) as error:
        raise SourceError(f"kubeconfig {path}: {one_line(str(error))}") from error
    except msgspec.ValidationError as error:
        raise SourceError(f"kubeconfig {path}: the user's exec: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        # The library raises these exceptions for an entry of a wrong type; the messages of the exceptions may contain the entry.
        raise SourceError(f"kubeconfig {path}: an entry is empty or of a wrong type ({type(error).__name__})") from error


def _content(path: pathlib.Path) -> dict[str, Any]:
    # The library must not read the file, because the library's error messages may contain lines with secrets. For the same
    # reason, messages of the YAML parser are not passed on.
    try:
        content: Any = yaml.safe_load(path.read_text())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise SourceError(f"kubeconfig {path}: line {line} is not YAML") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise SourceError(f"kubeconfig {path}: is not YAML") from error
    if not isinstance(content, dict):
        raise SourceError(f"kubeconfig {path}: holds no configuration")
    return content


class _Loader(KubeConfigLoader):
    """The library's loader, which runs credential plugins only through ``plugins``; if ``plugins`` is None, no plugin runs."""

    def __init__(self, path: pathlib.Path, content: dict[str, Any], plugins: PluginRunner | None) -> None:
        super().__init__(config_dict=content, config_base_path=str(path.absolute().parent))
        self._plugins = plugins

    async def load_from_exec_plugin(self) -> bool:
        """Overrides a method of the library: puts the plugin's answer into the kubeconfig user, where the library finds it."""
        user: dict[str, Any] = self._user.value if self._user else {}
        plugin = msgspec.convert(user["exec"], Plugin)
        if self._plugins:
            status = await self._plugins.ask(plugin)
            if status.token:
                user.pop("tokenFile", None)
                user["token"] = status.token
            if status.client_certificate_data:
                user["client-certificate-data"] = base64.b64encode(status.client_certificate_data.encode()).decode()
                user["client-key-data"] = base64.b64encode(status.client_key_data.encode()).decode()
        return False


def _load_service_account(directory: pathlib.Path, configuration: Configuration) -> None:
    token, authority = str(directory / "token"), str(directory / "ca.crt")
    loader = InClusterConfigLoader(token_filename=token, cert_filename=authority, try_refresh_token=False, environ=os.environ)
    try:
        loader.load_and_set(configuration)
    except (ConfigException, OSError, ValueError) as error:
        reason = one_line(str(error)).rstrip(".")
        raise SourceError(f"no --kubeconfig was given, and the service account of a pod cannot be used: {reason}") from error


def one_line(text: str) -> str:
    """The text of another program in a form for log lines: without control characters, and limited in length."""
    return "".join(character if character.isprintable() else " " for character in text)[:LONGEST_MESSAGE]
