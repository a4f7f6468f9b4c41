"""Options as data, and the values that a user has given.

The parsers and checks of options, the text of ``--help``, the configuration file and the ``Config`` are derived from this data.
Values have the syntax of Go's flag and duration parsers, which kube-proxy uses. Every ``parse_`` function raises ValueError with
a text that completes the words "must be ...".
"""

import contextlib
import csv
import difflib
import enum
import fractions
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Self

Value = str | bool | int | float | tuple[str, ...] | Mapping[str, bool]
"""A setting's value after parsing its syntax. Durations are seconds; addresses and ranges are still text."""


def quoted(text: str) -> str:
    """The text in the form that error messages show: in quotes, on one line, and shortened to 80 characters."""
    return repr(text if len(text) <= 80 else text[:77] + "...")  # noqa: PLR2004 - the docstring names the limit


def suggestion(text: str, known: Iterable[str], dashes: str = "") -> str:
    """A question such as "did you mean", to append to an error about an unknown word.

    If no known word is similar to the unknown word, the result is empty.
    """
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(text[:60].lower(), by_lower, n=1)
    return f"; did you mean {dashes}{by_lower[close[0]]}?" if close else ""


INT32 = range(-(2**31), 2**31)
INT64_MAX = 2**63 - 1
_HOUR_S = 3600
_LONGEST = 200
"""The greatest length of the text of a number or duration, in characters. Python converts longer texts slowly, or not at all."""

_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))
_GO_OCTAL = re.compile(r"^([+-]?)0(?=[0-9_])")
_DURATION_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_PATTERN = re.compile(r"[^=]+=0*([0-9]{1,10})", re.ASCII)
_QUANTITY = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?", re.ASCII)
_UNITS_NS: Mapping[str, int] = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "μs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}


def parse_boolean(text: str) -> bool:
    """Read a boolean by the rules of Go's ``strconv.ParseBool``."""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("true or false")


def parse_integer(text: str) -> int:
    """Read a 32-bit integer by the rules of Go's ``strconv.ParseInt`` with base 0.

    The prefixes 0x, 0o and 0b, a leading 0 for octal numbers, and underscores are accepted.
    """
    with contextlib.suppress(ValueError):
        number = int(_GO_OCTAL.sub(r"\g<1>0o", text), 0)
        if number in INT32 and text.isascii() and text == text.strip():
            return number
    raise ValueError(f"a whole number in {INT32.start}..{INT32.stop - 1}")


def parse_number(text: str) -> float:
    """Read a finite number."""
    with contextlib.suppress(ValueError):
        if text.isascii() and math.isfinite(number := float(text)):
            return number
    raise ValueError("a number")


def parse_duration(text: str) -> float:
    """Read a duration such as ``1m30s``, ``1.5h`` or ``-5ms`` by the rules of Go's ``time.ParseDuration``, and return seconds."""
    allowed = "a duration such as 30s, 1m30s or 1h"
    if len(text) > _LONGEST:
        raise ValueError(allowed)
    sign, rest = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    if rest == "0":
        return 0.0
    total_ns, position = 0, 0
    while match := _DURATION_PART.match(rest, position):
        whole, fraction, unit = match[1], match[2] or "", match[3]
        if not whole and not fraction:
            raise ValueError(allowed)
        total_ns += int(whole or "0") * _UNITS_NS[unit] + int(fraction or "0") * _UNITS_NS[unit] // 10 ** len(fraction)
        position = match.end()
    if not position or position != len(rest) or total_ns > INT64_MAX:
        raise ValueError(allowed)
    return (-total_ns if sign == "-" else total_ns) / 1e9


def render_duration(seconds: float) -> str:
    """The duration in the form that Go prints, such as ``1m30s``, ``24h0m0s``, ``1.5ms`` or ``0s``."""
    total_ns = round(fractions.Fraction(abs(seconds)) * _UNITS_NS["s"])
    sign = "-" if seconds < 0 and total_ns else ""
    if total_ns < _UNITS_NS["s"]:
        unit = next((unit for unit in ("ms", "µs", "ns") if total_ns >= _UNITS_NS[unit]), "s")
        return f"{sign}{_decimal(total_ns, _UNITS_NS[unit])}{unit}"
    hours, rest_ns = divmod(total_ns, _UNITS_NS["h"])
    minutes, rest_ns = divmod(rest_ns, _UNITS_NS["m"])
    text = f"{_decimal(rest_ns, _UNITS_NS['s'])}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{sign}{hours}h{text}" if hours else f"{sign}{text}"


