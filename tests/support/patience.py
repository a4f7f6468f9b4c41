"""How long tests wait on a slow kernel, and which tests are skipped by default.

Debian's kernel in QEMU takes 10 to 25 times as long as other kernels, so scripts/test --kernel=debian sets the variable
``IPVSPROXY_TEST_PATIENCE``. The variable multiplies the time that a test waits for an expected event. The variable also
multiplies pauses and other periods in which the kernel must have time for other work.
"""

import os

import pytest

FACTOR = float(os.environ.get("IPVSPROXY_TEST_PATIENCE") or 1)
"""Tests multiply their waiting times by this factor, which is 1 on user-mode Linux and on the host."""
IS_THOROUGH = bool(os.environ.get("IPVSPROXY_TEST_THOROUGH"))
"""If true, tests that take long also run, and property tests choose new examples in each run."""
THOROUGH = pytest.mark.skipif(not IS_THOROUGH, reason="takes long; .ci/full runs it")
"""Marks tests that would make the usual run too long."""


def seconds(usual: float) -> float:
    """The time in seconds that a test waits on this kernel; ``usual`` is the time in seconds on a fast kernel."""
    return usual * FACTOR
