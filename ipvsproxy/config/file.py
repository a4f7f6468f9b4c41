"""Reads and writes the file that ``--config`` names: a KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1) in YAML or JSON.

Parsing is exactly as strict as in kube-proxy. A file is refused if its YAML is invalid, if its object is of another kind, or if a
value has the wrong type. An unknown field is ignored with a notice. If a file has two fields with the same name, the earlier
field is ignored with a notice. kube-proxy ignores unknown fields. It therefore accepts a file with the section ``ipvsproxy:``
(ipvsproxy's additional fields), and logs one line about the section. An unknown field in the section ``ipvsproxy:`` is refused,
because no other program reads that section.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from ipvsproxy.config import catalogue
from ipvsproxy.config.option import (
    Given,
    Kind,
    Likeness,
    Option,
    Problem,
    Value,
    ValuePlace,
    parse_number,
    parse_patterns,
    quoted,
    suggestion,
)
from ipvsproxy.config.settings import Config
from ipvsproxy.config.validate import Values

API_VERSION = "kubeproxy.config.k8s.io/v1alpha1"
KIND = "KubeProxyConfiguration"
OWN_SECTION = "ipvsproxy"

_STRING, _INTEGER, _FLOAT = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_BOOLEAN, _NULL, _TIMESTAMP = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null", "tag:yaml.org,2002:timestamp"
_TRUE = frozenset(("yes", "true", "on"))
_NANOSECONDS = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)

_FIELDS: Mapping[str, Option] = {option.field: option for option in catalogue.BY_KEY.values() if option.field}
_SECTIONS = frozenset(field[: dot.start()] for field in _FIELDS for dot in re.finditer(r"\.", field))


class _WrongTypeError(Exception):
    """A YAML node has the wrong type; the error's text completes the words "must be ..."."""


