"""Runs other programs, such as ``ip`` and ``ipvsadm``, and returns their output."""

import subprocess


def run(*argv: str, stdin: str | None = None, check: bool = True) -> str:
    """Run a program; return its output. Raises RuntimeError if the program fails, unless ``check`` is false."""
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
