"""Imports the program, as its command line does; for a process that forks programs under test."""

from ipvsproxy import cli

for _name in (
    *(f"ipvsproxy.commands.{one}" for one in ("plan", "verify", "explain")),
    "ipvsproxy.daemon.app",
    "ipvsproxy.daemon.sources.directory",
):
    cli.load_module(_name)
