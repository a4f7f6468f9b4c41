"""The computed numbers in docs/choosing.md and docs/running.md follow the rules that these pages state.

The measured figures come from docs/performance.md.
"""

import math
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
SIZES = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "choosing.md").read_text().partition("\n## Sizing\n")[2].splitlines()
    if re.match(r"\| [\d,]+ \u00d7 \d+ \|", line)
]
UPDATES = re.findall(
    r"^\| `(\d+)(%?)`[^|]*\| ([\d,]+) nodes? \| ([\d,]+) \| (.+) \|$", (DOCS / "running.md").read_text(), re.MULTILINE
)
NODES, NODE_S = 1000, 25
MEASURED = re.sub(r"[,*]", "", (DOCS / "performance.md").read_text())


def first_number(cell: str) -> int:
    return int(re.findall(r"\d+", cell)[0])


@pytest.mark.parametrize("row", SIZES, ids=lambda row: row[0])
def test_requests_and_limits_are_computed_from_the_measured_memory(row: list[str]) -> None:
    services, resident, request, limit = row[0], *map(first_number, row[1:4])
    assert request == math.ceil(2 * resident * 1e6 / 2**20 / 64) * 64
    assert limit == 2 * request
    case = services.replace(",", "").replace(" \u00d7 ", "x")
    rows = [line for line in MEASURED.splitlines() if "resident" in line or "start" in line]
    assert any(case in line for line in rows)
    assert any(re.search(rf"\b{resident}\b.*MB", line) for line in rows)


def test_the_size_tables_have_rows_that_can_be_checked() -> None:
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
