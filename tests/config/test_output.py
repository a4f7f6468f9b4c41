"""The options of commands that report. ``tests/test_cli.py`` tests their refusal on a command line."""

import pytest

from ipvsproxy.config import output


@pytest.mark.parametrize(
    ("arguments", "dry_run", "as_json", "rest"),
    [
        ([], False, False, []),
        (["--dry-run", "--v=4"], True, False, ["--v=4"]),
        (["--dry-run=true", "--output=json"], True, True, []),
        (["--config", "--dry-run", "--dry_run=0"], False, False, ["--config", "--dry-run"]),
        (["--output=json", "--", "--output=text", "-o"], False, True, ["--", "--output=text", "-o"]),
        (["--dry-run", "--dry-run=false", "--output", "json", "-o=text", "x"], False, False, ["x"]),
    ],
)
def test_options_are_split_from_the_rest_and_the_last_value_counts(
    arguments: list[str],
    dry_run: bool,  # noqa: FBT001 - a table
    as_json: bool,  # noqa: FBT001 - a table
    rest: list[str],
) -> None:
    assert output.take(arguments) == (output.Output(dry_run, as_json), rest)


def test_wrong_values_are_reported() -> None:
    own, _ = output.take(["--dry-run=", "--output"])
    assert [str(problem) for problem in own.problems] == [
        "--dry-run: '' must be true or false",
        "--output: '' must be one of text, json",
    ]
