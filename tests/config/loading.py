"""Builds configurations for tests from a command line and at most one in-memory file."""

import json
import textwrap

import pytest

from ipvsproxy.config import load
from ipvsproxy.config.option import ConfigError, Kind, Option, Value
from ipvsproxy.config.settings import Config

PATH = "/etc/kube-proxy.conf"
HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n"
"""The first three lines of every file that ``from_file`` reads."""

EXAMPLES: dict[Kind, Value] = {
    Kind.TEXT: "some text",
    Kind.BOOLEAN: True,
    Kind.INTEGER: 12,
    Kind.NUMBER: 2.5,
    Kind.DURATION: 90.0,
    Kind.LIST: ("10.0.0.0/8", "fd00::/8"),
    Kind.GATES: {"A": True, "B": False},
    Kind.PATTERNS: ("a=1", "b*=2"),
    Kind.QUANTITY: "2Ki",
}
"""An example of a value for each kind of option."""


def load_with(arguments: list[str], content: bytes = b"", command: str = "run") -> Config:
    """The configuration of a command with these arguments on the host Host-1, where ``PATH`` is the only file."""

    def read_file(path: str) -> bytes:
        if path != PATH:
            raise FileNotFoundError(2, "No such file or directory", path)
        return content

    return load.load(arguments, hostname="Host-1", read_file=read_file, command=command)


def from_flags(*arguments: str) -> Config:
    """The configuration that results from ``--proxy-mode=ipvs`` and these flags."""
    return load_with(["--proxy-mode=ipvs", *arguments])


def from_file(text: str, *arguments: str) -> Config:
    """The configuration from these flags and a file. The file consists of ``HEAD`` and ``text``."""
    return load_with(["--config", PATH, *arguments], (HEAD + textwrap.dedent(text)).encode())


def file_line(option: Option, value: object) -> str:
    """The line of a configuration file that gives this value to the field of an option."""
    top, *names = option.field.split(".")
    for name in reversed(names):
        value = {name: value}
    return f"{top}: {json.dumps(value)}"


def problems_of_flags(*arguments: str, command: str = "run") -> list[str]:
    """Every reason why a command refuses these flags."""
    with pytest.raises(ConfigError) as raised:
        load_with(["--proxy-mode=ipvs", *arguments], command=command)
    return [str(problem) for problem in raised.value.problems]


def problems_of_file(text: str, *arguments: str) -> list[str]:
    """The reasons why a configuration file is refused, without the file's path at the beginning of each reason."""
    with pytest.raises(ConfigError) as raised:
        from_file(text, *arguments)
    return [str(problem).removeprefix(f"{PATH}:") for problem in raised.value.problems]
