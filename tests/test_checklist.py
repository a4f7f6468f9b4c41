"""The checklist counts the tests of each case, and reports a marker whose case does not exist."""

from collections.abc import Callable

import pytest

from tests import checklist

pytest_plugins = ("pytester",)


@pytest.fixture(name="report")
def _report(pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Makes a function that returns the output of the checklist for one test.

    The test runs twice, and has a marker with the given case numbers.
    """

    def report(numbers: str) -> str:
        pytester.makeini(
            "[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n    checklist(*numbers): shows these cases\n"
        )
        path = pytester.makepyfile(
            f"""
            import pytest

            @pytest.mark.checklist({numbers})
            @pytest.mark.parametrize("value", [1, 2])
            def test_of_a_case(value):
                pass
            """
        )
        assert checklist.main([str(path)]) == 1, "most cases have no test here"
        return capsys.readouterr().out

    return report


def test_a_test_counts_once_for_each_of_its_checklist_cases(report: Callable[[str], str]) -> None:
    printed = report("13, 14")
    assert "2 of 104 cases have a test" in printed
    assert printed.count("::test_of_a_case") == 2


def test_a_case_number_that_does_not_exist_is_reported(report: Callable[[str], str]) -> None:
    assert "there is no case 999: test_a_case_number_that_does_not_exist_is_reported.py::test_of_a_case" in report("999")
