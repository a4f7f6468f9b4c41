"""The commands that only inspect, as data; the options that are no settings, so that no file has them; the text of ``--help``."""

import enum
import textwrap
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.config import catalogue, flags, syntax
from ipvsproxy.config.option import Group, Kind, Option, Problem, Source, Status, quoted

FORMATS = ("text", "json")
_FORMAT_FLAGS = ("output", "-o")
"""The names of the flag that takes one of ``FORMATS``."""


class Output(NamedTuple):
    """Whether to report only, whether as JSON, and problems of these options."""

    dry_run: bool = False
    as_json: bool = False
    problems: tuple[Problem, ...] = ()


def take_output(arguments: Sequence[str]) -> tuple[Output, list[str]]:
    """Split these options from the rest of a command line. ``-o`` is short for ``--output``."""
    dry_run, chosen = False, FORMATS[0]
    problems: list[Problem] = []
    others: list[str] = []
    for raw, name, value in flags.pieces(arguments, valued=_FORMAT_FLAGS):
        if name == "dry-run":
            text = "true" if value is None else value
            try:
                dry_run = bool(syntax.parse(Kind.BOOLEAN, text))
            except ValueError as error:
                problems.append(Problem(Source("--dry-run"), f"{quoted(text)} must be {error}", "dry-run"))
        elif name in _FORMAT_FLAGS:
            chosen = value or ""
            if chosen not in FORMATS:
                problems.append(Problem(Source("--output"), f"{quoted(chosen)} must be one of {', '.join(FORMATS)}", "output"))
        else:
            others += raw
    return Output(dry_run, chosen == "json", tuple(problems)), others


SHORTEST_INTERVAL_S = 0.5
LONGEST_INTERVAL_S = 3600.0


class Sort(enum.StrEnum):
    """What Services are sorted by: the busiest first, or by name."""

    NAME = "name"
    CONNECTIONS = "connections"
    PACKETS = "packets"
    BYTES = "bytes"
    PROBLEMS = "problems"


class TopOptions(NamedTuple):
    """What to show and how often. An empty ``server`` means the metrics server of the configuration."""

    once: bool = False
    interval_s: float = 2.0
    sort: Sort = Sort.CONNECTIONS
    filter: str = ""
    server: str = ""


class TopOptionsTaken(NamedTuple):
    """The options, the other arguments, and what is wrong with the options."""

    options: TopOptions
    others: list[str]
    problems: tuple[Problem, ...]


class OptionHelp(NamedTuple):
    """A line of ``--help``: what stands for the value, empty without one, and what the option does."""

    placeholder: str
    text: str


HELP_OF_TOP: Mapping[str, OptionHelp] = {
    "once": OptionHelp("", "Print one picture as plain text, and end."),
    "interval": OptionHelp("DURATION", f"Time between two pictures (default 2s, at least {SHORTEST_INTERVAL_S}s)."),
    "sort": OptionHelp("BY", f"What comes first: {', '.join(Sort)} (default connections)."),
    "filter": OptionHelp("TEXT", "Only Services whose name, address, port or pod address contains this."),
    "server": OptionHelp("URL", "The metrics server of an ipvsproxy, in place of the configured address."),
}


def take_top_options(arguments: Sequence[str]) -> TopOptionsTaken:
    """Split these options from the rest of a command line."""
    options = TopOptions()
    problems: list[Problem] = []
    others: list[str] = []
    for raw, name, value in flags.pieces(arguments, valued=("interval", "sort", "filter", "server")):
        if name is None or name not in HELP_OF_TOP:
            others += raw
            continue
        text = "true" if value is None and name == "once" else value or ""
        try:
            options = _with(options, name, text)
        except ValueError as error:
            problems.append(Problem(Source(f"--{name}"), f"{quoted(text)} must be {error}", name))
    return TopOptionsTaken(options, others, tuple(problems))


def _with(options: TopOptions, name: str, text: str) -> TopOptions:
    """The options with one more. Raises ValueError with what the text must be."""
    match name:
        case "once":
            return options._replace(once=bool(syntax.parse(Kind.BOOLEAN, text)))
        case "interval":
            return options._replace(interval_s=_interval(text))
        case "sort":
            return options._replace(sort=_sort(text))
        case "server":
            return options._replace(server=_server(text))
        case _:
            return options._replace(filter=text)


def _interval(text: str) -> float:
    seconds = syntax.parse_duration(text)
    if not SHORTEST_INTERVAL_S <= seconds <= LONGEST_INTERVAL_S:
        raise ValueError(f"{SHORTEST_INTERVAL_S}s to {LONGEST_INTERVAL_S / 3600:.0f}h")
    return seconds


def _sort(text: str) -> Sort:
    try:
        return Sort(text)
    except ValueError:
        raise ValueError(f"one of {', '.join(Sort)}") from None


def _server(text: str) -> str:
    try:
        url = urllib.parse.urlsplit(text)
        is_url = url.scheme == "http" and bool(url.hostname) and (url.port or 1) > 0 and url.path in ("", "/")
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError("a URL such as http://127.0.0.1:10249")
    return text.rstrip("/")


class Command(NamedTuple):
    """A command. ``subject`` names the one word that it takes among its flags, empty if it takes none.

    ``options`` are those of this command alone, by name.
    """

    name: str
    summary: str
    text: str
    subject: str = ""
    options: Mapping[str, OptionHelp] = {}

    @property
    def help(self) -> str:
        """The whole text of ``--help``."""
        subject = f" <{self.subject}>" if self.subject else ""
        options = "".join(
            f"\n  --{f'{name} {one.placeholder}'.strip()}\n        {one.text}" for name, one in self.options.items()
        )
        return f"ipvsproxy {self.name}{subject} [--output=text|json] [flags]\n\n{self.text}{options}{_COMMON}"


