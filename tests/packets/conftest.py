"""The lab of a test module, and both bindings of Service addresses, with which packets must have the same results."""

from collections.abc import Iterator

import pytest

from ipvsproxy.translate.settings import Binding
from tests.packets import questions
from tests.support import lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip requests that are not needed with a binding."""
    items[:] = [item for item in items if not _is_repetition(item)]


def _is_repetition(item: pytest.Item) -> bool:
    match getattr(getattr(item, "callspec", None), "params", None):
        case {"question": questions.Question() as question, "binding": Binding() as binding}:
            return not questions.of_binding([question], binding)
    return False


@pytest.fixture(scope="module", name="laboratory")
def _laboratory() -> Iterator[lab.Lab]:
    with lab.Lab() as laboratory:
        yield laboratory


@pytest.fixture(scope="module", params=Binding, ids=str)
def binding(request: pytest.FixtureRequest) -> Binding:
    """The binding of the program under test."""
    chosen: Binding = request.param
    return chosen
