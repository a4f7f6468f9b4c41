"""Drivers of kernel objects.

The drivers use message classes of pyroute2. The top package of pyroute2 is not executed, because it would import all of its
modules, which takes 8 MB.
"""

from ipvsproxy.kernel.base import packages

packages.defer("pyroute2", "config", "netns")
