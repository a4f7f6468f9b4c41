"""Where the API server is and how it is spoken to: kubeconfig, ``--master``, or the pod's service account.

kubernetes-asyncio reads them, but for credential plugins: what these answer is put into the kubeconfig before. What its messages,
and YAML's, could repeat of secrets is not told.
"""

import base64
import os
import pathlib
from typing import Any

import msgspec
import yaml

from ipvsproxy.daemon.sources import credential_plugin, kubernetes_client

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
LONGEST_MESSAGE = 300


class SourceError(Exception):
    """The configuration cannot work; one sentence for the operator."""


class Credentials:
    """What the operator named: files that are read again each time.

    ``kubeconfig`` is a path; ``master`` a URL that goes before the kubeconfig's; with neither, the service account is used.
    """

    def __init__(self, kubeconfig: str, master: str, service_account: pathlib.Path) -> None:
        self._kubeconfig = kubeconfig
        self._master = master
        self._service_account = service_account
        self._plugins = credential_plugin.Runner()

    async def check(self) -> kubernetes_client.Configuration:
        """As ``read``, without a credential plugin: one that fails is waited for, like an API server that does not answer.

        Raises:
            SourceError: they cannot work, whatever a plugin answers.
        """
        return await self._load(None)

    async def read(self) -> kubernetes_client.Configuration:
        """What the library makes of them now.

        Raises:
            SourceError: they cannot work.
        """
        return await self._load(self._plugins)

    async def _load(self, plugins: credential_plugin.Runner | None) -> kubernetes_client.Configuration:
        configuration = kubernetes_client.Configuration(host="")
        if self._kubeconfig:
            await _load_kubeconfig(pathlib.Path(self._kubeconfig), configuration, plugins)
        elif not self._master:
            _load_service_account(self._service_account, configuration)
        host = (self._master or configuration.host or "").rstrip("/")
        if any(mark in host for mark in "@?#"):  # Not repeated: it would be in every log line, with the password.
            raise SourceError(f"{self._kubeconfig or '--master'}: the API server's URL must not hold credentials, or a query")
        if not host.startswith(("http://", "https://")):
            raise SourceError(f"{self._kubeconfig or '--master'}: {host!r} is not the URL of an API server")
        configuration.host = host
        if not configuration.api_key.get("BearerToken", "").strip().isprintable():
            raise SourceError("the bearer token holds characters that cannot be part of a token")
        return configuration


async def _load_kubeconfig(
    path: pathlib.Path, configuration: kubernetes_client.Configuration, plugins: credential_plugin.Runner | None
) -> None:
    try:
        content = _content(path)
        await _put_answer(content, plugins)
        await _loader(path, content).load_and_set(configuration)
    except OSError as error:
        file = error.filename or "credentials"
        raise SourceError(f"kubeconfig {path}: {file}: {error.strerror or 'cannot be read'}") from error
    except (kubernetes_client.ConfigException, credential_plugin.PluginError) as error:
        raise SourceError(f"kubeconfig {path}: {one_line(str(error))}") from error
    except msgspec.ValidationError as error:
        raise SourceError(f"kubeconfig {path}: the user's exec: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        # What the library does with an entry of a wrong type; its text may hold the entry.
        raise SourceError(f"kubeconfig {path}: an entry is empty or of a wrong type ({type(error).__name__})") from error


def _content(path: pathlib.Path) -> dict[str, Any]:
    # The file is read here, because messages of the library's own reader, and of YAML's, may repeat lines with secrets.
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


def _loader(path: pathlib.Path, content: dict[str, Any]) -> kubernetes_client.KubeConfigLoader:
    return kubernetes_client.KubeConfigLoader(config_dict=content, config_base_path=str(path.absolute().parent))


async def _put_answer(content: dict[str, Any], plugins: credential_plugin.Runner | None) -> None:
    """Put what the current user's plugin answers in its place; without ``plugins``, nothing."""
    user = _current_user(content)
    if "exec" not in user or "auth-provider" in user:  # as the library, for which the provider goes first
        return
    plugin = msgspec.convert(user.pop("exec"), credential_plugin.Plugin)
    if plugins is None:
        return
    status = await plugins.ask(plugin)
    if status.token:
        user.pop("tokenFile", None)
        user["token"] = status.token
    if status.client_certificate_data:
        user["client-certificate-data"] = base64.b64encode(status.client_certificate_data.encode()).decode()
        user["client-key-data"] = base64.b64encode(status.client_key_data.encode()).decode()


def _current_user(content: dict[str, Any]) -> dict[str, Any]:
    """The user of the current context; empty where there is none, which the library has words for."""
    context = _named(content, "contexts", content.get("current-context")).get("context")
    user = _named(content, "users", context.get("user") if isinstance(context, dict) else None).get("user")
    return user if isinstance(user, dict) else {}


def _named(content: dict[str, Any], section: str, name: object) -> dict[str, Any]:
    entries = content.get(section)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name:
            return entry
    return {}


def _load_service_account(directory: pathlib.Path, configuration: kubernetes_client.Configuration) -> None:
    loader = kubernetes_client.InClusterConfigLoader(
        token_filename=str(directory / "token"),
        cert_filename=str(directory / "ca.crt"),
        try_refresh_token=False,
        environ=os.environ,
    )
    try:
        loader.load_and_set(configuration)
    except (kubernetes_client.ConfigException, OSError, ValueError) as error:
        reason = one_line(str(error)).rstrip(".")
        raise SourceError(f"no --kubeconfig was given, and the service account of a pod cannot be used: {reason}") from error


def one_line(text: str) -> str:
    """What others wrote, as it may stand in a log line."""
    return "".join(character if character.isprintable() else " " for character in text)[:LONGEST_MESSAGE]
