"""The names and parameters of the real cupy package, from the committed list."""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

CUPY: dict[str, dict[str, str]] = json.loads(Path(__file__).parents[1].joinpath("cupy_surface.json").read_text())


def entry(namespace: str, name: str) -> str:
    """Return what ``namespace`` has under ``name``; AttributeError where it has nothing."""
    if name in CUPY[namespace]:
        return CUPY[namespace][name]
    owner = {"cupy": np, "cupy.linalg": np.linalg, "cupy.ndarray": np.ndarray, "cupy.ndarray.flags": np.flatiter}
    theirs = ", only NumPy" if hasattr(owner.get(namespace), name) else ""
    raise AttributeError(f"{namespace} has no {name!r}{theirs}")


@cache
def signature(namespace: str, name: str) -> inspect.Signature:
    """Return the signature that the committed list gives for a function or method."""
    text = entry(namespace, name)
    return inspect.signature(eval(f"lambda {text.strip()[1:-1]}: None"))


def bind(namespace: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by CuPy's parameter names; TypeError where CuPy would not take them."""
    try:
        return dict(signature(namespace, name).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise TypeError(f"{namespace}.{name}{entry(namespace, name)}: {error}") from None