def _decimal(number: int, unit: int) -> str:
    return f"{number / unit:.9f}".rstrip("0").rstrip(".")


def parse_list(text: str) -> tuple[str, ...]:
    """Read one line of comma-separated values by the rules of pflag's string slice; values may be quoted."""
    if not text:
        return ()
    try:
        return tuple(next(csv.reader([text], strict=True)))
    except csv.Error as error:
        raise ValueError("a comma-separated list") from error


def parse_gates(text: str) -> Mapping[str, bool]:
    """Read ``A=true,B=false``."""
    gates: dict[str, bool] = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise ValueError("a list such as NameOfGate=true,OtherGate=false")
        gates[name] = parse_boolean(value)
    return gates


def parse_patterns(text: str) -> tuple[str, ...]:
    """Read the value of ``--vmodule``, a list such as ``pattern=N,pattern=N``; empty elements are ignored."""
    patterns = tuple(filter(None, text.split(",")))
    for pattern in patterns:
        match = _PATTERN.fullmatch(pattern)
        if match is None or int(match[1]) not in INT32:
            raise ValueError("a list such as pattern=2,other=4")
    return patterns


def parse_quantity(text: str) -> str:
    """Check a number of bytes, such as 512, 1k, 2Ki or 3M.

    Returns the text unchanged, because the program does not calculate with the number.
    """
    if len(text) > _LONGEST or not _QUANTITY.fullmatch(text):
        raise ValueError("a number of bytes such as 512, 1k or 2Ki")
    return text


class Kind(enum.Enum):
    """The syntax of a value: the placeholder that ``--help`` shows, and the function that reads the value from a flag."""

    TEXT = ("TEXT", str)
    BOOLEAN = ("BOOL", parse_boolean)
    INTEGER = ("INT", parse_integer)
    NUMBER = ("NUMBER", parse_number)
    DURATION = ("DURATION", parse_duration)
    LIST = ("ITEM,...", parse_list)
    GATES = ("NAME=BOOL,...", parse_gates)
    PATTERNS = ("PATTERN=LEVEL,...", parse_patterns)
    QUANTITY = ("BYTES", parse_quantity)

    def __init__(self, placeholder: str, parse: Callable[[str], Value]) -> None:
        self.placeholder = placeholder
        self.parse = parse


class Likeness(enum.StrEnum):
    """Whether, and how, an option differs from the option of kube-proxy with the same name."""

    SAME = "same"
    EXTENDED = "extended"
    PARTIAL = "in part"
    OWN = "own"
    WITHOUT_EFFECT = "without effect"


AT_START = frozenset(("source", "servers", "drivers", "node_name", "translation.allowed_addresses"))
"""The parts and attributes of ``Config`` that a process reads only when the process starts."""


