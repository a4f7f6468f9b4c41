"""docs/compatibility.md, docs/log.md and docs/metrics.md, written from what the program itself has.

``python -m tests.support.reference_pages compatibility`` prints one of them.
"""

import asyncio
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.config import catalogue
from ipvsproxy.config.option import Option, Status
from ipvsproxy.daemon.base import log_events
from ipvsproxy.daemon.metrics.series import ALL
from tests.test_monitoring import our_page

HISTOGRAM_ENDINGS = ("_bucket", "_sum", "_count")
ABSENT = (
    "go_*",
    "workqueue_*",
    "rest_client_rate_limiter_duration_seconds",
    "rest_client_request_size_bytes",
    "rest_client_response_size_bytes",
    "kubernetes_build_info",
    "kubernetes_feature_enabled",
    "registered_metrics_total",
)
"""What kube-proxy shows besides, of its own libraries and language."""

ENDPOINTS: Sequence[tuple[str, str, Status, str]] = (
    (
        "health, 10256",
        "/healthz",
        Status.EXTENDED,
        "503 before the first sync; `waitingForFirstLists` until then, `staleWatches`, `unreadable`, `unmetSettings`",
    ),
    ("health, 10256", "/livez", Status.EXTENDED, "as above"),
    ("metrics, 10249", "/metrics", Status.EXTENDED, "the series below"),
    ("metrics, 10249", "/metrics/slis", Status.SAME, ""),
    ("metrics, 10249", "/healthz", Status.SAME, "also `/healthz/ping`, `?verbose`"),
    ("metrics, 10249", "/proxyMode", Status.SAME, "always `ipvs`"),
    ("metrics, 10249", "/configz", Status.SAME, "our own fields in the section `ipvsproxy`"),
    ("metrics, 10249", "/flagz", Status.PARTIAL, "flags that have a field in the file; the heading differs"),
    ("metrics, 10249", "/statusz", Status.PARTIAL, "the heading differs"),
    ("metrics, 10249", "/debug/flags/v", Status.SAME, "with `--profiling`"),
    ("metrics, 10249", "/debug/pprof/", Status.WITHOUT_EFFECT, "404: there is no Go profiler in here"),
    ("healthCheckNodePort", "any", Status.SAME, "on the node addresses of `--nodeport-addresses`"),
)


class Series(NamedTuple):
    """One metric as the page shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def series(page: str) -> Iterator[Series]:
    """All metrics of a page, by name."""
    meanings = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    labels: dict[str, set[str]] = {}
    for line in page.splitlines():
        name, _, rest = line.rpartition(" ")[0].partition("{")
        for ending in HISTOGRAM_ENDINGS:
            if kinds.get(name.removesuffix(ending)) == "histogram":
                name = name.removesuffix(ending)
        if not line.startswith("#"):
            labels.setdefault(name, set()).update(re.findall(r'(\w+)="', rest))
    for name, kind in sorted(kinds.items()):
        yield Series(name, kind, tuple(sorted(labels.get(name, set()) - {"le"})), meanings[name])


def declared() -> Iterator[Series]:
    """All metrics that the program declares, by name."""
    for one in sorted(ALL, key=lambda one: one.name):
        yield Series(one.name, one.type.value, tuple(sorted(one.labels)), one.meaning)


def metrics(page: str) -> str:
    """docs/metrics.md: the declared metrics, and those of the page that prometheus_client has of itself."""
    ours = {one.name for one in ALL if one.name.startswith("ipvsproxy_")}
    groups = {
        "kube-proxy's": [one for one in declared() if one.name not in ours],
        "Our own": [one for one in declared() if one.name in ours],
        "The process": [one for one in series(page) if one.name.startswith(("process_", "python_"))],
    }
    lines = [
        "# Metrics",
        "",
        "What `/metrics` on port 10249 shows. Written by `scripts/compatibility metrics` from the program itself.",
        "Series by Service and endpoint, and what bounds their number: [running.md](running.md).",
    ]
    for title, members in groups.items():
        rows = ((f"`{one.name}`", one.kind, _code(one.labels), one.meaning) for one in members)
        lines += ["", f"## {title}", "", *_table(("name", "type", "labels", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _names(page: str) -> Iterable[str]:
    return sorted({one.name for one in declared()} | {one.name for one in series(page)})


def compatibility(page: str) -> str:
    """docs/compatibility.md."""
    options = [option for group in catalogue.OPTIONS.values() for option in group]
    lines = [
        "# Compatibility",
        "",
        "Flags, fields of the file, endpoints and metrics next to those of kube-proxy 1.36 in IPVS mode. Written by",
        "`scripts/compatibility` from the program itself; [differences.md](differences.md) has what differs in behaviour.",
        "",
        *(f"- **{status}**: {meaning}" for status, meaning in _MEANINGS.items()),
        "",
        "## Flags and fields of the file",
        "",
        *_table(("flag", "field", "", ""), map(_option_row, options)),
        "",
        "## Endpoints",
        "",
        *_table(("server", "path", "", ""), ((server, f"`{path}`", str(how), why) for server, path, how, why in ENDPOINTS)),
        "",
        "## Metrics",
        "",
        *_table(("name", ""), ((f"`{name}`", str(_status(name))) for name in _names(page))),
        "",
        f"Not there, for they are about kube-proxy's libraries and language: {_code(ABSENT)}.",
    ]
    return "\n".join(lines) + "\n"


_MEANINGS: Mapping[Status, str] = {
    Status.SAME: "name, syntax and meaning of kube-proxy",
    Status.EXTENDED: "those, and more",
    Status.PARTIAL: "a part of them",
    Status.WITHOUT_EFFECT: "accepted, and named once in the log when it is set; why it means nothing here stands beside it",
    Status.OWN: "kube-proxy has no such thing",
}


def _option_row(option: Option) -> tuple[str, ...]:
    dashes = "-" if option.flag == "v" else "--"
    flag = f"`{dashes}{option.flag}`" if option.flag else ""
    says = "" if option.status is Status.SAME else option.help
    return flag, f"`{option.field}`" if option.field else "", str(option.status), says


def _status(name: str) -> Status:
    return Status.OWN if name.startswith(("ipvsproxy_", "python_")) else Status.SAME


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield f"|{' --- |' * len(heading)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"


def log(_page: str) -> str:
    """docs/log.md."""
    lines = [
        "# The log",
        "",
        "Written by `scripts/compatibility log` from the program itself; [running.md](running.md) says which `-v`",
        "tells what. Names of events and keys stay; what stands in `hint` is prose and may change.",
        "",
        "## Events",
        "",
        *_table(("event", "meaning"), ((f"`{name}`", meaning) for name, meaning in sorted(log_events.EVENTS.items()))),
        "",
        "## Keys",
        "",
        f"{_code(log_events.COUNTING)} have a key for each kind of kernel object that they count, besides:",
        "",
        *_table(("key", "type", "meaning"), ((f"`{name}`", *key) for name, key in sorted(log_events.KEYS.items()))),
    ]
    return "\n".join(lines) + "\n"


PAGES = {"compatibility": compatibility, "log": log, "metrics": metrics}

if __name__ == "__main__":
    sys.stdout.write(PAGES[sys.argv[1]](asyncio.run(our_page())))
