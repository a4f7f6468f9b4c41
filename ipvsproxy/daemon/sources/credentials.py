"""Address and credentials of the API server: from a kubeconfig, ``--master``, or the service account of the pod.

kubernetes-asyncio reads them, except for credential plugins: their answers are put into the kubeconfig before. Messages of the
library and of YAML that may repeat secrets are not shown.
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
    """The configuration cannot work. The message is one sentence for the operator."""


class Credentials:
    """The operator's files, which are read again each time.

    ``kubeconfig`` is a path; ``master`` is a URL that overrides the one of the kubeconfig; without both, the service account is
    used.
    """

    def __init__(self, kubeconfig: str, master: str, service_account: pathlib.Path) -> None:
        self._kubeconfig = kubeconfig
        self._master = master
        self._service_account = service_account
        self._plugins = credential_plugin.Runner()

    async def check(self) -> kubernetes_client.Configuration:
        """As ``read``, without a credential plugin, which may fail at the start like an API server that does not answer.

        Raises:
            SourceError: the credentials cannot work with any answer of a plugin.
        """
        return await self._load(None)

    async def read(self) -> kubernetes_client.Configuration:
        """The library's configuration from the present files.

        Raises:
            SourceError: the credentials cannot work.
        """
        return await self._load(self._plugins)

    async def _load(self, plugins: credential_plugin.Runner | None) -> kubernetes_client.Configuration:
        configuration = kubernetes_client.Configuration(host="")
        if self._kubeconfig:
            await _load_kubeconfig(pathlib.Path(self._kubeconfig), configuration, plugins)
        elif not self._master:
            _load_service_account(self._service_account, configuration)
        host = (self._master or configuration.host or "").rstrip("/")
        if any(mark in host for mark in "@?#"):  # The URL is not repeated: the password would be in every log line.
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
        # The library raises these for an entry of a wrong type; their message may contain the entry.
        raise SourceError(f"kubeconfig {path}: an entry is empty or of a wrong type ({type(error).__name__})") from error


def _content(path: pathlib.Path) -> dict[str, Any]:
    # Read here, because messages of the library's own reader and of YAML may repeat lines with secrets.
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
    """Replace the plugin of the current user by its answer; without ``plugins``, by nothing."""
    user = _current_user(content)
    if "exec" not in user or "auth-provider" in user:  # as in the library, which prefers the provider
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
    """The user of the current context; empty without one, which the library reports."""
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
    """A foreign text in a form for log lines: printable, and bounded."""
    return "".join(character if character.isprintable() else " " for character in text)[:LONGEST_MESSAGE]
