"""The value of each option, given or default, in its type."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from ipvsproxy.config import catalogue, syntax
from ipvsproxy.config.given import Given, Notice, Problem, Source, Value

_Value = TypeVar("_Value")


class Values:
    """Values by ``Option.key``; collects problems. After a problem, the option has its default value.

    ``broken`` names the options whose value cannot be parsed. ``config_file`` is empty if there is no file.
    """

    def __init__(self, given: Mapping[str, Given], broken: Collection[str], config_file: str) -> None:
        self.given = given
        self.config_file = config_file
        self.problems: list[Problem] = []
        self.notices: list[Notice] = []
        self._broken = set(broken)

    def value(self, key: str) -> Value:
        """The value of any option."""
        if key in self.given and self.known(key):
            return self.given[key].value
        option = catalogue.BY_KEY[key]
        return syntax.parse(option.kind, option.default_in(file=bool(self.config_file)))

    def _typed(self, key: str, kind: type[_Value]) -> _Value:
        value = self.value(key)
        if not isinstance(value, kind):
            raise TypeError(f"{key} is not of type {kind.__name__}")
        return value

    def text(self, key: str) -> str:
        """The value of an option of kind TEXT."""
        return self._typed(key, str)

    def switch(self, key: str) -> bool:
        """The value of an option of kind BOOLEAN."""
        return self._typed(key, bool)

    def number(self, key: str) -> int:
        """The value of an option of kind INTEGER or LEVEL."""
        return self._typed(key, int)

    def seconds(self, key: str) -> float:
        """The value of an option of kind DURATION."""
        return self._typed(key, float)

    def items(self, key: str) -> tuple[str, ...]:
        """The value of an option of kind LIST."""
        return self._typed(key, tuple)

    def gates(self) -> Mapping[str, bool]:
        """The feature gates that were given."""
        value = self.value("featureGates")
        return value if isinstance(value, Mapping) else {}

    def source(self, key: str) -> Source:
        """The place of the value, or the place where the user could give it."""
        if key in self.given:
            return self.given[key].source
        option = catalogue.BY_KEY[key]
        return Source(option.field, self.config_file) if self.config_file and option.field else Source(f"--{option.flag}")

    def refuse(self, key: str, text: str, source: Source | None = None) -> None:
        """Record a problem of an option; ``source`` is its place if the problem is not that of the whole option."""
        self.problems.append(Problem(source or self.source(key), text, key))
        self._broken.add(key)

    def known(self, *keys: str) -> bool:
        """Whether none of these options has a problem, so that their values can be compared."""
        return self._broken.isdisjoint(keys)
