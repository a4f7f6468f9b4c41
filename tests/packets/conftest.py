"""Both ways by which Service addresses become local: what packets meet is the same."""

import pytest

from ipvsproxy.translate.settings import Binding


@pytest.fixture(scope="module", params=Binding, ids=str)
def binding(request: pytest.FixtureRequest) -> Binding:
    """The way of the program under test."""
    chosen: Binding = request.param
    return chosen
