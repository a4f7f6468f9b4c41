"""An option as data, from which parsing, checking, ``--help``, the file and the ``Config`` follow; and given values."""

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self


class Kind(enum.Enum):
    """The syntax of a value; the enum's value is what ``--help`` shows for it."""

    TEXT = "TEXT"
    BOOLEAN = "BOOL"
    INTEGER = "INT"
    NUMBER = "NUMBER"
    LEVEL = "LEVEL"
    DURATION = "DURATION"
    LIST = "ITEM,..."
    GATES = "NAME=BOOL,..."
    PATTERNS = "PATTERN=LEVEL,..."
    QUANTITY = "BYTES"


class Status(enum.StrEnum):
    """How an option compares with kube-proxy's."""

    SAME = "same"
    EXTENDED = "extended"
    PARTIAL = "in part"
    OWN = "own"
    WITHOUT_EFFECT = "without effect"


class Group(enum.StrEnum):
    """The sections of ``--help``, in its order."""

    CONFIGURATION = "Configuration and commands"
    SOURCE = "Where Services come from"
    OWN = "ipvsproxy's own options"
    NODE = "This node"
    IPVS = "IPVS"
    TRAFFIC = "Masquerading and node ports"
    CONNTRACK = "Connection tracking, set once at the start"
    SERVERS = "Health and metrics"
    LOGGING = "Logging"
    WITHOUT_EFFECT = "Accepted without effect, so that existing command lines work"


class Option(NamedTuple):
    """A flag, a field of the file, or both.

    ``flag`` has no dashes in front, ``field`` is a dotted path; either may be empty. ``to`` is the attribute of ``Config`` that
    gets the value. ``restart``: a change of the file takes effect at the next start. ``default`` is written as a flag's value;
    ``file_default`` replaces it when a file is given. ``minimum`` and ``maximum`` are inclusive, ``above`` is not; all three
    are in seconds for a duration. An empty value is allowed beside the ``choices``.

    ``zero_is_unset``: in a file, a zero or empty value means the default (pkg/proxy/apis/config/v1alpha1/defaults.go in
    kubernetes/kubernetes). ``empty_is_unset``: the flag's empty value changes nothing. ``overrides_file``: the flag counts
    even when ``--config`` is given. ``implied`` is the value that the flag without a value implies, if it is no boolean.
    ``nanoseconds``: a number in a file is in nanoseconds. ``deprecated`` says what to use instead. ``command`` is the only
    command that takes the flag; empty means all of them.
    """

    flag: str
    field: str
    kind: Kind
    default: str
    placeholder: str = ""
    to: str = ""
    restart: bool = False
    help: str = ""
    status: Status = Status.SAME
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    file_default: str | None = None
    zero_is_unset: bool = False
    empty_is_unset: bool = False
    overrides_file: bool = False
    implied: str = ""
    nanoseconds: bool = False
    deprecated: str = ""
    command: str = ""

    def explained(self, text: str) -> Self:
        """This option with a text for ``--help``."""
        return self._replace(help=text)

    @property
    def key(self) -> str:
        """The option's name in the program: the field's path, or the flag's name if there is no field."""
        return self.field or self.flag

    @property
    def implied_value(self) -> str:
        """The value that the flag without a value implies; empty means that the next word is the value."""
        return "true" if self.kind is Kind.BOOLEAN else self.implied

    def default_in(self, *, file: bool) -> str:
        """The default in a file or among flags, written as a flag's value."""
        return self.file_default if file and self.file_default is not None else self.default

    @property
    def allowed(self) -> str:
        """The allowed values, for an error or ``--help``; empty if the kind alone describes them."""
        unit = "s" if self.kind is Kind.DURATION else ""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.above is not None:
            return f"greater than {self.above:g}{unit}"
        if self.minimum is not None and self.maximum is not None:
            return f"{self.minimum:g}{unit}..{self.maximum:g}{unit}"
        if self.minimum is not None:
            return f"at least {self.minimum:g}{unit}"
        return ""

    def allows(self, number: float) -> bool:
        """Whether the number lies within the bounds."""
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
        )


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
