"""README and docs/ agree with the repository: linked files, named files and flags exist.

Not tested: clarity, and the outputs in README, which are copies.
"""

import pathlib
import re

import pytest

from ipvsproxy.config import catalogue
from ipvsproxy.daemon.base import log_events

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document: pathlib.Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    assert [link for link in links if not link.startswith("https://") and not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_named_file_of_the_repository_exists(document: pathlib.Path) -> None:
    named = re.findall(r"\b(?:manifests|scripts|tests|docs)/[\w./-]*[\w-]", document.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_flag_that_running_explains_exists() -> None:
    named = set(re.findall(r"--([a-z][a-z-]*[a-z])", (ROOT / "docs/running.md").read_text()))
    assert named - catalogue.BY_FLAG.keys() - {"dry-run", "output"} == set()  # these two are in config/output.py


def test_every_quoted_log_line_is_an_event() -> None:
    quoted = {event for document in DOCUMENTS for event in re.findall(r'event=("[^"]+"|\w+)', document.read_text())}
    assert quoted - log_events.EVENTS.keys() == set()
