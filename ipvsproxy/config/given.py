"""Option values as the user gave them, with their place, and problems of these values."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

Value = str | bool | int | float | tuple[str, ...] | Mapping[str, bool]
"""A setting's value after its syntax is parsed. Durations are seconds; addresses and ranges are still text."""


class Source(NamedTuple):
    """The place of a value: a flag, or a field of a file. Lines count from 1; 0 means no line."""

    name: str
    file: str = ""
    line: int = 0
    element_lines: tuple[int, ...] = ()

    def element(self, index: int) -> Self:
        """The place of one element of a list, counted from 0; for a flag, the flag itself."""
        if not self.element_lines:
            return self
        return type(self)(f"{self.name}[{index}]", self.file, self.element_lines[index])

    def __str__(self) -> str:
        if not self.file:
            return self.name
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.name}" if self.name else place


class Given(NamedTuple):
    """A value and its place."""

    value: Value
    source: Source


class Problem(NamedTuple):
    """Why the configuration is refused. ``key`` is the ``Option.key`` of the option concerned, if there is one."""

    source: Source
    text: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"


class Notice(NamedTuple):
    """A remark for the operator on an accepted part of the configuration."""

    source: Source
    text: str

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"


class ConfigError(Exception):
    """The configuration is refused; ``problems`` holds every reason, in the order of flags, file, rules."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, self.problems)))


def quoted(text: str) -> str:
    """The text as an error shows it: in quotes, on one line, cut after 80 characters."""
    return repr(text if len(text) <= 80 else text[:77] + "...")  # noqa: PLR2004 - as the docstring says
