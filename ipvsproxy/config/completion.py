"""Shell completion: shtab generates the scripts from a parser of all commands, flags and values of the catalogue.

Only shtab uses this parser. ``config/flags.py`` parses command lines, because argparse's rules differ from kube-proxy's.
"""

import argparse
from collections.abc import Mapping, Sequence

import shtab

from ipvsproxy.config import catalogue
from ipvsproxy.config.commands import FORMATS, HELP_OF_TOP, Sort
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


def render(shell: str, commands: Sequence[str]) -> str:
    """The script for one of ``SHELLS``."""
    parser = argparse.ArgumentParser("ipvsproxy", add_help=False)
    _add_flags(parser)
    _add_dry_run(parser)
    subparsers = parser.add_subparsers()
    for command in commands:
        words = subparsers.add_parser(command, add_help=False, help=command)
        if command == "completion":
            words.add_argument("shell", choices=SHELLS)
            continue
        _add_flags(words)
        if command in ("run", "cleanup"):
            _add_dry_run(words)
        if command != "run":
            words.add_argument("-o", "--output", choices=FORMATS, help="Text for people, or JSON.")
        if command == "top":
            _add_options_of_top(words)
    script: str = shtab.complete(parser, shell)
    return script + (_BASH_EQUALS if shell == "bash" else "")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    for option in catalogue.BY_FLAG.values():
        action = parser.add_argument(
            "-v" if option.flag == "v" else f"--{option.flag}",
            nargs="?" if option.implied_value else None,
            choices=("true", "false") if option.kind is Kind.BOOLEAN else option.choices or None,
            help=option.help.replace("%", "%%"),
        )
        if option.placeholder in _PATHS:
            action.complete = _PATHS[option.placeholder]  # type: ignore[attr-defined] # shtab reads this attribute


def _add_options_of_top(parser: argparse.ArgumentParser) -> None:
    for name, (_, text) in HELP_OF_TOP.items():
        if name == "once":
            parser.add_argument("--once", action="store_true", help=text)
        else:
            parser.add_argument(f"--{name}", choices=tuple(Sort) if name == "sort" else None, help=text)


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="Only report what would be done.")
