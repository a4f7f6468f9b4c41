"""Calls ``SetsDriver.observe_changed`` for several sets."""

from collections.abc import Iterable

from ipvsproxy.kernel.base.sets_driver import ObservedSet, SetsDriver


def observe_changed(driver: SetsDriver, names: Iterable[str]) -> dict[str, ObservedSet | None]:
    """The sets in ``names`` that have changed since the driver last returned them. The value is None if a set does not exist."""
    return {name: observed for one in names for name, observed in driver.observe_changed(one).items()}