class _File(Values):
    """The part of a file's content that has been read so far."""

    def read_kind(self, root: yaml.MappingNode) -> None:
        """Check ``apiVersion`` and ``kind``."""
        values = {key.value: value for key, value in root.value if isinstance(key, yaml.ScalarNode)}
        for name, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
            node = values.get(name)
            if node is None:
                self.problems.append(Problem(ValuePlace(name, self.config_file, 1), f"is missing; it must be {expected}"))
            elif node.value != expected:
                self.problems.append(Problem(self._source(name, node), f"{_shown(node)} must be {expected}"))

    def read_section(self, section: yaml.MappingNode, prefix: str = "") -> None:
        """Read the fields of one mapping. ``prefix`` is the beginning of the fields' full names."""
        for key, node in self._fields(section, prefix):
            path = f"{prefix}{key.value}"
            if path not in _FIELDS and path not in _SECTIONS:
                if path not in ("apiVersion", "kind"):
                    self._unknown(path, key, prefix)
            elif node.tag == _NULL:
                continue
            elif path in _FIELDS:
                self._read_option(_FIELDS[path], node)
            elif isinstance(node, yaml.MappingNode):
                self.read_section(node, f"{path}.")
            else:
                self.problems.append(Problem(self._source(path, node), f"{_shown(node)} must be a mapping"))

    def _fields(self, section: yaml.MappingNode, prefix: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        """The fields of the mapping. If several fields have the same name, the last of these fields is used."""
        fields: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        for key, node in section.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                self.problems.append(Problem(self._source(prefix.rstrip("."), key), "every key must be the name of a field"))
                continue
            if key.value in fields:
                source = self._source(f"{prefix}{key.value}", key)
                self.notices.append(f"{source}: is repeated here; the earlier value is not used")
            fields[key.value] = (key, node)
        return list(fields.values())

    def _unknown(self, path: str, key: yaml.ScalarNode, prefix: str) -> None:
        names = {name.removeprefix(prefix) for name in (*_FIELDS, *_SECTIONS) if name.startswith(prefix)}
        source = self._source(path, key)
        text = f"unknown field, not used{suggestion(key.value, [name for name in names if '.' not in name])}"
        if path.startswith(f"{OWN_SECTION}."):
            self.problems.append(Problem(source, text.replace(", not used", ""), path))
        else:
            self.notices.append(f"{source}: {text}")

    def _read_option(self, option: Option, node: yaml.Node) -> None:
        source = self._source(option.field, node)
        if isinstance(node, yaml.SequenceNode):
            source = source._replace(element_lines=tuple(element.start_mark.line + 1 for element in node.value))
        try:
            value = _value(node, option)
        except (_WrongTypeError, ValueError) as error:
            self.problems.append(Problem(source, f"{_shown(node)} must be {error}", option.key))
            return
        if not (option.empty_is_unset and not value):
            self.given[option.key] = Given(value, source)

    def _source(self, name: str, node: yaml.Node) -> ValuePlace:
        # A key may hold any text, even a line break, but error messages show the key in a single line.
        is_plain = name.isprintable() and len(name) <= 80  # noqa: PLR2004 - ``quoted`` shortens longer names
        return ValuePlace(name if is_plain else quoted(name), self.config_file, node.start_mark.line + 1)


def read(data: bytes, path: str) -> Values:
    """Parse the content of a file; ``path`` is the file's name in the texts of problems."""
    content, line, problem = _File(path), 0, ""
    try:
        root = next(yaml.compose_all(data, Loader=yaml.SafeLoader), None)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        problem = f"is not YAML: {error.problem or error.context}"
    except yaml.YAMLError as error:
        problem = f"is not YAML: {' '.join(str(error).split())}"
    except (ValueError, OverflowError) as error:  # PyYAML itself refuses \\U escapes that are out of range
        problem = f"cannot be read as YAML: {error}"
    except RecursionError:
        problem = "is nested too deeply"
    else:
        if isinstance(root, yaml.MappingNode):
            content.read_kind(root)
            if not content.problems:
                content.read_section(root)
            return content
        line, problem = 1, f"must hold a {KIND}, which is a mapping"
    content.problems.append(Problem(ValuePlace("", path, line), problem))
    return content


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return quoted(node.value) if node.style or node.tag == _STRING else node.value[:80]
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _scalar(node: yaml.Node, tags: tuple[str, ...], expected: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag not in tags:
        hint = ", in quotes" if expected == "a string" and isinstance(node, yaml.ScalarNode) else ""
        raise _WrongTypeError(f"{expected}{hint}")
    return str(node.value)


_TEXTS = (_STRING, _TIMESTAMP)


def _read_boolean(node: yaml.Node, expected: str = "true or false") -> bool:
    return _scalar(node, (_BOOLEAN,), expected).lower() in _TRUE


def _read_number(node: yaml.Node) -> Value:
    # Go writes a million as 1e+06, which PyYAML reads as text.
    is_plain = isinstance(node, yaml.ScalarNode) and not node.style
    tags = (_INTEGER, _FLOAT, _STRING) if is_plain else (_INTEGER, _FLOAT)
    return parse_number(_scalar(node, tags, "a number").replace("_", ""))


def _read_list(node: yaml.Node) -> Value:
    if not isinstance(node, yaml.SequenceNode):
        raise _WrongTypeError("a list")
    return tuple(_scalar(element, _TEXTS, "a string, in quotes") for element in node.value)


def _read_gates(node: yaml.Node) -> Value:
    expected = "a mapping of names to true or false"
    if not isinstance(node, yaml.MappingNode):
        raise _WrongTypeError(expected)
    return {_scalar(key, _TEXTS, expected): _read_boolean(value, expected) for key, value in node.value}


def _read_patterns(node: yaml.Node) -> Value:
    patterns = []
    for element in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        pairs = element.value if isinstance(element, yaml.MappingNode) else []
        fields = {key.value: value.value for key, value in pairs if isinstance(key, yaml.ScalarNode)}
        patterns.append(f"{fields.get('filePattern', '')}={fields.get('verbosity', '')}")
    try:
        return parse_patterns(",".join(patterns))
    except ValueError as error:
        rule = "where no filePattern is empty or has a comma or equals sign"
        raise _WrongTypeError(f"a list of mappings with filePattern and verbosity, {rule}") from error


_SCALARS: Mapping[Kind, tuple[tuple[str, ...], str]] = {
    Kind.TEXT: (_TEXTS, "a string"),
    Kind.INTEGER: ((_INTEGER,), "a whole number"),
    Kind.DURATION: ((_STRING,), "a duration such as 30s, 1m30s or 1h"),
    Kind.QUANTITY: ((_STRING, _INTEGER, _FLOAT), "a number of bytes such as 512, 1k or 2Ki"),
}
"""The kinds of options whose values have the same syntax in a file and in a flag. Each kind has the YAML types that a value may
have, and a description of valid values."""
_READERS: Mapping[Kind, Callable[[yaml.Node], Value]] = {
    Kind.BOOLEAN: _read_boolean,
    Kind.NUMBER: _read_number,
    Kind.LIST: _read_list,
    Kind.GATES: _read_gates,
    Kind.PATTERNS: _read_patterns,
}


def _value(node: yaml.Node, option: Option) -> Value:
    """Returns the value of a node; raises _WrongTypeError or ValueError."""
    if option.kind in _READERS:
        return _READERS[option.kind](node)
    if option.nanoseconds and node.tag == _INTEGER and _NANOSECONDS.fullmatch(str(node.value)):
        return int(node.value) / 1e9
    return option.parse(_scalar(node, *_SCALARS[option.kind]))


def render(config: Config) -> str:
    """The configuration as the text of a file that kube-proxy can read.

    A configuration that is read from this text equals the original, except for options that exist only as flags.
    """
    return str(yaml.safe_dump(document(config), default_flow_style=False, width=10_000))


def document(config: Config) -> dict[str, Any]:
    """The configuration as a dictionary whose values have JSON types."""
    root: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND}
    for key, value in config.values.items():
        option = catalogue.BY_KEY[key]
        if option.status is Likeness.OWN and value == option.parse(option.default):
            continue
        *sections, name = option.field.split(".")
        section = root
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = _plain(option, value)
    return root


def digest(config: Config) -> str:
    """A short digest of the configuration.

    Nodes with the same configuration have the same digest, because the digest does not include the node's name and IP.
    """
    shared = {key: value for key, value in document(config).items() if key not in ("hostnameOverride", "bindAddress")}
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:12]


def flags_of(config: Config) -> Mapping[str, str]:
    """The current value of each flag that has a field in the file, as text for a command line."""
    options = ((catalogue.BY_KEY[key], value) for key, value in config.values.items())
    return {option.flag: option.written(value) for option, value in options if option.flag}


def _plain(option: Option, value: Value) -> object:
    if option.kind is Kind.DURATION:
        return option.written(value)
    if option.kind is Kind.PATTERNS and isinstance(value, tuple):
        return [{"filePattern": name, "verbosity": int(level)} for name, _, level in (item.partition("=") for item in value)]
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
