"""Files that the user named: looked at before a run, read, and written whole or not at all."""

from __future__ import annotations

import argparse
import json
import math
import os
import stat
import sys
from pathlib import Path
from typing import Any

from refpar.cli.words import BadInput


def read(path: Path) -> bytes:
    """Return the bytes of a file the user named; refuse a device, which may have no end, but for a terminal."""
    try:
        with open(path, "rb") as file:
            if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty() and file.read(1):
                raise BadInput(f"--data {path}: this is a device; it must be a file or a pipe")
            return file.read()
    except OSError as error:
        raise BadInput(f"--data {path}: {error.strerror}") from None


def check_places(options: argparse.Namespace, *names: str) -> None:
    """Refuse, before the run, to write its results where that cannot be done, or over one another or what is read."""
    from refpar import files

    taken: dict[str, str] = {}
    for name in ("data", "resume", "reference", "control", "sharding", "paths"):
        given = getattr(options, name, None)
        for path in given if isinstance(given, list) else [given] if given is not None else []:
            taken[os.path.realpath(path)] = "is read"
    for name in names:
        path = getattr(options, name)
        if path is None or str(path) == "-":
            continue
        place = os.path.realpath(path)
        if place in taken and not (name == "save" and path == options.resume) and not place.startswith("/dev/"):
            raise BadInput(f"--{name} {path}: this {taken[place]}, and would be lost")
        taken[place] = f"is what --{name} writes"
        if speaks():
            try:
                files.check_place(Path(path))
            except OSError as error:
                raise BadInput(f"--{name} {path}: {error.strerror}") from None


def write(path: Path, text: str, option: str = "--json") -> None:
    """Write a file whole or not at all."""
    if not speaks():
        return
    from refpar import files

    try:
        files.write_whole(path, text.encode())
    except OSError as error:
        raise BadInput(f"{option} {path}: {error.strerror}") from None


def write_json(place: str | None, report: Any) -> None:
    """Write what ``--json`` asks for: to a file, to standard output for ``-``, or not at all."""
    if place is None:
        return
    text = json.dumps(finite(report), allow_nan=False, indent=1) + "\n"
    if place == "-":
        sys.stdout.write(text)
    else:
        write(Path(place), text)


def finite(value: Any) -> Any:
    """Return ``value`` with null for every number that JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list) else value


def speaks() -> bool:
    """Return whether this process prints and writes files: all do, but of MPI's ranks only the first."""
    if "mpi4py.MPI" not in sys.modules:
        return True
    from refpar.comm import mpi

    return mpi.speaks()
