"""What scripts/setup installs for the demo and for building the image.

A real installation is not tested, because it needs a fresh machine.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.kernels import control

ROOT = Path(__file__).parents[2]
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,.-]+)\])?")


def _chosen(for_demo: str) -> str:
    """The lines of the lock file for the packages that ``scripts/setup`` installs."""
    parts = "sed -n '/^demo_packages=/,/^)/p; /^locked_packages()/,/^}/p' scripts/setup"
    command = f"source <({parts}); for_demo={for_demo}; locked_packages"
    return subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _needed(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """The package and all packages that it needs on this machine."""
    found = {name.lower().replace("_", "-")}
    for text in importlib.metadata.requires(name) or ():
        requirement, _, marker = text.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)", marker)
        match = REQUIREMENT.match(requirement)
        assert match is not None
        if (not marker.strip() or (extra and extra[1] in extras)) and match[1].lower().replace("_", "-") not in found:
            found |= _needed(match[1], frozenset(filter(None, (match[2] or "").split(","))))
    return found


def test_the_demo_setup_installs_no_linters_and_pins_all_dependencies_of_ipvsproxy_by_hash() -> None:
    text = _chosen("yes")
    names = set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
    assert _needed("ipvsproxy", frozenset({"top"})) - {"ipvsproxy"} <= names
    assert names.isdisjoint({"ruff", "mypy", "import-linter", "playwright", "hypothesis", "coverage"})
    whole = _chosen("no")
    assert whole == (ROOT / ".ci/requirements.lock").read_text()
    assert all(line in whole.splitlines() for line in text.splitlines())
    assert text.count("--hash=sha256:") >= len(names)


@pytest.mark.skipif(os.geteuid() != 0, reason="scripts/image needs root")
def test_the_image_script_stops_if_the_setup_of_the_image_builder_fails(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/image", tmp_path / "scripts/image")
    control.write_program(tmp_path / "scripts/setup", '#!/bin/sh\necho "setup $*"\nexit 1\n')
    done = subprocess.run([tmp_path / "scripts/image"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "setup --image-builder-only\n")
