"""Drivers for kernel objects.

The drivers use message classes of pyroute2. The top package of pyroute2 is not executed, because the top package imports all
modules of pyroute2, which take 8 MB of memory.
"""

from ipvsproxy.kernel.base import packages

packages.defer("pyroute2", "config", "netns")
