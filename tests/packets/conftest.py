"""The lab of a module, and both bindings of Service addresses, with which packets have the same results."""

from collections.abc import Iterator

import pytest

from ipvsproxy.translate.settings import Binding
from tests.support import lab


@pytest.fixture(scope="module", name="laboratory")
def _laboratory() -> Iterator[lab.Lab]:
    with lab.Lab() as laboratory:
        yield laboratory


@pytest.fixture(scope="module", params=Binding, ids=str)
def binding(request: pytest.FixtureRequest) -> Binding:
    """The binding of the program under test."""
    chosen: Binding = request.param
    return chosen
