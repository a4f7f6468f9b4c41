"""Shell completion: shtab generates the scripts from a parser of all commands, flags and values of the catalogue.

Only shtab uses this parser. ``config/load.py`` parses command lines, because argparse's rules differ from kube-proxy's.
"""

import argparse
from collections.abc import Mapping

import shtab

from ipvsproxy.config import catalogue
from ipvsproxy.config.commands import COMMANDS
from ipvsproxy.config.option import Kind

SHELLS = ("bash", "zsh", "fish")
HELP = """\
ipvsproxy completion bash|zsh|fish

Prints the script with which a shell completes commands, flags and their values:

  bash    source <(ipvsproxy completion bash)
  zsh     source <(ipvsproxy completion zsh)
  fish    ipvsproxy completion fish | source
"""
_PATHS: Mapping[str, Mapping[str, object]] = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
_SHORT: Mapping[str, tuple[str, ...]] = {"v": ("-v",), "output": ("-o", "--output")}
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
"""Bash splits ``--flag=value`` into three words. Without the equals sign they are completed as ``--flag value``."""


def render(shell: str) -> str:
    """The script for one of ``SHELLS``."""
    parser = argparse.ArgumentParser("ipvsproxy", add_help=False)
    _add_flags(parser, "run")
    subparsers = parser.add_subparsers()
    for command in COMMANDS:
        _add_flags(subparsers.add_parser(command, add_help=False, help=command), command)
    subparsers.add_parser("completion", add_help=False, help="completion").add_argument("shell", choices=SHELLS)
    script: str = shtab.complete(parser, shell)
    return script + (_BASH_EQUALS if shell == "bash" else "")


def _add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    for option in catalogue.BY_FLAG.values():
        if option.command not in ("", command) or (option.flag == "dry-run" and command not in ("run", "cleanup")):
            continue
        action = parser.add_argument(
            *_SHORT.get(option.flag, (f"--{option.flag}",)),
            nargs="?" if option.implied_value else None,
            choices=("true", "false") if option.kind is Kind.BOOLEAN else option.choices or None,
            help=option.help.replace("%", "%%"),
        )
        if option.placeholder in _PATHS:
            action.complete = _PATHS[option.placeholder]  # type: ignore[attr-defined] # shtab reads this attribute
