"""Who looks at the page: a bounded number of viewers, so that its cost is bounded."""

import re

MOST_VIEWERS = 16
VIEWER_S = 4.0
"""How long a viewer counts as one after its last request."""
IDLE_S = 60.0
"""How long after the last request of all viewers the page's figures are kept up to date."""
NAME = re.compile(r"[0-9A-Za-z-]{0,32}")
"""What a viewer may call itself. All that have no name are one viewer."""


class Viewers:
    """The viewers of the last seconds. Times are those of a monotonic clock."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._last_s: float | None = None

    def admit(self, name: str, now: float) -> bool:
        """Count a request of a viewer; False if there are too many others."""
        self._seen_s = {viewer: seen_s for viewer, seen_s in self._seen_s.items() if now - seen_s < VIEWER_S}
        if name not in self._seen_s and len(self._seen_s) >= MOST_VIEWERS:
            return False
        self._seen_s[name] = self._last_s = now
        return True

    def idle_at_s(self) -> float | None:
        """When nobody has looked for ``IDLE_S``; None before the first request."""
        return None if self._last_s is None else self._last_s + IDLE_S
