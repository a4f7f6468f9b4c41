"""One answer of ``ipvsproxy doctor``."""

import dataclasses
import enum


class Level(enum.StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one question. ``remedy`` is empty if there is nothing to do."""

    level: Level
    topic: str
    text: str
    remedy: str = ""


def ok(topic: str, text: str) -> Finding:
    """All is well."""
    return Finding(level=Level.OK, topic=topic, text=text)


def warn(topic: str, text: str, remedy: str) -> Finding:
    """``run`` corrects it, or the operator should know it."""
    return Finding(level=Level.WARN, topic=topic, text=text, remedy=remedy)


def fail(topic: str, text: str, remedy: str) -> Finding:
    """Traffic cannot flow."""
    return Finding(level=Level.FAIL, topic=topic, text=text, remedy=remedy)
