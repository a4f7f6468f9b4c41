"""The script ``scripts/versions``, run with stand-ins for Python, pip and pytest."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from scripts.kernels import control

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = f"""#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
mkdir -p "$3/bin"
for name in pip python; do
    printf '#!/bin/sh\\necho "$0 $*" >>calls\\ncase "$*" in *pytest*) [ ! -e broken ] ;; esac\\n' >"$3/bin/$name"
    chmod +x "$3/bin/$name"
done
"""


@pytest.fixture(name="place")
def _place(tmp_path: pathlib.Path) -> pathlib.Path:
    for name in ("scripts/versions", "pyproject.toml", ".ci/requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    control.write_program(python, PYTHON)
    return tmp_path


def run(place: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((str(place / "scripts/versions"), *words), capture_output=True, text=True, check=False)


def requirements(place: pathlib.Path, name: str) -> set[str]:
    return set((place / "build/versions" / name / "requirements.txt").read_text().splitlines())


def test_unit_tests_run_with_the_oldest_and_with_the_newest_allowed_packages(place: pathlib.Path) -> None:
    done = run(place, "oldest", "newest", "--", "tests/model")
    assert done.returncode == 0, done.stdout + done.stderr
    oldest, newest = requirements(place, "oldest"), requirements(place, "newest")
    locked = {line for line in oldest & newest if line.startswith(("pytest==", "setuptools=="))}
    assert len(locked) == 2
    allowed = {line for line in newest if line.startswith("aiohttp>=")}
    assert len(allowed) == 1
    assert {line.replace(">=", "==").partition(",")[0] for line in allowed} <= oldest
    assert not any(">" in line for line in oldest)
    tested = [line for line in (place / "calls").read_text().splitlines() if "pytest" in line]
    assert [line.split("/")[2] for line in tested] == ["oldest", "newest"]
    assert all(line.endswith("not kernel tests/model") for line in tested)


def test_the_script_fails_if_a_test_fails_but_not_if_a_python_version_is_missing(place: pathlib.Path) -> None:
    missing = run(place, "3.99")
    assert (missing.returncode, missing.stdout) == (0, "== 3.99: no such Python here\n")
    (place / "broken").touch()
    assert run(place, "newest").returncode == 1
