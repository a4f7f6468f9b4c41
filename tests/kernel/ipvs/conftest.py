"""The fixture that provides an IPVS driver on the real kernel."""

import contextlib
from collections.abc import Iterator

import pytest

from ipvsproxy.kernel.ipvs.ipvs_driver import IpvsDriver


@pytest.fixture
def driver(network_namespace: None) -> Iterator[IpvsDriver]:
    with contextlib.closing(IpvsDriver()) as made:
        yield made
