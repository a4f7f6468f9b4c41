"""The commands that only look, as data: what ``--help`` says of each, and what it needs."""

from collections.abc import Mapping
from typing import NamedTuple


class Command(NamedTuple):
    """A command. ``subject`` names the one word that it needs among its flags, empty where it takes none."""

    name: str
    summary: str
    text: str
    subject: str = ""

    @property
    def help(self) -> str:
        """Its whole ``--help``."""
        subject = f" <{self.subject}>" if self.subject else ""
        return f"ipvsproxy {self.name}{subject} [--output=text|json] [flags]\n\n{self.text}{_COMMON}"


_COMMON = """
  --output text|json
        As lines for people, or as one JSON document with a field version (default text). Also -o.

Flags and file are those of ipvsproxy run, and should be the same as there; without a file, --proxy-mode=ipvs goes
without saying.
Nothing is changed. That a question makes the kernel load a module for itself cannot be avoided.
"""

_PLAN = Command(
    "plan",
    "tell what run would do to this node, in its order",
    """\
Gets the complete lists from the API server or --manifests, reads the kernel, and tells what run would do now, in
the order in which it would do it, with the Service that each operation is for.

Exit status: 0 told, 2 could not find out.
""",
)
_VERIFY = Command(
    "verify",
    "tell whether the kernel holds what it should",
    """\
Compares the kernel with what the API asks for, and says of each difference in one line: the Service, what it is,
what is wanted, what was found. What differs is looked at again after a moment; only what lasts counts.
Real servers that are draining are no difference. Virtual servers of others are listed, and are no difference.

Exit status: 0 equal, 1 different, 2 could not find out.
""",
)
_EXPLAIN = Command(
    "explain",
    "tell why a Service or an address is served as it is",
    """\
Tells for a Service (namespace/name) or an address (10.96.0.1:443, [fd00::1]:443, or without a port) which virtual
servers there are and who owns them, which endpoints are in or out and why, who is masqueraded and by which rule,
and what the kernel holds now, with its connections. The Service or address may stand anywhere among the flags.

Exit status: 0 told, 1 nobody knows that Service or address, 2 could not find out.
""",
    "namespace/name | address:port",
)
_DOCTOR = Command(
    "doctor",
    "check what this node needs, and say what to do",
    """\
Checks privileges, kernel, modules, schedulers, set types, sysctls, iptables, other proxies and load balancers,
ports, timeouts and the API server. Each line is ok, warn or fail, with what to do about it.

Exit status: 0 no line says fail, 1 one does, 2 wrong flags.
""",
)

COMMANDS: Mapping[str, Command] = {command.name: command for command in (_PLAN, _VERIFY, _EXPLAIN, _DOCTOR)}
"""All of them, by name."""
