"""The fixtures of packet tests.

The tests of a module share one running program, or one group of three nodes. The binding says how Service addresses become local.

Both bindings must give the same results.
"""

from collections.abc import Iterator, Mapping

import pytest

from ipvsproxy.translate.translation_settings import Binding
from tests.packets import questions, three_nodes
from tests.support import cluster, lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove each test whose ``Question`` is not asked with the test's ``Binding``."""
    items[:] = [item for item in items if not _is_repetition(item)]


def _is_repetition(item: pytest.Item) -> bool:
    match getattr(getattr(item, "callspec", None), "params", None):
        case {"question": questions.Question() as question, "binding": Binding() as binding}:
            return not question.is_of(binding)
    return False


@pytest.fixture(scope="module", params=Binding, ids=str)
def binding(request: pytest.FixtureRequest) -> Binding:
    """The method by which the program under test makes Service addresses local."""
    chosen: Binding = request.param
    return chosen


@pytest.fixture(scope="module", name="three")
def _three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[three_nodes.Three]:
    """Three nodes, started with direct return and with the ``FLAGS`` of the module."""
    with three_nodes.running(tmp_path_factory.mktemp("direct"), *request.module.FLAGS) as running:
        yield running


@pytest.fixture(scope="module", name="running")
def _running(
    request: pytest.FixtureRequest, laboratory: lab.Lab, tmp_path_factory: pytest.TempPathFactory, binding: Binding
) -> Iterator[cluster.Cluster]:
    """One run of the program for the module, with this binding and with the ``FLAGS`` of the module."""
    flags = getattr(request.module, "FLAGS", ())
    with cluster.Cluster(laboratory, tmp_path_factory.mktemp("running"), *flags, f"--ipvs-vip-binding={binding}") as running:
        yield running


@pytest.fixture(scope="module", name="answers")
def _answers(
    request: pytest.FixtureRequest, running: cluster.Cluster, binding: Binding
) -> Mapping[questions.Question, lab.Result]:
    """Send each request in ``QUESTIONS`` that a chosen test of the module needs, and return the results."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module]
    asked = {item.callspec.params.get("question") for item in tests if hasattr(item, "callspec")}
    return questions.ask(running.lab, [one for one in request.module.QUESTIONS if one in asked and one.is_of(binding)])
