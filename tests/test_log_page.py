"""docs/log.md has exactly the events and keys of the log calls in the source."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

import ipvsproxy
from tests.support.log_page import COUNTING, EVENTS, KEYS

SOURCE = pathlib.Path(ipvsproxy.__file__).parent
LEVELS = {"debug", "info", "warning", "error", "exception", "log"}
EXTENDING = {"exc_info"}
"""Arguments that structlog itself evaluates, and that are not keys of a log line."""


class Module:
    """The log calls of one module, with the events and keys that are written literally in that module."""

    def __init__(self, text: str) -> None:
        self._tree = ast.parse(text)
        self._constants: dict[str, str] = {}
        self._dictionaries: dict[str, set[str]] = {}
        for node in ast.walk(self._tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))):
                    self._constants[name] = value
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for target, constant in zip(names, values, strict=False):
                        if isinstance(target, ast.Name) and isinstance(constant, ast.Constant):
                            self._constants[target.id] = str(constant.value)
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as display):
                    self._dictionaries.setdefault(name, set()).update(_keys(display))
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)))]):
                    self._dictionaries.setdefault(name, set()).add(key)
                case ast.FunctionDef(name=name):
                    self._dictionaries.setdefault(name, set()).update(_keys(node))
                case _:
                    pass

    def calls(self) -> Iterator[ast.Call]:
        """The calls of a logger's methods, and of functions that log on behalf of their callers."""
        for node in ast.walk(self._tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=level)) if level in LEVELS:
                    yield node
                case ast.Call(func=ast.Attribute(value=ast.Call(), attr="log")):
                    yield node
                case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("_log_"):
                    yield node
                case ast.Call(args=arguments) if any(map(_is_logger, arguments)):
                    yield node
                case ast.Call(func=ast.Name(id="write")):  # ``write`` is the logger's method that was passed as an argument
                    yield node
                case _:
                    pass

    def events(self, call: ast.Call) -> list[str]:
        """The events that a call logs.

        The result is empty if the event is a parameter of the surrounding function. In this case, the calls of the surrounding
        function are checked.
        """
        given = [part for one in call.args for part in ((one.body, one.orelse) if isinstance(one, ast.IfExp) else (one,))]
        literal = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        return literal + [self._constants[one.id] for one in given if isinstance(one, ast.Name) and one.id in self._constants]

    def keys(self, call: ast.Call) -> set[str]:
        """The keys of a call: its keyword arguments, and the keys of the dictionaries that it unpacks as keyword arguments."""
        keys = {keyword.arg for keyword in call.keywords if keyword.arg}
        for keyword in call.keywords:
            if keyword.arg is None:
                keys |= _keys(keyword.value)
                names = {node.id for node in ast.walk(keyword.value) if isinstance(node, ast.Name)}
                keys |= set().union(*(self._dictionaries.get(name, set()) for name in names))
        return keys


def _is_logger(node: ast.AST) -> bool:
    """Whether an argument is a method of the logger; functions that limit the rate of log lines take such an argument."""
    match node:
        case ast.Attribute(value=ast.Name(id="log"), attr=level):
            return level in LEVELS
        case _:
            return False


def _keys(tree: ast.AST) -> set[str]:
    displays = (node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    return {str(key.value) for one in displays for key in one.keys if isinstance(key, ast.Constant)}


MODULES = {
    path.relative_to(SOURCE).as_posix(): Module(path.read_text())
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r"^(import structlog|from ipvsproxy.daemon.base.log import log)$", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("name", MODULES)
def test_every_log_call_uses_documented_events_and_keys(name: str) -> None:
    module = MODULES[name]
    for call in module.calls():
        assert set(module.events(call)) <= EVENTS, ast.unparse(call)
        assert module.keys(call) <= KEYS | EXTENDING, ast.unparse(call)


def test_every_documented_event_and_key_is_used() -> None:
    calls = [(module, call) for module in MODULES.values() for call in module.calls()]
    assert EVENTS - {event for module, call in calls for event in module.events(call)} == set()
    assert KEYS - set().union(*(module.keys(call) for module, call in calls)) == set()
    assert COUNTING
    assert COUNTING <= EVENTS


def test_events_and_keys_are_in_snake_case() -> None:
    assert [name for name in (*EVENTS, *KEYS) if not re.fullmatch(r"[a-z]+(_[a-z]+)*", name)] == []
