"""Imports the program's modules in the way in which its command line does. This process then forks programs under test."""

import gc

from ipvsproxy import cli

for _name in (
    *(f"ipvsproxy.commands.{one}" for one in ("plan", "verify", "explain")),
    "ipvsproxy.daemon.app",
    "ipvsproxy.daemon.sources.directory",
):
    cli.load_module(_name)

# The garbage collector of a fork touches memory pages, and each touched page is copied, which costs a tenth of a millisecond on
# user-mode Linux.
gc.collect()
gc.freeze()
