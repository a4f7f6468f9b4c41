"""Where the API server is and how it is spoken to: kubeconfig, ``--master``, or the pod's service account.

kubernetes-asyncio reads them, and runs credential plugins. What its messages, and YAML's, could repeat of secrets is not told.
"""

import os
import pathlib
from typing import Any

import yaml

from ipvsproxy.daemon import kubernetes_client

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
LONGEST_MESSAGE = 300


class SourceError(Exception):
    """The configuration can not work; one sentence for the operator."""


class Credentials:
    """What the operator named: files that are read again each time.

    ``kubeconfig`` is a path; ``master`` a URL that goes before the kubeconfig's; with neither, the service account is used.
    """

    def __init__(self, kubeconfig: str, master: str, service_account: pathlib.Path) -> None:
        self._kubeconfig = kubeconfig
        self._master = master
        self._service_account = service_account

    async def read(self) -> kubernetes_client.Configuration:
        """What the library makes of them now.

        Raises:
            SourceError: they can not work.
        """
        configuration = kubernetes_client.Configuration(host="")
        if self._kubeconfig:
            await _load_kubeconfig(pathlib.Path(self._kubeconfig), configuration)
        elif not self._master:
            _load_service_account(self._service_account, configuration)
        host = (self._master or configuration.host or "").rstrip("/")
        if any(mark in host for mark in "@?#"):  # Not repeated: it would be in every log line, with the password.
            raise SourceError(f"{self._kubeconfig or '--master'}: the API server's URL must not hold credentials, or a query")
        if not host.startswith(("http://", "https://")):
            raise SourceError(f"{self._kubeconfig or '--master'}: {host!r} is not the URL of an API server")
        configuration.host = host
        if not configuration.api_key.get("BearerToken", "").strip().isprintable():
            raise SourceError("the bearer token holds characters that can not be part of a token")
        return configuration


async def _load_kubeconfig(path: pathlib.Path, configuration: kubernetes_client.Configuration) -> None:
    try:
        await _kubeconfig_loader(path).load_and_set(configuration)
    except OSError as error:
        file = error.filename or "credentials"
        raise SourceError(f"kubeconfig {path}: {file}: {error.strerror or 'can not be read'}") from error
    except kubernetes_client.ConfigException as error:
        raise SourceError(f"kubeconfig {path}: {one_line(str(error))}") from error
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        # What the library does with an entry of a wrong type; its text may hold the entry.
        raise SourceError(f"kubeconfig {path}: an entry is empty or of a wrong type ({type(error).__name__})") from error


def _kubeconfig_loader(path: pathlib.Path) -> kubernetes_client.KubeConfigLoader:
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
    return kubernetes_client.KubeConfigLoader(config_dict=content, config_base_path=str(path.absolute().parent))


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
        raise SourceError(f"no --kubeconfig was given, and the service account of a pod can not be used: {reason}") from error


def one_line(text: str) -> str:
    """What others wrote, as it may stand in a log line."""
    return "".join(character if character.isprintable() else " " for character in text)[:LONGEST_MESSAGE]
