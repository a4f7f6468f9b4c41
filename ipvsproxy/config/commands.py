"""Describes the commands as data. Makes the text of ``--help`` and the completion scripts for shells."""

import argparse
import importlib
import math
import textwrap
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import NamedTuple

from ipvsproxy.config import catalogue
from ipvsproxy.config.option import Kind, Likeness, Option


class Command(NamedTuple):
    """A command that accepts the flags of ``run``.

    ``subject`` names the single argument that the command takes, and is empty for a command without an argument. If the given
    flags name neither a proxy mode nor a configuration file, the flag ``implied`` is put before the given flags.
    """

    name: str
    summary: str
    help: str
    subject: str = ""
    implied: str = "--proxy-mode=ipvs"


_WIDTH = 110
_INDENT = 8
_COMMON = """

Give the flags and the file of ipvsproxy run; none are needed where ipvsproxy runs: the command uses those of the
running process. Without a file, --proxy-mode=ipvs is implied. The command changes nothing.
"""


def _option_lines(option: Option) -> Iterator[str]:
    dashes = "-" if option.flag == "v" else "--"
    value = "" if option.kind is Kind.BOOLEAN else f" {option.shown}"
    star = " *" if option.overrides_file and option not in catalogue.OF_COMMANDS else ""
    field = f"  [{option.field}]" if option.field else ""
    yield f"  {dashes}{option.flag}{value}{star}{field}"
    text = " ".join(filter(None, (option.help, _facts(option))))
    indent = " " * _INDENT
    yield textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _facts(option: Option) -> str:
    """The default and the bounds of an option, in parentheses."""
    facts = [f"default {option.default}"] if option.default and option.default != "false" else []
    if option.file_default is not None:
        facts.append(f"in a file {option.file_default}")
    has_bounds = math.isfinite(option.maximum) or option.minimum != 0
    if option.allowed and has_bounds and not option.choices and option.status is not Likeness.WITHOUT_EFFECT:
        facts.append(option.allowed)
    return f"({'; '.join(facts)})" if facts else ""


def _command(
    name: str,
    summary: str,
    text: str,
    *examples: str,
    subject: str = "",
    usage: str = "",
    flags: str = _COMMON,
    implied: str = "--proxy-mode=ipvs",
) -> Command:
    """A command with its help text.

    ``usage`` is the part of the help text's first line that lists the command's own flags. ``flags`` says which flags of ``run``
    the command uses; ``examples`` are example arguments.
    """
    own = [option for option in catalogue.OF_COMMANDS if option.command and option.is_of(name)]
    options = [*own, *(catalogue.BY_KEY[key] for key in (("dry-run", "output") if name == "cleanup" else ("output",)))]
    described = "".join(f"\n{line}" for option in options for line in _option_lines(option))
    words = f"{name} <{subject}>" if subject else name
    shown = "".join(f"  ipvsproxy {name} {example}\n" for example in examples)
    head = f"ipvsproxy {words} {usage}[--output=text|json] [flags]"
    return Command(name, summary, f"{head}\n\n{text}{described}{flags}\nExamples:\n{shown}", subject, implied)


