"""A feature of the kernel that ipvsproxy uses, and a kernel that people run."""

import enum
from typing import NamedTuple

Version = tuple[int, ...]
"""A version of Linux: (4, 18), or (2, 6, 39)."""

OLDEST: Version = (4, 18)
"""The oldest kernel for which features were looked up: that of RHEL 8."""


class Without(enum.StrEnum):
    """What a kernel that lacks a feature means."""

    FALL_BACK = "fall-back"
    REFUSED = "refused"


class Feature(NamedTuple):
    """One feature of the kernel.

    ``parts`` are its names in the kernel: attributes, socket options, settings, files, modules, or options of the kernel's
    configuration. ``since`` is the first version with it. ``source`` is the file of the kernel's source that has it, and the
    commit that brought it; ``is_dated`` is whether the version was looked up in the kernel's history or manuals. Otherwise it is
    the one that is commonly documented, and only the presence of the feature in the source of Linux 5.10, 6.1 and 6.12 was
    looked up.

    ``asked`` is how and when this kernel is asked for it, and ``sentence`` what happens on a kernel without it: another way to
    the same (FALL_BACK), or which part is refused, and with which words.
    """

    name: str
    words: str
    parts: tuple[str, ...]
    use: str
    since: Version
    source: str
    asked: str
    without: Without
    sentence: str
    is_dated: bool = True

    @property
    def is_young(self) -> bool:
        """Whether a kernel of those that people run may be older than the feature."""
        return self.since > OLDEST


class Row(NamedTuple):
    """A kernel that people run: its version before all that its distributions have added, and their names."""

    version: Version
    distributions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{dotted(self.version)} ({', '.join(self.distributions)})"


def dotted(version: Version) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))
