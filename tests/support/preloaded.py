"""Imports the program's modules with the same function as the program's command line.

This process then forks programs under test.
"""

import gc

from ipvsproxy import cli

for _name in (
    *(f"ipvsproxy.commands.{one}" for one in ("plan", "verify", "explain")),
    "ipvsproxy.daemon.app",
    "ipvsproxy.daemon.sources.directory",
):
    cli.load_module(_name)

# If the garbage collector of a forked process touches a memory page, the kernel copies the page. On user-mode Linux, each copy
# takes a tenth of a millisecond.
gc.collect()
gc.freeze()
