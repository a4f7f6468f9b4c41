"""The commands that only inspect, as data: the text of ``--help`` and the argument of each."""

from collections.abc import Mapping
from typing import NamedTuple

from ipvsproxy.config import top_options


class Command(NamedTuple):
    """A command. ``subject`` names the one word that it takes among its flags, empty if it takes none.

    ``options`` are those of this command alone, by name.
    """

    name: str
    summary: str
    text: str
    subject: str = ""
    options: Mapping[str, top_options.Help] = {}

    @property
    def help(self) -> str:
        """The whole text of ``--help``."""
        subject = f" <{self.subject}>" if self.subject else ""
        options = "".join(
            f"\n  --{f'{name} {one.placeholder}'.strip()}\n        {one.text}" for name, one in self.options.items()
        )
        return f"ipvsproxy {self.name}{subject} [--output=text|json] [flags]\n\n{self.text}{options}{_COMMON}"


_COMMON = """
  --output text|json
        Text for people, or one JSON document with a field version (default text). Also -o.

Use the flags and the file of ipvsproxy run. Without a file, --proxy-mode=ipvs is implied.
The command changes nothing. Some queries make the kernel load a module, which cannot be avoided.
"""

_PLAN = Command(
    "plan",
    "show the operations of run on this node, in their order",
    """\
Gets the complete lists from the API server or --manifests, reads the kernel, and shows the operations that run
would apply now, in their order, each with its Service.

Exit status: 0 plan shown, 2 state unknown.
""",
)
_VERIFY = Command(
    "verify",
    "compare the kernel with the desired state",
    """\
Compares the kernel with the desired state. One line shows each difference: Service, object, desired state,
observed state. Differing objects are read again after a moment; only lasting differences count.
Draining real servers are no difference. Virtual servers of others are listed, and are no difference either.

Exit status: 0 equal, 1 different, 2 state unknown.
""",
)
_EXPLAIN = Command(
    "explain",
    "show how this node serves a Service or an address, and why",
    """\
Shows for a Service (namespace/name) or an address (10.96.0.1:443, [fd00::1]:443, or without a port): its virtual
servers and their owners, which endpoints are used or not and why, which traffic is masqueraded and by which rule,
and the observed state with its connections. The Service or address may stand anywhere among the flags.

Exit status: 0 explained, 1 unknown Service or address, 2 state unknown.
""",
    "namespace/name | address:port",
)
_LIST = Command(
    "list",
    "print the IPVS table as ipvsadm -Ln does, with the names of Services and pods",
    """\
Prints what ipvsadm -Ln prints, in the same layout. Beside each virtual server stands its Service port
(namespace/name:port), beside each real server its pod and node. A virtual server of another program is (not ours).
Without the API server the table is printed without names.

Exit status: 0 printed with names, 2 names or table could not be read.
""",
)
_TOP = Command(
    "top",
    "show a running ipvsproxy live in the terminal",
    """\
Shows what the ipvsproxy of this node does: whether everything is in force, and its Services by rate. Keys sort,
filter, and open a Service with its endpoints; h shows all keys, q quits. Asks only the daemon's metrics server
(--metrics-bind-address), so no privilege is needed.

Exit status: 0 shown, 2 no ipvsproxy answers.
""",
    options=top_options.HELP,
)
_DOCTOR = Command(
    "doctor",
    "check what ipvsproxy needs of this node, and name remedies",
    """\
Checks privileges, kernel, modules, schedulers, set types, sysctls, iptables, other proxies and load balancers,
ports, timeouts and the API server. Each line is ok, warn or fail, with a remedy where there is one.

Exit status: 0 no line is fail, 1 some line is fail, 2 wrong flags.
""",
)

COMMANDS: Mapping[str, Command] = {command.name: command for command in (_PLAN, _VERIFY, _EXPLAIN, _LIST, _TOP, _DOCTOR)}
"""The commands by name."""
