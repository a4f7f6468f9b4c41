"""Drivers of the kernel. Of pyroute2, message classes are used; executed, its top package imports all that it can do: 8 MB."""

from ipvsproxy.kernel import packages

packages.defer("pyroute2", "config", "netns")
