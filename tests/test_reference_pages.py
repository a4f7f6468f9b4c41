"""docs/compatibility.md and docs/metrics.md are current and complete."""

import itertools
import pathlib
import re

import pytest

from ipvsproxy.config import catalogue
from ipvsproxy.config.option import Likeness
from ipvsproxy.daemon.http.paths import SHOWN_PATHS
from ipvsproxy.daemon.metrics.series import ALL
from tests.support import golden_fixtures, reference_pages
from tests.test_monitoring import our_page

PROCESS = ("process_", "python_")
DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", reference_pages.PAGES)
async def test_each_page_in_docs_has_the_tables_that_the_script_generates(name: str) -> None:
    generated = reference_pages.PAGES[name](await our_page())
    assert (DOCS / f"{name}.md").read_text() == generated, f"run scripts/compatibility {name}"


def test_the_compatibility_page_has_every_flag_and_every_endpoint_and_explains_every_status() -> None:
    text = (DOCS / "compatibility.md").read_text()
    flags = [option.flag for options in catalogue.OPTIONS.values() for option in options if option.flag]
    assert [flag for flag in flags if f"-{flag}` |" not in text] == []
    assert [path for path in SHOWN_PATHS if f" | `{path}` | " not in text] == []
    assert [status for status in Likeness if f"\n- **{status}**: " not in text] == []


def test_each_change_of_kubernetes_names_a_test_that_exists() -> None:
    section = (DOCS / "compatibility.md").read_text().partition("\n## Kubernetes ")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    names = [re.findall(r"`(tests/[^`]+)`", row[3]) for row in rows]
    untested = [row[1] for row, found in zip(rows, names, strict=True) if not found]
    assert len(untested) == 1, untested
    # The deprecation needs no test, because ipvsproxy does nothing about it.
    assert untested[0].startswith("the IPVS mode is deprecated")
    for name in itertools.chain(*names):
        path, _, test = name.partition("::")
        assert f"def {test}(" in (DOCS.parent / path).read_text() if test else (DOCS.parent / path).exists(), name


def test_the_metrics_page_has_every_recorded_series_of_kube_proxy() -> None:
    recorded = golden_fixtures.recording("default", "P0")["metrics"]
    text = (DOCS / "metrics.md").read_text()
    assert [name for name in {series.partition("{")[0] for series in recorded} if f"`{name}`" not in text] == []


async def test_every_series_has_a_description_and_a_histogram_does_not_list_its_bounds_as_a_label() -> None:
    listed = {one.name: one for one in reference_pages.series(await our_page())}
    assert all(one.meaning for one in listed.values())
    assert listed["kubeproxy_sync_proxy_rules_duration_seconds"].labels == ("ip_family",)
    assert listed["ipvsproxy_service_bytes_total"].labels == ("direction", "namespace", "port", "protocol", "service")


async def test_metrics_are_served_with_the_declared_names_types_and_labels() -> None:
    declared = {one.name: one for one in reference_pages.declared()}
    shown = {one.name: one for one in reference_pages.series(await our_page()) if not one.name.startswith(PROCESS)}
    late = {one.name for one in ALL if one.is_late}
    assert shown.keys() == declared.keys() - late
    for name, one in shown.items():
        assert one == declared[name]._replace(labels=one.labels)
        assert one.labels in (declared[name].labels, ()), "a metric without series has no labels"
