"""Marks for tests of a module whose program has a fixed ``binding``.

Tests without such a mark run with both bindings (``conftest.py``).
"""

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import Binding

by_family = pytest.mark.parametrize(
    ("family", "binding"),
    list(zip(Family, Binding, strict=True)),
    indirect=["binding"],
    scope="module",
    ids=[family.label for family in Family],
)
"""Run a test once for each family, with one binding each, because rules, flows and sets do not depend on how an address
becomes local."""
with_addresses, with_routes = (
    pytest.mark.parametrize("binding", [one], indirect=True, scope="module", ids=str)
    for one in (Binding.ADDRESSES, Binding.ROUTES)
)
