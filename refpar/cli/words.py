"""Reading what was typed: numbers, names and layouts, each refused in one line where it is none."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

MATCHED, MISMATCH, BAD_INPUT, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
WIDTH = 160  # columns where nobody looks: a file, or a pipe
MOST_RANKS = 512
MOST_KEPT = 1000  # steps of a run that keeps every array of every step, a megabyte each


class BadInput(Exception):
    """Something the user gave cannot be used; the text is the one line they see."""


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise BadInput(f"{message} (see {self.prog} --help)")


def several(text: str, what: str, known: Sequence[str]) -> list[str]:
    """Read some of the ``known`` names, with commas between them; each counts once."""
    from refpar.checks import meant

    chosen = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no {what} is called {name!r}: {meant(name, known)}")
    return chosen


def layout(text: str) -> Any:
    """Read ``--layout``."""
    from refpar.case import Layout

    try:
        chosen = Layout.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if chosen.ranks > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{chosen.ranks} ranks are too many: at most {MOST_RANKS} on one machine")
    return chosen


def rank_counts(text: str) -> list[int]:
    """Read ``--ranks``."""
    return [positive(part, MOST_RANKS) for part in text.split(",")]


def positive(text: str, most: int = 10**9) -> int:
    """Read a whole number of at least 1."""
    value = natural(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    if value > most:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is too many: at most {most:,}")
    return value


def up_to(most: int) -> Callable[[str], int]:
    """Return what reads a whole number from 1 to ``most``."""
    return functools.partial(positive, most=most)


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is no whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value


def fraction(text: str) -> float:
    """Read a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0, and finite")
    return value


def cost(text: str) -> Any:
    """Read the time of a pass: a whole number, a decimal one, or a fraction such as 3/2."""
    import re
    from fractions import Fraction

    if not re.fullmatch(r"\d{1,9}(\.\d{1,9}|/0*[1-9]\d{0,8})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is no number such as 2, 1.5 or 3/2")
    value = Fraction(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def shortened(text: str) -> str:
    """Return what was typed, or the beginning of it."""
    return text if len(text) <= 40 else f"{text[:37]}..."
