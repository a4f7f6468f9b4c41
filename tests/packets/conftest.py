"""The lab or the three nodes of a test module, and both bindings of Service addresses, which must give the same results."""

from collections.abc import Iterator

import pytest

from ipvsproxy.translate.translation_settings import Binding
from tests.packets import questions, three_nodes
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


@pytest.fixture(scope="module", name="three")
def _three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[three_nodes.Three]:
    """Three nodes, started with direct return and with the ``FLAGS`` of the module."""
    with three_nodes.running(tmp_path_factory.mktemp("direct"), *request.module.FLAGS) as running:
        yield running
