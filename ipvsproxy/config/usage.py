"""The text of ``--help``, generated from the catalogue."""

import textwrap
from collections.abc import Iterator

from ipvsproxy.config import catalogue, commands
from ipvsproxy.config.option import Group, Kind, Option, Status

_WIDTH = 110
_INDENT = 8

_HEAD = """\
ipvsproxy [run] [flags]

The node daemon that does the whole job of kube-proxy --proxy-mode=ipvs: it watches Services and
EndpointSlices and keeps this node's IPVS, ipsets, addresses and iptables rules in step with them.

Every kube-proxy flag is accepted, with the same meaning and syntax. Durations are written 30s, 1m30s, 1h.
With --config most flags are ignored, as in kube-proxy; flags marked with * still count.
The equivalent field of the file stands in [brackets].

Other commands, each with its own --help:
{commands}
  cleanup   remove everything that ipvsproxy or kube-proxy has left in the kernel
  completion bash|zsh|fish
            print the script for shell completion
With --dry-run, run changes nothing: it runs beside a kube-proxy and reports differences by log and metrics,
on ports 10356 and 10349 instead of 10256 and 10249.
"""


def render() -> str:
    """The whole text, in lines of at most 110 columns."""
    others = "\n".join(f"  {command.name:<9} {command.summary}" for command in commands.COMMANDS.values())
    sections = [_HEAD.format(commands=others)]
    for group, options in catalogue.OPTIONS.items():
        lines = [f"{group}:", *(line for option in options for line in _option_lines(option) if option.flag)]
        if group is Group.WITHOUT_EFFECT:
            fields = ", ".join(option.field for option in options if not option.flag)
            lines.append(
                textwrap.fill(f"Fields of the file only: {fields}.", _WIDTH, initial_indent="  ", subsequent_indent="  ")
            )
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _option_lines(option: Option) -> Iterator[str]:
    dashes = "-" if option.flag == "v" else "--"
    value = "" if option.kind is Kind.BOOLEAN else f" {option.placeholder or option.kind.value}"
    star = " *" if option.overrides_file else ""
    field = f"  [{option.field}]" if option.field else ""
    yield f"  {dashes}{option.flag}{value}{star}{field}"
    text = " ".join(filter(None, (option.help, _facts(option))))
    indent = " " * _INDENT
    yield textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


def _facts(option: Option) -> str:
    """Default and bounds, in parentheses."""
    facts = [f"default {option.default}"] if option.default and option.default != "false" else []
    if option.file_default is not None:
        facts.append(f"in a file {option.file_default}")
    if option.allowed and option.status is not Status.WITHOUT_EFFECT and (option.maximum or option.minimum != 0):
        facts.append(option.allowed)
    return f"({'; '.join(facts)})" if facts else ""
