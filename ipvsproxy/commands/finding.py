"""The findings of ``ipvsproxy doctor``."""

import enum
import functools
from typing import NamedTuple


class Level(enum.StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """The answer to one question. ``remedy`` is empty if there is nothing to do."""

    level: Level
    topic: str
    text: str
    remedy: str = ""


ok = functools.partial(Finding, Level.OK)
"""All is well."""
warn = functools.partial(Finding, Level.WARN)
"""``run`` corrects it, or the operator should know it."""
fail = functools.partial(Finding, Level.FAIL)
"""Traffic cannot flow."""
