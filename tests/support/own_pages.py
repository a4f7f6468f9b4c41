"""Requests pages from the default ports of the program under test, which runs on this host."""

import urllib.error
import urllib.request

from tests.support import patience

ANSWERED_WITHIN_S = patience.seconds(60.0)


def health_status(page: str = "healthz") -> int:
    """The status of an answer of the health server; 0 means that there was no answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:10256/{page}", timeout=ANSWERED_WITHIN_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def metrics() -> dict[str, float]:
    """The present values of all series, by name and labels."""
    with urllib.request.urlopen("http://127.0.0.1:10249/metrics", timeout=ANSWERED_WITHIN_S) as answer:
        lines = answer.read().decode().splitlines()
    series = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in series}