class Option(NamedTuple):
    """A flag, a field of the file, or both.

    ``flag`` is the flag's name without leading dashes, or empty; ``field`` is the dotted path of the field, or empty. ``to`` is
    the attribute of ``Config`` that stores the value. ``default`` is a text in the syntax of a flag's value; if a file is given,
    ``file_default`` is used instead. ``minimum`` and ``maximum`` are inclusive bounds, and ``above`` is an exclusive bound. For a
    duration, ``minimum``, ``maximum`` and ``above`` are in seconds. An empty value is allowed in addition to the ``choices``,
    except for a flag that only some commands take.

    ``empty_is_unset``: in a file, a zero or empty value means the default (pkg/proxy/apis/config/v1alpha1/defaults.go in
    kubernetes/kubernetes). An empty text as the value of the flag changes nothing. ``overrides_file``: the flag is used even if
    ``--config`` is given, and replaces the value in the file. ``implied`` is the flag's value if the user gives the flag without
    a value; boolean flags do not need ``implied``. ``nanoseconds``: if a duration in the file is a number without a unit, the
    number is in nanoseconds. ``deprecated`` says which option to use instead. ``command`` names the commands that take the flag;
    an empty ``command`` means that all commands take the flag.
    """

    kind: Kind
    flag: str
    field: str = ""
    to: str = ""
    default: str = ""
    placeholder: str = ""
    help: str = ""
    status: Likeness = Likeness.SAME
    choices: tuple[str, ...] = ()
    minimum: float = -math.inf
    above: float = -math.inf
    maximum: float = math.inf
    file_default: str | None = None
    empty_is_unset: bool = False
    overrides_file: bool = False
    implied: str = ""
    nanoseconds: bool = False
    deprecated: str = ""
    command: str = ""

    def is_of(self, command: str) -> bool:
        """Whether a command takes this option; if ``Option.command`` is empty, every command takes the option."""
        return not self.command or command in self.command.split()

    def explained(self, text: str) -> Self:
        """A copy of this option with a text for ``--help``."""
        return self._replace(help=text)

    def parse(self, text: str) -> Value:
        """Parses the text of a flag's value."""
        return self.kind.parse(text)

    @property
    def key(self) -> str:
        """The option's name in the program: the path of its field or, if the option has no field, the name of its flag."""
        return self.field or self.flag

    @property
    def shown(self) -> str:
        """The placeholder that ``--help`` shows for the value."""
        return "|".join(self.choices) or self.placeholder or self.kind.placeholder

    @property
    def implied_value(self) -> str:
        """The flag's value if the user gives the flag without a value.

        If the result is empty, the word after the flag is the flag's value.
        """
        return "true" if self.kind is Kind.BOOLEAN else self.implied

    @property
    def restart(self) -> bool:
        """Whether a change of this option in the file takes effect only after a restart."""
        return self.to in AT_START or self.to.partition(".")[0] in AT_START

    def written(self, value: Value) -> str:
        """The given value in the syntax of a flag's value."""
        if isinstance(value, Mapping):
            return ",".join(f"{name}={str(choice).lower()}" for name, choice in value.items())
        if isinstance(value, tuple):
            return ",".join(value)
        if self.kind is Kind.DURATION and isinstance(value, float):
            return render_duration(value)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def default_in(self, *, file: bool) -> str:
        """The default of the option, in the syntax of a flag's value; ``file`` means that a configuration file is given."""
        return self.file_default if file and self.file_default is not None else self.default

    @property
    def allowed(self) -> str:
        """The allowed values, for an error message or ``--help``; empty if the kind of the option describes the values."""
        if self.choices:
            return f"one of {', '.join(self.choices)}" if len(self.choices) > 1 else self.choices[0]
        if math.isfinite(self.above):
            return f"greater than {self._bound(self.above)}"
        if math.isfinite(self.maximum):
            return f"{self._bound(self.minimum)}..{self._bound(self.maximum)}"
        return f"at least {self._bound(self.minimum)}" if math.isfinite(self.minimum) else ""

    def _bound(self, number: float) -> str:
        if self.kind is not Kind.DURATION:
            return f"{number:g}"
        return f"{number / _HOUR_S:g}h" if number >= _HOUR_S else f"{number:g}s"

    def allows(self, number: float) -> bool:
        """Whether the number lies within the option's bounds."""
        return self.minimum <= number <= self.maximum and number > self.above


class ValuePlace(NamedTuple):
    """The place where a value was given: a flag, or a field of a file.

    Lines are counted from 1; line 0 means that the line is not known.
    """

    name: str
    file: str = ""
    line: int = 0
    element_lines: tuple[int, ...] = ()

    def element(self, index: int) -> Self:
        """The place of the list element with this index (from 0). If the list was given by a flag, the place is the flag."""
        if not self.element_lines:
            return self
        return type(self)(f"{self.name}[{index}]", self.file, self.element_lines[index])

    def __str__(self) -> str:
        if not self.file:
            return self.name
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.name}" if self.name else place


class Given(NamedTuple):
    """A value of an option, and the place where the user gave the value."""

    value: Value
    source: ValuePlace


class Problem(NamedTuple):
    """A reason why the configuration is refused.

    If the problem belongs to one option, ``key`` is the ``Option.key`` of this option.
    """

    source: ValuePlace
    text: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"


class ConfigError(Exception):
    """Raised if the configuration is refused.

    ``problems`` holds every reason: first the problems of the flags, then the problems of the file, then the violated rules.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, self.problems)))
