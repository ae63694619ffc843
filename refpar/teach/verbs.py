"""What ``refpar schedule``, ``show``, ``mistakes`` and ``figures`` do; the command line only reads their options.

Each returns the exit status. What the user has given wrongly is raised as :class:`Refused`, with the one line that
they are to see; what is missing on this machine as :class:`refpar.arrays.Unavailable`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refpar.teach.recorder import RecordedWorld

RIGHT, WRONG = 0, 1


class Refused(Exception):
    """Something the user gave cannot be used."""


def schedule(
    name: str,
    stages: int | None,
    micro_batches: int | None,
    forward: Fraction,
    backward: Fraction,
    capacity: int | None,
    plot: Path | None,
    trace: Path | None,
) -> int:
    """``refpar schedule``: print a timeline and what follows from it; draw it, or write it as a trace."""
    from refpar.teach import perfetto, schedules

    text = None
    if name not in schedules.BUILT_IN:
        if stages is not None or micro_batches is not None:
            raise Refused("--stages and --micro-batches are for gpipe and 1f1b: a file has its own")
        text = read(Path(name), "SCHEDULE", f"; known by name are {', '.join(schedules.BUILT_IN)}")
    counts = {"stages": stages or 4, "micro_batches": micro_batches or 8}
    try:
        report = schedules.report(name, text, **counts, forward=forward, backward=backward, capacity=capacity)
        lines = schedules.lines(report, shutil.get_terminal_size((120, 24)).columns)
    except ValueError as error:  # a schedule that cannot be right, or is too long to draw
        raise Refused(f"{name}: {error}") from None
    say(coloured(lines))
    if trace is not None:
        write_trace(trace, perfetto.of_schedule(report.ideal, report.title))
    if plot is not None:
        from refpar.teach import figures

        try:
            figures.save(figures.timelines({report.title: report.ideal}), plot)
        except ValueError as error:
            raise Refused(f"--plot {error}") from None
    return RIGHT if report.finished else WRONG


def show(name: str) -> int:
    """``refpar show``: run a technique very small, and tell."""
    from refpar.teach import show as stories

    lines, right = stories.tell(name)
    say(headed(lines))
    return RIGHT if right else WRONG


def list_mistakes() -> int:
    """``refpar mistakes``: list the catalogue."""
    from refpar.teach import mistaken

    say(headed(mistaken.listing()))
    return RIGHT


def one_mistake(name: str, steps: int) -> int:
    """``refpar mistakes NAME``: make a mistake, beside the truth."""
    from refpar.checks import meant
    from refpar.oracle.mistakes import CATALOGUE
    from refpar.teach import mistaken

    if name not in CATALOGUE:
        raise Refused(f"no mistake is called {name!r}: {meant(name, CATALOGUE, 'refpar mistakes lists them')}")
    say(headed(mistaken.beside_the_truth(name, steps)))
    return RIGHT


def figures(folder: Path, kind: str, only: Sequence[str]) -> int:
    """``refpar figures``: draw every picture, or some, from runs done here and now."""
    from refpar.teach import figures as pictures

    pictures.library()
    try:
        folder.mkdir(exist_ok=True)  # and none above it, whose name may be mistyped
    except OSError as error:
        raise Refused(f"-o {folder}: {error.strerror}") from None
    for name, path in pictures.draw_all(folder, kind, only):
        print(f"{name:<10} {path}", flush=True)
    return RIGHT


# ------------------------------------------------------------------------------------------- to the terminal


def say(lines: Iterable[str]) -> None:
    """Print lines; colours and bold only where somebody looks."""
    out = sys.stdout
    plain = not out.isatty() or "NO_COLOR" in os.environ
    for line in lines:
        print(re.sub(r"\x1b\[[\d;]*m", "", line) if plain else line, file=out)


def coloured(lines: Iterable[str]) -> Iterable[str]:
    """Yield the lines of a timeline with forward passes in blue and backward passes in yellow."""
    for line in lines:
        if line.startswith("stage "):
            line = re.sub(r"F[\d.]+( +-+)*", "\x1b[34m\\g<0>\x1b[0m", line)
            line = re.sub(r"B[\d.]+( +-+)*", "\x1b[33m\\g<0>\x1b[0m", line)
        yield line


def headed(lines: Iterable[str]) -> Iterable[str]:
    """Yield lines with headings, which are in capitals, in bold."""
    return (f"\x1b[1m{line}\x1b[0m" if line[:1].isalpha() and line == line.upper() else line for line in lines)


# ------------------------------------------------------------------------------------------------- files


def read(path: Path, argument: str, hint: str = "") -> str:
    """Return the text of a file the user named."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise Refused(f"{argument} {path}: this is no text") from None
    except OSError as error:
        raise Refused(f"{argument} {path}: {error.strerror}{hint}") from None


def write_trace(path: Path, file: dict[str, Any]) -> None:
    """Write a trace-event file, whole or not at all, once it is found to be right."""
    from refpar import files
    from refpar.teach import perfetto

    wrong = perfetto.problems(file)
    assert not wrong, wrong[:3]
    try:
        files.write_whole(path, json.dumps(file).encode())
    except OSError as error:
        raise Refused(f"--trace {path}: {error.strerror}") from None


def write_runs(path: Path, worlds: Iterable[RecordedWorld]) -> int:
    """Write all that the ranks of some worlds did as a trace-event file, in the order in which it was begun."""
    from refpar.teach import perfetto

    runs = [run for world in worlds for run in world.runs]
    write_trace(path, perfetto.of_runs(sorted(runs, key=lambda run: min(e.start for rank in run.ranks for e in rank))))
    return RIGHT