_COMMON = """
  --output text|json
        Text for people, or one JSON document with a field version (default text). Also -o.

Use the flags and the file of ipvsproxy run. Without a file, --proxy-mode=ipvs is implied.
The command changes nothing. Some queries make the kernel load a module, which cannot be avoided.
"""

_PLAN = Command(
    "plan",
    "show the operations of run on this node, in their order",
    """\
Gets the complete lists from the API server or --manifests, reads the kernel, and shows the operations that run
would apply now, in their order, each with its Service.

Exit status: 0 plan shown, 2 state unknown.
""",
)
_VERIFY = Command(
    "verify",
    "compare the kernel with the desired state",
    """\
Compares the kernel with the desired state. One line shows each difference: Service, object, desired state,
observed state. Differing objects are read again after a moment; only lasting differences count.
Draining real servers are no difference. Virtual servers of others are listed, and are no difference either.

Exit status: 0 equal, 1 different, 2 state unknown.
""",
)
_EXPLAIN = Command(
    "explain",
    "show how this node serves a Service or an address, and why",
    """\
Shows for a Service (namespace/name) or an address (10.96.0.1:443, [fd00::1]:443, or without a port): its virtual
servers and their owners, which endpoints are used or not and why, which traffic is masqueraded and by which rule,
and the observed state with its connections. The Service or address may stand anywhere among the flags.

Exit status: 0 explained, 1 unknown Service or address, 2 state unknown.
""",
    "namespace/name | address:port",
)
_LIST = Command(
    "list",
    "print the IPVS table as ipvsadm -Ln does, with the names of Services and pods",
    """\
Prints what ipvsadm -Ln prints, in the same layout. Beside each virtual server stands its Service port
(namespace/name:port), beside each real server its pod and node. A virtual server of another program is (not ours).
Without the API server the table is printed without names.

Exit status: 0 printed with names, 2 names or table could not be read.
""",
)
_TOP = Command(
    "top",
    "show a running ipvsproxy live in the terminal",
    """\
Shows what the ipvsproxy of this node does: whether everything is in force, and its Services by rate. Keys sort,
filter, and open a Service with its endpoints; h shows all keys, q quits. Asks only the daemon's metrics server
(--metrics-bind-address), so no privilege is needed.

Exit status: 0 shown, 2 no ipvsproxy answers.
""",
    options=HELP_OF_TOP,
)
_DOCTOR = Command(
    "doctor",
    "check what ipvsproxy needs of this node, and name remedies",
    """\
Checks privileges, kernel, modules, schedulers, set types, sysctls, iptables, other proxies and load balancers,
ports, timeouts and the API server. Each line is ok, warn or fail, with a remedy where there is one.

Exit status: 0 no line is fail, 1 some line is fail, 2 wrong flags.
""",
)

COMMANDS: Mapping[str, Command] = {command.name: command for command in (_PLAN, _VERIFY, _EXPLAIN, _LIST, _TOP, _DOCTOR)}
"""The commands by name."""

_WIDTH = 110
_INDENT = 8

_HEAD = """\
ipvsproxy [run] [flags]

The node daemon that does the whole job of kube-proxy --proxy-mode=ipvs: it watches Services and
EndpointSlices and keeps this node's IPVS, ipsets, addresses and iptables rules in step with them.

Every kube-proxy flag is accepted, with the same meaning and syntax. Durations are written 30s, 1m30s, 1h.
With --config most flags are ignored, as in kube-proxy; flags marked with * still count.
The equivalent field of the file stands in [brackets].

Other commands, each with its own --help:
{commands}
  cleanup   remove everything that ipvsproxy or kube-proxy has left in the kernel
  completion bash|zsh|fish
            print the script for shell completion
With --dry-run, run changes nothing: it runs beside a kube-proxy and reports differences by log and metrics,
on ports 10356 and 10349 instead of 10256 and 10249.
"""


def render_help() -> str:
    """The whole text, in lines of at most 110 columns."""
    others = "\n".join(f"  {command.name:<9} {command.summary}" for command in COMMANDS.values())
    sections = [_HEAD.format(commands=others)]
    for group, options in catalogue.OPTIONS.items():
        lines = [f"{group}:", *(line for option in options for line in _option_lines(option) if option.flag)]
        if group is Group.WITHOUT_EFFECT:
            fields = ", ".join(option.field for option in options if not option.flag)
            lines.append(
                textwrap.fill(f"Fields of the file only: {fields}.", _WIDTH, initial_indent="  ", subsequent_indent="  ")
            )
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _option_lines(option: Option) -> Iterator[str]:
    dashes = "-" if option.flag == "v" else "--"
    value = "" if option.kind is Kind.BOOLEAN else f" {option.placeholder or option.kind.value}"
    star = " *" if option.overrides_file else ""
    field = f"  [{option.field}]" if option.field else ""
    yield f"  {dashes}{option.flag}{value}{star}{field}"
    text = " ".join(filter(None, (option.help, _facts(option))))
    indent = " " * _INDENT
    yield textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _facts(option: Option) -> str:
    """Default and bounds, in parentheses."""
    facts = [f"default {option.default}"] if option.default and option.default != "false" else []
    if option.file_default is not None:
        facts.append(f"in a file {option.file_default}")
    if option.allowed and option.status is not Status.WITHOUT_EFFECT and (option.maximum or option.minimum != 0):
        facts.append(option.allowed)
    return f"({'; '.join(facts)})" if facts else ""