_RUN = Command("run", "", "", implied="")
_PLAN = _command(
    "plan",
    "show the operations of run on this node, in their order",
    """\
Shows the operations that run would apply now, in their order, each with its Service.

Exit status: 0 plan shown, 2 state unknown.
""",
    "--config=/var/lib/kube-proxy/config.conf --hostname-override=node-1",
    "--manifests=manifests/demo --hostname-override=demo-node",
)
_VERIFY = _command(
    "verify",
    "compare the kernel with the desired state",
    """\
Shows each difference in one line: Service, object, desired state, observed state. Only differences that last for
a moment count. Draining real servers and virtual servers of other programs are no differences.

Exit status: 0 equal, 1 different, 2 state unknown.
""",
    "--config=/var/lib/kube-proxy/config.conf --hostname-override=node-1",
    "--kubeconfig=admin.conf --cluster-cidr=10.244.0.0/16 --output=json",
)
_EXPLAIN = _command(
    "explain",
    "show how this node serves a Service, a pod or an address, and why",
    """\
Shows for a Service (namespace/name, or a name in all namespaces) or an address (10.96.0.1:443, [fd00::1]:443, or
without a port): its virtual servers, which endpoints are used or not and why, what is masqueraded by which rule,
and the observed state. For a pod (its name or address): which Services it serves, and why not.

Exit status: 0 explained, 1 unknown Service, pod or address, 2 state unknown.
""",
    "demo/web",
    "10.96.0.80:80 --output=json",
    "web-7d4b9 --kubeconfig=admin.conf",
    subject="[namespace/]name | address[:port]",
)
_LIST = _command(
    "list",
    "print the IPVS table as ipvsadm -Ln does, with the names of Services and pods",
    """\
Prints what ipvsadm -Ln prints, in the same columns. Beside each virtual server stands its Service port, beside
each real server its pod and node, and behind them what is wrong. Without the API server, names are missing.

Exit status: 0 printed with names, 2 names or table could not be read.
""",
    "--kubeconfig=admin.conf",
    "--manifests=manifests/demo --output=json",
)
_TOP = _command(
    "top",
    "show a running ipvsproxy live in the terminal",
    """\
Shows whether everything is in force on this node, and its Services by rate. Keys sort, filter, and open a
Service; h shows all keys, q quits. The screen needs a terminal, and the extra ipvsproxy[top]; --once and
--output=json need neither. No privilege is needed.

Exit status: 0 shown, 2 no ipvsproxy answers.
""",
    "--sort=bytes --filter=demo/",
    "--once",
    "--server=http://127.0.0.1:10249 --output=json",
    flags="""

Of the flags and the file of ipvsproxy run, only --metrics-bind-address matters: the command asks that server.
""",
)
_FLEET = _command(
    "fleet",
    "show which nodes differ, by the health of the ipvsproxy of each node",
    """\
Asks the ipvsproxy of every node through the API server, and shows nodes that do not answer, are not in force,
late or drifting, or have another version or configuration than most nodes. Needs a kubeconfig (--kubeconfig, else
$KUBECONFIG, else ~/.kube/config) or the service account of a pod, with the right to get pods/proxy in one
namespace, and to list pods there unless --pods names them.

Exit status: 0 all well, 1 some nodes differ, 2 the nodes could not be asked.
""",
    "--kubeconfig=admin.conf",
    "--selector=k8s-app=kube-proxy --output=json",
    flags="""

Of the flags and the file of ipvsproxy run, --kubeconfig, --master and the port of --healthz-bind-address matter.
""",
)
_DOCTOR = _command(
    "doctor",
    "check whether this node has what ipvsproxy needs, and name remedies",
    """\
Checks privileges, kernel, modules, schedulers, set types, sysctls, iptables, other proxies and load balancers,
ports, timeouts and the API server. Each line is fail, warn, note or ok, with a remedy where there is one.

Exit status: 0 no check has failed, 1 a check has failed, 2 wrong flags.
""",
    "--config=/var/lib/kube-proxy/config.conf --hostname-override=node-1",
    "--kubeconfig=admin.conf --output=json",
)

_CLEANUP = _command(
    "cleanup",
    "remove everything that ipvsproxy or kube-proxy has left in the kernel",
    """\
Removes everything of ipvsproxy, or of a kube-proxy in IPVS or iptables mode, from this network namespace: virtual
servers, iptables rules of both variants, ipsets, the nftables table inet ipvsproxy, local routes, kube-ipvs0.
Objects of other programs stay. No API server is needed. Refused while ipvsproxy runs here, as is a dry run.
With --only=own, only second scopes go (virtual servers by mark, sets and chains KUBE-IPVSPROXY-*), the nftables
table, the copy of a set, and local routes, whose addresses in use are added to kube-ipvs0 before.

Exit status: 0 clean (or a dry run), 1 something is left, 2 wrong flags.
""",
    "--dry-run",
    "--ipvs-exclude-cidrs=192.0.2.0/24",
    "--only=own",
    usage="[--only=own] [--dry-run] ",
    flags="""

Of the flags of ipvsproxy run, --config, --ipvs-exclude-cidrs (virtual servers that stay) and
--ipvs-route-protocol (of the local routes to remove) matter.
""",
    implied="--cleanup",
)

COMMANDS: Mapping[str, Command] = {
    command.name: command for command in (_RUN, _PLAN, _VERIFY, _EXPLAIN, _LIST, _TOP, _FLEET, _DOCTOR, _CLEANUP)
}
"""All commands except ``completion``; the key is the name of the command."""

