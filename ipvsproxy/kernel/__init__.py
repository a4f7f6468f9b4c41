"""Drivers of kernel objects.

They use message classes of pyroute2. Its top package is not executed: it would import all of itself, which takes 8 MB.
"""

from ipvsproxy.kernel.base import packages

packages.defer("pyroute2", "config", "netns")
