"""The options of ``ipvsproxy top`` alone. They are no settings, so no file has them."""

import enum
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.config import flags, syntax
from ipvsproxy.config.given import Problem, Source, quoted
from ipvsproxy.config.option import Kind

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


class Taken(NamedTuple):
    """The options, the other arguments, and what is wrong with the options."""

    options: TopOptions
    others: list[str]
    problems: tuple[Problem, ...]


class Help(NamedTuple):
    """A line of ``--help``: what stands for the value, empty without one, and what the option does."""

    placeholder: str
    text: str


HELP: Mapping[str, Help] = {
    "once": Help("", "Print one picture as plain text, and end."),
    "interval": Help("DURATION", f"Time between two pictures (default 2s, at least {SHORTEST_INTERVAL_S}s)."),
    "sort": Help("BY", f"What comes first: {', '.join(Sort)} (default connections)."),
    "filter": Help("TEXT", "Only Services whose name, address, port or pod address contains this."),
    "server": Help("URL", "The metrics server of an ipvsproxy, in place of the configured address."),
}


def take(arguments: Sequence[str]) -> Taken:
    """Split these options from the rest of a command line."""
    options = TopOptions()
    problems: list[Problem] = []
    others: list[str] = []
    for raw, name, value in flags.pieces(arguments, valued=("interval", "sort", "filter", "server")):
        if name is None or name not in HELP:
            others += raw
            continue
        text = "true" if value is None and name == "once" else value or ""
        try:
            options = _with(options, name, text)
        except ValueError as error:
            problems.append(Problem(Source(f"--{name}"), f"{quoted(text)} must be {error}", name))
    return Taken(options, others, tuple(problems))


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
