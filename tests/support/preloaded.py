"""Imports the program's modules as the program's command line does.

The process that imports this module then forks the programs under test.
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
