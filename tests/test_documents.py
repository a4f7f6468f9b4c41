"""Checks that the files, headings, modules and flags named in README and docs/ exist in the repository.

Numbers that a page computes from other numbers follow the rule that the page states. These tests do not check clarity, and do not
check the copied outputs in README.
"""

import math
import pathlib
import re

import pytest

from ipvsproxy.config import catalogue
from ipvsproxy.daemon.metrics.series import ALL
from ipvsproxy.kernel import host
from tests.support import log_page

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "ipvsproxy"
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
LONGEST_CELL = 600
"""The largest number of characters in a cell of a table; a reader would not understand a longer cell at the first reading."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_in_the_documents_leads_to_a_file(document: pathlib.Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    assert [link for link in links if not link.startswith("https://") and not (document.parent / link).exists()] == []


def anchors(page: pathlib.Path) -> set[str]:
    """The headings of a page in the form that links use: in lower case, without punctuation, with hyphens instead of spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_section_leads_to_a_heading(document: pathlib.Path) -> None:
    links = re.findall(r"\]\(((?:[\w/.-]+\.md)?)#([^)]+)\)", document.read_text())
    pages = ((document.parent / page if page else document, anchor) for page, anchor in links)
    assert [(page.name, anchor) for page, anchor in pages if anchor not in anchors(page)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_of_the_repository_that_a_document_names_exists(document: pathlib.Path) -> None:
    own = re.sub(r"https?://\S+", "", document.read_text())
    named = re.findall(r"\b(?:manifests|scripts|tests|docs)/[\w./-]*[\w-]", own)
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_only_existing_files_of_the_program(document: pathlib.Path) -> None:
    named = re.findall(r"`((?:ipvsproxy/)?(?:[a-z]+/)+[a-z_]+\.(?:py|c))`", document.read_text())
    assert [name for name in named if not any((root / name).exists() for root in (ROOT, PACKAGE))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_cell_of_a_table_is_too_long(document: pathlib.Path) -> None:
    rows = (line for line in document.read_text().splitlines() if line.startswith("|"))
    assert [cell for row in rows for cell in row.split(" | ") if len(cell) > LONGEST_CELL] == []


def test_every_flag_in_running_md_exists() -> None:
    named = set(re.findall(r"--([a-z][a-z-]*[a-z])", (ROOT / "docs/running.md").read_text()))
    assert named - catalogue.BY_FLAG.keys() == set()


def test_the_page_running_md_lists_exactly_the_kernel_modules_that_the_program_loads_at_its_start() -> None:
    section = (ROOT / "docs/running.md").read_text().partition("\n### Kernel modules\n")[2].partition("\n### ")[0]
    of_nftables = re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[0].split()
    assert set(of_nftables) == {*host.NFTABLES_MODULES, "ip_vs_rr", "nf_conntrack_netlink"}
    of_iptables = {*of_nftables[:5], *re.findall(r"`((?:ip_set|xt)\w*)`", section)}
    assert of_iptables == {*host.MODULES, "ip_vs_rr", "nf_conntrack_netlink"}


def test_every_log_event_in_a_quoted_log_line_exists() -> None:
    quoted = {event for document in DOCUMENTS for event in re.findall(r'event=("[^"]+"|\w+)', document.read_text())}
    assert quoted - log_page.EVENTS == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_log_event_that_a_document_names_exists(document: pathlib.Path) -> None:
    lists = re.findall(r"\blog lines? ((?:`\w+`(?:, and |, | and )?)+)", document.read_text())
    assert {event for named in lists for event in re.findall(r"\w+(?=`)", named)} - log_page.EVENTS == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_metric_that_a_document_names_exists(document: pathlib.Path) -> None:
    named = set(re.findall(r"\b(?:ipvsproxy|kubeproxy)_[a-z_]*[a-z]\b", document.read_text()))
    assert named - {one.name for one in ALL} == set()


# Tests of the computed numbers in docs/choosing.md and docs/running.md. The measured figures come from docs/performance.md.

SIZES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "choosing.md").read_text().partition("\n## Sizing\n")[2].splitlines()
    if re.match(r"\| [\d,]+ \u00d7 \d+ \|", line)
]
UPDATES = re.findall(
    r"^\| `(\d+)(%?)`[^|]*\| ([\d,]+) nodes? \| ([\d,]+) \| (.+) \|$", (ROOT / "docs" / "running.md").read_text(), re.MULTILINE
)
NODES, NODE_S = 1000, 25
MEASURED = re.sub(r"[,*]", "", (ROOT / "docs" / "performance.md").read_text())


def first_number(cell: str) -> int:
    return int(re.findall(r"\d+", cell)[0])


@pytest.mark.parametrize("row", SIZES, ids=lambda row: row[0])
def test_memory_requests_and_limits_in_the_documentation_follow_from_the_measured_memory(row: list[str]) -> None:
    services, resident, request, limit = row[0], *map(first_number, row[1:4])
    assert request == math.ceil(2 * resident * 1e6 / 2**20 / 64) * 64
    assert limit == 2 * request
    case = services.replace(",", "").replace(" \u00d7 ", "x")
    rows = [line for line in MEASURED.splitlines() if "resident" in line or "start" in line]
    assert any(case in line for line in rows)
    assert any(re.search(rf"\b{resident}\b.*MB", line) for line in rows)


def test_this_module_finds_every_row_of_the_sizing_table_and_of_the_update_table() -> None:
    assert len(SIZES) == 5
    assert len(UPDATES) == 4


@pytest.mark.parametrize("row", UPDATES, ids=lambda row: row[0] + row[1])
def test_the_duration_of_a_rolling_update_is_computed_from_the_number_of_nodes(row: tuple[str, str, str, str, str]) -> None:
    number, percent, at_a_time, rounds, duration = row
    unavailable = math.ceil(NODES * int(number) / 100) if percent else int(number)
    assert unavailable == int(at_a_time.replace(",", ""))
    assert int(rounds.replace(",", "")) == math.ceil(NODES / unavailable)
    hours, minutes = (re.findall(r"(\d+) h ", duration) or ["0"])[0], re.findall(r"(\d+) min", duration)[0]
    assert int(hours) * 60 + int(minutes) == round(NODES / unavailable * NODE_S / 60)
