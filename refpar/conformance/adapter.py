"""Load an adapter, find out what it can do, and call it: as a plain function, or on every rank."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

BY_RANK: dict[str, tuple[bool, ...]] = {
    "all_reduce": (True,),
    "all_reduce_max": (True,),
    "reduce_scatter": (True, False),
    "all_gather": (True,),
    "broadcast": (True, False),
    "all_to_all": (True,),
    "column_linear": (True, True, True, True),
    "row_linear": (True, True, True, True),
    "vocabulary_cross_entropy": (True, True, True),
    "clip": (True, False),
    "loss_scale": (False, True),
    "checkpoint": (False, False, False, False, False),
    "run": (False, False),
}
"""What an adapter may have, and of each argument whether it is a list with one entry a rank."""

TUPLES = {"column_linear": 4, "row_linear": 4, "vocabulary_cross_entropy": 2, "clip": 2, "loss_scale": 2}
"""Operations that return several lists by rank, and how many."""

RANKS = (1, 2, 3, 4)
DTYPES = ("float32", "float64")


class BadAdapter(Exception):
    """An adapter that cannot be used; the text is one line that says why."""


class Launcher(Protocol):
    """Calls a method of the adapter on each of some ranks."""

    def __call__(self, name: str, ranks: int, arguments: Sequence[Sequence[Any]]) -> list[Any]: ...


def spmd(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of an adapter that is to be called on every rank, with that rank's share of the arguments."""
    method.refpar_spmd = True  # type: ignore[attr-defined]
    return method


def load(spec: str) -> Any:
    """Return an instance of the adapter that ``package.module:Class`` names.

    Raises
    ------
    BadAdapter
        Where there is none, or it has none of the methods of an adapter.
    """
    module, colon, path = spec.partition(":")
    if not (colon and module and path):
        raise BadAdapter(f"adapter {spec!r} must be written package.module:Class")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever it raises
        what = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise BadAdapter(f"adapter {spec}: cannot import {module}: {what}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise BadAdapter(f"adapter {spec}: {module} has no {path}")
        found = getattr(found, part)
    try:
        adapter = found() if inspect.isclass(found) else found
    except Exception as error:
        raise BadAdapter(f"adapter {spec}: {path}() raised {type(error).__name__}: {error}") from None
    if not any(callable(getattr(adapter, name, None)) for name in BY_RANK):
        raise BadAdapter(f"adapter {spec} can do nothing: it must have one of {', '.join(BY_RANK)}")
    return adapter


def able(adapter: Any, name: str) -> bool:
    """Return whether an adapter has an operation."""
    return callable(getattr(adapter, name, None))


def title(adapter: Any) -> str:
    """Return name and version of an adapter, for reports."""
    name = getattr(adapter, "name", type(adapter).__name__)
    return f"{name} {getattr(adapter, 'version', '')}".strip()


class Subject:
    """An adapter, and how its methods are called.

    Attributes
    ----------
    adapter : the user's object
    ranks : numbers of ranks it can be asked for
    dtypes : names of the types of its arrays
    """

    def __init__(self, spec: str) -> None:
        from refpar.conformance import launch

        self.spec, self.adapter = spec, load(spec)
        self.dtypes: tuple[str, ...] = tuple(getattr(self.adapter, "dtypes", DTYPES))
        self.ranks: tuple[int, ...] = tuple(getattr(self.adapter, "ranks", RANKS))
        self.launcher: Launcher | None = None
        if any(self.is_spmd(name) for name in BY_RANK if able(self.adapter, name)):
            self.launcher, sizes = launch.launcher(spec, self.adapter)
            self.ranks = sizes or self.ranks
        if not self.ranks or min(self.ranks) < 1:
            raise BadAdapter(f"adapter {spec}: ranks is {self.ranks!r}: it must be numbers of at least 1")

    def is_spmd(self, name: str) -> bool:
        """Return whether a method is to be called on every rank."""
        return bool(getattr(getattr(self.adapter, name, None), "refpar_spmd", False))

    def call(self, name: str, ranks: int, *arguments: Any) -> Any:
        """Call an operation with lists by rank, however the adapter takes it, and return lists by rank."""
        if not self.is_spmd(name):
            return getattr(self.adapter, name)(*arguments)
        assert self.launcher is not None
        shares = [
            [x[rank] if by_rank else x for x, by_rank in zip(arguments, BY_RANK[name], strict=True)]
            for rank in range(ranks)
        ]
        results = self.launcher(name, ranks, shares)
        if name in ("run", "checkpoint"):
            return results[0]
        return tuple(zip(*results, strict=True)) if name in TUPLES else results

    def close(self) -> None:
        """End what the adapter has started."""
        for part in (self.launcher, self.adapter):
            close = getattr(part, "close", None)
            if close is not None:
                close()