_HEAD = """\
ipvsproxy [run] [flags]

The node daemon that does the whole job of kube-proxy --proxy-mode=ipvs: it watches Services and
EndpointSlices and keeps this node's IPVS, ipsets, addresses and iptables rules in step with them.

Every kube-proxy flag is accepted, with the same meaning and syntax. Durations are written 30s, 1m30s, 1h.
With --config most flags are ignored, as in kube-proxy. Flags marked with * are not: they override the fields
of the file. They are kube-proxy's own exceptions, and all flags that only ipvsproxy has.
The equivalent field of the file stands in [brackets].

Other commands, each with its own --help:
{commands}
  completion bash|zsh|fish
            print the script for shell completion
With --dry-run, run changes nothing: it runs beside a kube-proxy and reports differences by log and metrics,
on ports 10356 and 10349 instead of 10256 and 10249.

Examples:
  ipvsproxy --config=/var/lib/kube-proxy/config.conf --hostname-override=node-1
  ipvsproxy --proxy-mode=ipvs --kubeconfig=proxy.conf --cluster-cidr=10.244.0.0/16 --dry-run
  ipvsproxy --proxy-mode=ipvs --manifests=manifests/demo --hostname-override=demo-node
"""


def render_help() -> str:
    """The whole help text, in lines of at most 110 columns."""
    others = "\n".join(f"  {command.name:<9} {command.summary}" for command in COMMANDS.values() if command.summary)
    sections = [_HEAD.format(commands=others)]
    for group, options in catalogue.OPTIONS.items():
        lines = [f"{group}:", *(line for option in options for line in _option_lines(option) if option.flag)]
        if fields := ", ".join(option.field for option in options if not option.flag):
            lines.append(
                textwrap.fill(f"Fields of the file only: {fields}.", _WIDTH, initial_indent="  ", subsequent_indent="  ")
            )
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


SHELLS = ("bash", "zsh", "fish")
COMPLETION_HELP = """\
ipvsproxy completion bash|zsh|fish

Prints the script with which a shell completes commands, flags and their values:

  bash    source <(ipvsproxy completion bash)
  zsh     source <(ipvsproxy completion zsh)
  fish    ipvsproxy completion fish | source
"""
_PATHS: Mapping[str, str] = {"FILE": "FILE", "DIR": "DIRECTORY"}
"""The kind of path that shtab completes for each placeholder."""
_SHORT: Mapping[str, tuple[str, ...]] = {"v": ("-v",), "output": ("-o", "--output"), "namespace": ("-n", "--namespace")}
_BASH_EQUALS = """
_ipvsproxy() {
    local typed=("${COMP_WORDS[@]:0:COMP_CWORD+1}") word
    COMP_WORDS=()
    for word in "${typed[@]}"; do
        [[ $word == = ]] || COMP_WORDS+=("$word")
    done
    [[ $word == = ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _shtab_ipvsproxy
}
complete -o filenames -F _ipvsproxy ipvsproxy
"""
"""Bash splits ``--flag=value`` into three words. This bash function removes the word ``=``, so that the value is completed as in
``--flag value``."""


def render_completion(shell: str) -> str:
    """The completion script for one of ``SHELLS``.

    The library shtab generates the script from a parser that has all commands, flags and values of the catalogue. Only shtab uses
    the parser that this function builds. Command lines are parsed by ``config/load.py`` instead, because argparse's rules differ
    from kube-proxy's.
    """
    shtab = importlib.import_module("shtab")  # only the command ``completion`` needs shtab
    parser = argparse.ArgumentParser("ipvsproxy", add_help=False)
    _add_flags(parser, "run", shtab)
    subparsers = parser.add_subparsers()
    for command in COMMANDS:
        _add_flags(subparsers.add_parser(command, add_help=False, help=command), command, shtab)
    subparsers.add_parser("completion", add_help=False, help="completion").add_argument("shell", choices=SHELLS)
    script: str = shtab.complete(parser, shell)
    return script + (_BASH_EQUALS if shell == "bash" else "")


def _add_flags(parser: argparse.ArgumentParser, command: str, shtab: ModuleType) -> None:
    for option in catalogue.BY_FLAG.values():
        if not option.is_of(command) or (option.flag == "dry-run" and command not in ("run", "cleanup")):
            continue
        action = parser.add_argument(
            *_SHORT.get(option.flag, (f"--{option.flag}",)),
            nargs="?" if option.implied_value else None,
            choices=("true", "false") if option.kind is Kind.BOOLEAN else option.choices or None,
            help=option.help.replace("%", "%%"),
        )
        if option.placeholder in _PATHS:
            action.complete = getattr(shtab, _PATHS[option.placeholder])  # type: ignore[attr-defined] # shtab reads this attribute
