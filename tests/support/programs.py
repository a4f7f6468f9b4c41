"""Writes shell scripts that run in place of other programs."""

import pathlib


def make_program(folder: pathlib.Path, name: str, script: str = "true") -> None:
    """Write a shell script into a folder that a test puts into PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
