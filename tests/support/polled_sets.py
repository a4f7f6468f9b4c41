"""Reads several sets with one call."""

from collections.abc import Iterable

from ipvsproxy.kernel.base.sets_driver import ObservedSet, SetsDriver


def observe_changed(driver: SetsDriver, names: Iterable[str]) -> dict[str, ObservedSet | None]:
    """The named sets that have changed since the driver last returned them; None for a set that does not exist."""
    return {name: observed for one in names for name, observed in driver.observe_changed(one).items()}
