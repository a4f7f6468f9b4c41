"""Completion for shells, made from the catalogue: commands, flags, and the values that a flag can have."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ipvsproxy.config import catalogue, output
from ipvsproxy.config.option import Kind, Option

SHELLS = ("bash", "zsh", "fish")
HELP = """\
ipvsproxy completion bash|zsh|fish

Prints what makes a shell complete commands, flags and their values:

  bash    source <(ipvsproxy completion bash)
  zsh     source <(ipvsproxy completion zsh)
  fish    ipvsproxy completion fish | source
"""
_DRY_RUN = "Only tell what would be done; of run and cleanup."
_OUTPUT = "As lines for people or as JSON; of the commands that tell something."
_PATHS: Mapping[str, str] = {"FILE": "file", "DIR": "directory"}


def render(shell: str, commands: Sequence[str]) -> str:
    """The script for one of ``SHELLS``."""
    write: Mapping[str, Callable[[Sequence[str]], Iterable[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return "\n".join(write[shell](commands)) + "\n"


def _flag(option: Option) -> str:
    return "-v" if option.flag == "v" else f"--{option.flag}"


def _values(option: Option) -> tuple[str, ...]:
    if option.kind is Kind.BOOLEAN:
        return ("true", "false")
    return option.choices


def _bash(commands: Sequence[str]) -> Iterable[str]:
    options = catalogue.BY_FLAG.values()
    yield "_ipvsproxy() {"
    yield "    local word=${COMP_WORDS[COMP_CWORD]} flag=${COMP_WORDS[COMP_CWORD-1]}"
    # Bash splits words at "=": --flag=value are three of them.
    yield "    [[ $word == '=' ]] && word="
    yield "    [[ $flag == '=' ]] && flag=${COMP_WORDS[COMP_CWORD-2]}"
    yield "    case $flag in"
    yield f'        --output|-o) mapfile -t COMPREPLY < <(compgen -W "{" ".join(output.FORMATS)}" -- "$word"); return ;;'
    for option in options:
        source = f'-W "{" ".join(option.choices)}"' if option.choices else ""
        if option.placeholder in _PATHS:
            source = f"-A {_PATHS[option.placeholder]}"
        if source:
            yield f'        {_flag(option)}) mapfile -t COMPREPLY < <(compgen {source} -- "$word"); return ;;'
    yield "    esac"
    words = " ".join(map(_flag, options))
    yield f'    local words="{words}" command=run'
    yield f'    ((COMP_CWORD == 1)) && words+=" {" ".join(commands)}"'
    yield "    ((COMP_CWORD > 1)) && [[ ${COMP_WORDS[1]} != -* ]] && command=${COMP_WORDS[1]}"
    yield "    case $command in"
    yield f'        completion) words="{" ".join(SHELLS)}" ;;'
    yield '        run) words+=" --dry-run" ;;'
    yield '        cleanup) words+=" --dry-run --output" ;;'
    yield '        *) words+=" --output" ;;'
    yield "    esac"
    yield '    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")'
    yield "}"
    yield "complete -o default -F _ipvsproxy ipvsproxy"


def _zsh(commands: Sequence[str]) -> Iterable[str]:
    yield "#compdef ipvsproxy"
    yield "_ipvsproxy() {"
    yield "    _arguments \\"
    for option in catalogue.BY_FLAG.values():
        value = ":value:"
        if option.placeholder in _PATHS:
            value = ":path:_files" + (" -/" if option.placeholder == "DIR" else "")
        elif _values(option):
            value = f":value:({' '.join(_values(option))})"
        # A value is never asked for where the flag may stand alone.
        joined = "=-" if option.alone else "="
        yield f"        '{_flag(option)}{joined}[{_quote(option.help)}]{value}' \\"
    yield f"        '--dry-run[{_DRY_RUN}]' \\"
    yield f"        '(-o --output)'{{-o,--output=}}'[{_OUTPUT}]:form:({' '.join(output.FORMATS)})' \\"
    yield f"        '1:command:({' '.join(commands)})' \\"
    yield f"        '2:shell:{{[[ $words[2] == completion ]] && compadd {' '.join(SHELLS)}}}'"
    yield "}"
    yield "compdef _ipvsproxy ipvsproxy"


def _fish(commands: Sequence[str]) -> Iterable[str]:
    yield f"complete -c ipvsproxy -f -n __fish_is_first_arg -a '{' '.join(commands)}'"
    yield f"complete -c ipvsproxy -f -n '__fish_seen_subcommand_from completion' -a '{' '.join(SHELLS)}'"
    yield f"complete -c ipvsproxy -l dry-run -d '{_DRY_RUN}'"
    yield f"complete -c ipvsproxy -s o -l output -x -a '{' '.join(output.FORMATS)}' -d '{_OUTPUT}'"
    for option in catalogue.BY_FLAG.values():
        name = "-s v" if option.flag == "v" else f"-l {option.flag}"
        values = ""
        if option.placeholder in _PATHS:
            values = " -r -F"
        elif option.choices:
            values = f" -x -a '{' '.join(option.choices)}'"
        elif not option.alone:
            values = " -x"
        yield f"complete -c ipvsproxy {name}{values} -d '{_fish_quote(option.help)}'"


def _quote(text: str) -> str:
    for special in "\\[]:":
        text = text.replace(special, f"\\{special}")
    return text.replace("'", "'\\''")


def _fish_quote(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")
