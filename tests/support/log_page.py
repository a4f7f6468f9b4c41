"""The events and keys of the log that docs/log.md documents."""

import pathlib
import re

PAGE = (pathlib.Path(__file__).parents[2] / "docs/log.md").read_text()
_EVENTS, _, _KEYS = PAGE.partition("\n## Keys\n")
EVENTS = frozenset(re.findall(r"^\| `(\w+)` \| \S", _EVENTS, re.MULTILINE))
KEYS = frozenset(re.findall(r"^\| `(\w+)` \| [^|]+ \| \S", _KEYS, re.MULTILINE))
COUNTING = frozenset(re.findall(r"`(\w+)`", _KEYS.partition(" have a key for each kind of kernel object")[0]))
"""The names of the events that have a key for each kind of kernel object. The value of such a key is a number of objects."""
