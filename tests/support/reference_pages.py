"""docs/compatibility.md and docs/metrics.md, generated from the program.

``python -m tests.support.reference_pages compatibility`` writes docs/compatibility.md, and the argument ``metrics`` writes
docs/metrics.md.
"""

import asyncio
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.config import catalogue
from ipvsproxy.config.option import Likeness, Option
from ipvsproxy.daemon.metrics.series import ALL
from tests.test_monitoring import our_page

DOCS = pathlib.Path(__file__).parents[2] / "docs"
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
"""Metrics of kube-proxy's own libraries and language, which ipvsproxy does not have."""

ENDPOINTS: Sequence[tuple[str, str, Likeness, str]] = (
    (
        "health, 10256",
        "/healthz",
        Likeness.EXTENDED,
        (
            "503 before the first sync; `waitingForFirstLists` until then, `staleWatches`, `unreadable`, `unmetSettings`, "
            "`leftovers`; with `?verbose` also version, digest of the configuration, pending objects and last drift"
        ),
    ),
    ("health, 10256", "/livez", Likeness.EXTENDED, "as above"),
    ("metrics, 10249", "/", Likeness.OWN, "links to the paths below"),
    ("metrics, 10249", "/metrics", Likeness.EXTENDED, "the series below"),
    ("metrics, 10249", "/metrics/slis", Likeness.SAME, ""),
    ("metrics, 10249", "/healthz", Likeness.SAME, "also `/healthz/ping`, `?verbose`"),
    ("metrics, 10249", "/proxyMode", Likeness.SAME, "always `ipvs`"),
    ("metrics, 10249", "/configz", Likeness.SAME, "our own fields in the section `ipvsproxy`"),
    ("metrics, 10249", "/flagz", Likeness.PARTIAL, "flags that have a field in the file; the heading differs"),
    ("metrics, 10249", "/statusz", Likeness.PARTIAL, "the heading differs"),
    ("metrics, 10249", "/debug/flags/v", Likeness.SAME, "with `--profiling`"),
    ("metrics, 10249", "/ui/", Likeness.OWN, "the node as a page, and JSON for it ([ui.md](ui.md)); off with `--ui=false`"),
    ("metrics, 10249", "/debug/pprof/", Likeness.WITHOUT_EFFECT, "404: ipvsproxy has no Go profiler"),
    ("healthCheckNodePort", "any", Likeness.SAME, "on the node addresses of `--nodeport-addresses`"),
)


class Series(NamedTuple):
    """One metric in the form of docs/metrics.md."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def series(page: str) -> Iterator[Series]:
    """All metrics that a page lists, by name."""
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
        yield Series(one.name, one.type, tuple(sorted(one.labels)), one.meaning)


def metrics(page: str) -> str:
    """docs/metrics.md: the declared metrics, and the metrics that prometheus_client adds."""
    ours = {one.name for one in ALL if one.name.startswith("ipvsproxy_")}
    groups = {
        "kube-proxy's": [one for one in declared() if one.name not in ours],
        "Our own": [one for one in declared() if one.name in ours],
        "The process": [one for one in series(page) if one.name.startswith(("process_", "python_"))],
    }
    lines = [
        "# Metrics",
        "",
        "This page lists the metrics of `/metrics` on port 10249. `scripts/compatibility metrics` writes it from the program.",
        "[running.md](running.md#traffic) explains the series of Services and endpoints, and how many there may be.",
        "",
        'The dashboard "Kubernetes / Proxy" and the alert `KubeProxyDown` of kubernetes-mixin, which kube-prometheus-stack',
        'contains, work as they are if these series have the label `job="kube-proxy"`',
        "([how](running.md#alerts-and-dashboards-made-for-kube-proxy)). Only the panel Goroutines stays empty, because a program",
        "in Python has no goroutines. `tests/test_prometheus.py` evaluates each query of dashboard and alert in a real",
        "Prometheus that has scraped a real page.",
    ]
    for title, members in groups.items():
        rows = ((f"`{one.name}`", one.kind, _code(one.labels), one.meaning) for one in members)
        lines += ["", f"## {title}", "", *_table(("name", "type", "labels", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def _names(page: str) -> Iterable[str]:
    return sorted({one.name for one in declared()} | {one.name for one in series(page)})


def compatibility(page: str) -> str:
    """docs/compatibility.md. The sections of the page from "Kubernetes 1.33 to 1.38" on are kept as they are."""
    options = [option for group in catalogue.OPTIONS.values() for option in group]
    lines = [
        "# Compatibility",
        "",
        "This page compares flags, fields of the file, endpoints and metrics with kube-proxy 1.36 in IPVS mode.",
        '`scripts/compatibility` writes this page from the program, except "Kubernetes 1.33 to 1.38" and "Kernels".',
        "[differences.md](differences.md) lists differences in behaviour.",
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
        f"The following metrics are absent, because they describe kube-proxy's libraries and language: {_code(ABSENT)}.",
        "",
        "",
    ]
    _, heading, by_hand = (DOCS / "compatibility.md").read_text().partition("## Kubernetes 1.33 to 1.38\n")
    return "\n".join(lines) + heading + by_hand


_MEANINGS: Mapping[Likeness, str] = {
    Likeness.SAME: "name, syntax and meaning are as in kube-proxy",
    Likeness.EXTENDED: "ipvsproxy has everything that kube-proxy has, and more",
    Likeness.PARTIAL: "ipvsproxy has a part of what kube-proxy has",
    Likeness.WITHOUT_EFFECT: "ipvsproxy accepts the option, and logs it once if it is set; the table says why it has no effect",
    Likeness.OWN: "only ipvsproxy has the option, not kube-proxy",
}


def _option_row(option: Option) -> tuple[str, ...]:
    dashes = "-" if option.flag == "v" else "--"
    flag = f"`{dashes}{option.flag}`" if option.flag else ""
    remark = "" if option.status is Likeness.SAME else option.help
    return flag, f"`{option.field}`" if option.field else "", str(option.status), remark


def _status(name: str) -> Likeness:
    return Likeness.OWN if name.startswith(("ipvsproxy_", "python_")) else Likeness.SAME


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield f"|{' --- |' * len(heading)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"


PAGES = {"compatibility": compatibility, "metrics": metrics}

if __name__ == "__main__":
    (DOCS / f"{sys.argv[1]}.md").write_text(PAGES[sys.argv[1]](asyncio.run(our_page())))
