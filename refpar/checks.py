"""Numbers that somebody has given: refused where they are none, with one wording, and kept as Python's own.

NumPy's numbers are welcome, and become Python's: ``np.int64(3)`` prints otherwise than 3, so a seed would draw other
numbers, a saved run would belong to another case, and JSON would not take it.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any


def whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return ``value`` as an int.

    Raises
    ------
    ValueError
        Where it is no whole number, a truth value, or not within ``least .. most``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not within(value, least, most):
        room = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most:,}"
        raise ValueError(f"{name} is {short(value)}: it must be a whole number{room}")
    return operator.index(value)


def real(name: str, value: Any, *, below: float = math.inf, positive: bool = False) -> float:
    """Return ``value`` as a finite float, or the int that it is.

    Raises
    ------
    ValueError
        Where it is no number, a truth value, not finite, below 0, 0 where it must be ``positive``, or not ``below``.
    """
    try:
        number = float(value) if not isinstance(value, bool) and isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # an int
        number = math.inf
    if not 0 <= number < below or (positive and not number):
        room = "above 0" if positive else "of at least 0"
        limit = "finite" if below == math.inf else f"below {below:g}"
        raise ValueError(f"{name} is {short(value)}: it must be a number {room}, and {limit}")
    return value if isinstance(value, int) else number


def fix(owner: Any, check: Callable[..., Any], *names: str, **limits: Any) -> None:
    """Replace attributes of a frozen dataclass by what ``check``, one of the functions above, makes of them."""
    for name in names:
        object.__setattr__(owner, name, check(f"{type(owner).__name__} {name}", getattr(owner, name), **limits))


def within(value: Any, least: int | None, most: int | None) -> bool:
    """Return whether ``least <= value <= most``, as far as there are such limits."""
    return (least is None or value >= least) and (most is None or value <= most)


def short(value: Any) -> str:
    """Return how a value prints, in one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def meant(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return what may have been meant by a name that is not among those ``known``: one, or ``otherwise``, or all."""
    near = difflib.get_close_matches(name, known := list(known), 1)
    return f"did you mean {near[0]}?" if near else otherwise or f"known are {', '.join(known)}"
