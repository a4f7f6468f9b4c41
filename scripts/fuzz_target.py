"""Runs one target of tests/fuzz under atheris; started by ``scripts/fuzz``.

The arguments after the target's name are passed to libFuzzer.
"""

import pathlib
import sys

import atheris

WORDS = pathlib.Path("build/fuzz/words.txt")


def main() -> None:
    """Fuzz until libFuzzer ends the process."""
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=["ipvsproxy"], enable_loader_override=False):
        from tests.fuzz import targets, words  # noqa: PLC0415 - atheris instruments imports in this block
    WORDS.write_text("".join(f'"{word}"\n' for word in words.ALL))
    atheris.Setup([*sys.argv, f"-dict={WORDS}"], targets.TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
