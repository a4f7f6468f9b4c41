"""The kube-proxy that is measured beside ipvsproxy: whether it can be started where that is done.

Of the standard library alone: scripts/bench reads this before anything is measured.
"""

import os
import pathlib
import shlex
import shutil
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
EMPTY = tuple(pathlib.Path(name) for name in ("/tmp", "/run", "/dev/shm"))  # noqa: S108 - they are asked about, not used
"""scripts/kernel gives the command fresh ones; of what is in them only this directory tree is kept."""


class UnusableError(Exception):
    """The program can not be measured; the message is one sentence for a person, and says what to do."""


def find(command: str, *, directory: pathlib.Path, empty: Sequence[pathlib.Path] = EMPTY) -> str:
    """The command with the whole path of its program; empty as given. Names are looked up from ``directory`` and in PATH.

    Raises:
        UnusableError: it is no command, not there, not executable, or not to be seen from where it would be started.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UnusableError(f"KUBE_PROXY={command}: no command: {str(error).lower()}") from error
    if not words:
        return ""
    named = directory / words[0] if "/" in words[0] else pathlib.Path(shutil.which(words[0]) or "")
    if not named.is_absolute():
        raise UnusableError(f"KUBE_PROXY={command}: there is no {words[0]} in PATH")
    if not named.is_file():
        raise UnusableError(f"KUBE_PROXY={command}: {named} is no file")
    if not os.access(named, os.X_OK):
        raise UnusableError(f"KUBE_PROXY={command}: {named} is not executable; chmod +x helps")
    program = pathlib.Path(os.path.abspath(named))  # noqa: PTH100 - a link keeps its name: some programs look at it
    for path in (program, *(pathlib.Path(word) for word in words[1:] if word.startswith("/"))):
        for seen in (path, path.resolve()):
            hidden = next((one for one in empty if seen.is_relative_to(one)), None)
            if hidden and not seen.is_relative_to(ROOT):
                wanted = f"put it elsewhere, /usr/local/bin or {ROOT / 'build'} for example"
                raise UnusableError(
                    f"KUBE_PROXY={command}: {seen} can not be seen on the test kernel, where {hidden} is empty: {wanted}"
                )
    return shlex.join([str(program), *words[1:]])
