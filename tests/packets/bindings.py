"""Pytest marks that choose the IP family of a test, or the ``binding`` with which the program of a test module runs.

Tests without such a mark run with both bindings (``conftest.py``).
"""

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import Binding
from tests.support import patience


def label(family: Family) -> str:
    """The name of an IP family in the name of a test case."""
    return family.label


def _bound(*usual: Family) -> pytest.MarkDecorator:
    pairs = zip(Family, Binding, strict=True)
    cases = [pytest.param(*pair, marks=[patience.THOROUGH] * (pair[0] not in usual), id=label(pair[0])) for pair in pairs]
    return pytest.mark.parametrize(("family", "binding"), cases, indirect=["binding"], scope="module")


def _mainly(usual: Family) -> pytest.MarkDecorator:
    cases = [pytest.param(one, marks=[patience.THOROUGH] * (one is not usual), id=label(one)) for one in Family]
    return pytest.mark.parametrize("family", cases)


by_family = _bound(*Family)
"""Run a test once for each family, with a different binding for each family. One binding per family suffices, because rules,
flows and sets do not depend on how an address becomes local."""
by_ipv4, by_ipv6 = map(_bound, Family)
"""Like ``by_family``, but only a thorough run uses both families. The usual run uses only IPv4 for ``by_ipv4``, and only IPv6 for
``by_ipv6``. The program treats both families alike, and ``test_services.py`` sends each request over both families."""
each_family = pytest.mark.parametrize("family", Family, ids=label)
mainly_ipv4, mainly_ipv6 = map(_mainly, Family)
"""Run a test with one IP family; in a thorough run, also with the other family. These marks are for test modules in which
ipvsproxy runs with only one binding."""
with_addresses, with_routes = (
    pytest.mark.parametrize("binding", [one], indirect=True, scope="module", ids=str)
    for one in (Binding.ADDRESSES, Binding.ROUTES)
)
