"""The configuration as a KubeProxyConfiguration v1alpha1, for ``--write-config-to`` and ``/configz``.

kube-proxy can read the file. It has a section ``ipvsproxy`` only if one of our own options differs from its default.
"""

from collections.abc import Mapping

import yaml

from ipvsproxy.config import catalogue, file, syntax
from ipvsproxy.config.given import Value
from ipvsproxy.config.option import Kind, Option, Status
from ipvsproxy.config.settings import Config

Document = dict[str, "Document | object"]


def render(config: Config) -> str:
    """The file's text. Reading the file gives an equal configuration, except for options that are flags only."""
    return str(yaml.safe_dump(document(config), default_flow_style=False, width=10_000))


def document(config: Config) -> Document:
    """The object as JSON types, with every field."""
    root: Document = {"apiVersion": file.API_VERSION, "kind": file.KIND}
    for key, value in config.values.items():
        option = catalogue.BY_KEY[key]
        if option.status is Status.OWN and value == syntax.parse(option.kind, option.default):
            continue
        *sections, name = option.field.split(".")
        section = root
        for part in sections:
            below = section.setdefault(part, {})
            if not isinstance(below, dict):
                raise TypeError(option.field)
            section = below
        section[name] = _plain(option, value)
    return root


def flags(config: Config) -> Mapping[str, str]:
    """The effective value of each flag that has a field in the file, as text for a command line."""
    options = ((catalogue.BY_KEY[key], value) for key, value in config.values.items())
    return {option.flag: _flag_value(option, value) for option, value in options if option.flag}


def _flag_value(option: Option, value: Value) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={str(choice).lower()}" for name, choice in value.items())
    if isinstance(value, tuple):
        return ",".join(value)
    plain = _plain(option, value)
    return str(plain).lower() if isinstance(plain, bool) else str(plain)


def _plain(option: Option, value: Value) -> object:
    if option.kind is Kind.DURATION and isinstance(value, float):
        return syntax.render_duration(value)
    if option.kind is Kind.PATTERNS and isinstance(value, tuple):
        return [{"filePattern": name, "verbosity": int(level)} for name, _, level in (item.partition("=") for item in value)]
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
