"""The rows of docs/compatibility.md and docs/metrics.md that are generated from the program.

``python -m tests.support.reference_pages compatibility`` writes the tables of docs/compatibility.md. With the argument
``metrics``, the module writes the tables of docs/metrics.md.
"""

import asyncio
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import parser

from ipvsproxy.config import catalogue
from ipvsproxy.config.option import Likeness, Option
from ipvsproxy.daemon.metrics.series import ALL
from tests.test_monitoring import our_page

DOCS = pathlib.Path(__file__).parents[2] / "docs"


class Series(NamedTuple):
    """One metric, with the columns of its row in docs/metrics.md."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def series(page: str) -> Iterator[Series]:
    """All metrics on a metrics page, sorted by name."""
    for family in sorted(parser.text_string_to_metric_families(page), key=lambda one: one.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels}
        yield Series(name, family.type, tuple(sorted(labels - {"le"})), family.documentation)


def declared() -> Iterator[Series]:
    """All metrics that the program declares, sorted by name."""
    for one in sorted(ALL, key=lambda one: one.name):
        yield Series(one.name, one.type, tuple(sorted(one.labels)), one.meaning)


def metrics(page: str) -> str:
    """The text of docs/metrics.md, with rows for the declared metrics and for the metrics that prometheus_client adds."""
    ours = {one.name for one in ALL if one.name.startswith("ipvsproxy_")}
    groups = {
        "kube-proxy's": [one for one in declared() if one.name not in ours],
        "Our own": [one for one in declared() if one.name in ours],
        "The process": [one for one in series(page) if one.name.startswith(("process_", "python_"))],
    }
    text = (DOCS / "metrics.md").read_text()
    for title, members in groups.items():
        rows = ((f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.meaning) for one in members)
        text = _with_rows(text, title, rows)
    return text


def compatibility(page: str) -> str:
    """The text of docs/compatibility.md, with one row for each option (its flag and its field) and one row for each metric."""
    options = [option for group in catalogue.OPTIONS.values() for option in group]
    names = sorted({one.name for one in (*declared(), *series(page))})
    text = (DOCS / "compatibility.md").read_text()
    text = _with_rows(text, "Flags and fields of the file", map(_option_row, options))
    return _with_rows(text, "Metrics", ((f"`{name}`", str(_status(name))) for name in names))


def _option_row(option: Option) -> tuple[str, ...]:
    dashes = "-" if option.flag == "v" else "--"
    flag = f"`{dashes}{option.flag}`" if option.flag else ""
    remark = "" if option.status is Likeness.SAME else option.help
    return flag, f"`{option.field}`" if option.field else "", str(option.status), remark


def _status(name: str) -> Likeness:
    return Likeness.OWN if name.startswith(("ipvsproxy_", "python_")) else Likeness.SAME


def _with_rows(text: str, title: str, rows: Iterable[Sequence[str]]) -> str:
    """The page ``text`` with ``rows`` as the rows of the first table below the heading ``title``.

    All else on a page is written by hand.
    """
    found = re.search(rf"\n## {title}\n.*?\n[| -]+\n((?:\|[^\n]*\n)+)", text, re.DOTALL)
    assert found, f"no table below {title!r}"
    lines = "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |\n" for row in rows)
    return text[: found.start(1)] + lines + text[found.end(1) :]


PAGES = {"compatibility": compatibility, "metrics": metrics}

if __name__ == "__main__":
    (DOCS / f"{sys.argv[1]}.md").write_text(PAGES[sys.argv[1]](asyncio.run(our_page())))
