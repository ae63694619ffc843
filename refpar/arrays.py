"""Which library an array belongs to, and how halves are multiplied and summed.

Code that computes takes its functions from the arrays it is given::

    xp = array_module(x)        # numpy, cupy, or whatever made x
    y = xp.maximum(x, 0)

so one and the same line runs on a CPU and on a GPU. ``np`` itself is written only where data
lives on the host by design: random numbers, index arithmetic, files.

Half precision follows one rule, that of the tensor core (Micikevicius et al. 2017, section 3.3):
products of halves are exact in float32, are summed in float32, and are rounded to half *once*, at
the end. NumPy does otherwise where it is not told: the sum of 4,096 half ones along axis 0 is
2,048, because 2048 + 1 rounds back to 2048.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any
"""An array of any library. NumPy's own types cannot express "whatever array_module knows"."""

BACKENDS = {
    "numpy": "pip install numpy",
    "cupy": "pip install 'refpar[cuda12]' or 'refpar[cuda13]', whichever CUDA version nvidia-smi shows",
}
"""Libraries that ranks can compute with, and how to get them."""


class Unavailable(RuntimeError):
    """Something that was asked for is not there; the text says what, and how to get it. Nothing stands in for it."""


def chosen_backend(asked: str | None = None) -> str:
    """Return the name of the array library to use: ``asked``, else that in ``REFPAR_BACKEND``, else ``"numpy"``.

    The library is looked for and not imported: it is for the ranks to use, not for who starts them.

    Raises
    ------
    ValueError
        The name is unknown.
    Unavailable
        The library is not installed.
    """
    where = "backend" if asked is not None else "REFPAR_BACKEND"
    name = asked if asked is not None else os.environ.get("REFPAR_BACKEND") or "numpy"
    if name not in BACKENDS:
        near = difflib.get_close_matches(str(name), BACKENDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(BACKENDS)}"
        raise ValueError(f"{where} {name!r} is unknown: {hint}")
    if importlib.util.find_spec(name) is None:
        raise Unavailable(f"{where} {name}: the package {name} is not installed; {BACKENDS[name]}")
    return name


def use(backend: str, local_rank: int) -> ModuleType:
    """Import an array library in a rank, choose the rank's device, and return the library.

    Parameters
    ----------
    local_rank : the rank's number on its machine; with G devices there it gets device ``local_rank % G``

    Raises
    ------
    Unavailable
        There is no device, or it cannot be used: a driver or a CUDA library is missing.
    """
    try:
        xp = importlib.import_module(backend)
        if xp is not np:
            xp.cuda.Device(local_rank % xp.cuda.runtime.getDeviceCount()).use()
            (xp.ones((2, 2)) @ xp.ones((2, 2))).sum().item()  # libraries of CUDA are loaded when first used
    except Exception as error:  # the library's own kinds, which cannot be named without it
        first = str(error).partition("\n")[0]
        raise Unavailable(
            f"backend {backend}: no GPU can be used on this machine: {type(error).__name__}: {first} "
            "(does nvidia-smi show one, and the CUDA version that this package is for?)"
        ) from error
    return xp


def synchronise(x: Array) -> None:
    """Wait until the device of ``x`` has done all that it was asked to; with host arrays there is nothing to wait for.

    A copy from the host may be under way when the call that asked for it has returned: whoever is about to
    reuse the host's memory waits first.
    """
    if not isinstance(x, np.ndarray):
        array_module(x).cuda.get_current_stream().synchronize()


def array_module(x: Array) -> ModuleType:
    """Return the library that made ``x``: the package at the root of its type's module.

    Python scalars belong to NumPy.
    """
    root = type(x).__module__.partition(".")[0]
    return np if root == "builtins" else sys.modules[root]


def to_host(x: Array) -> npt.NDArray[Any]:
    """Return ``x`` as a NumPy array: itself if it is one, a copy if it lives on a device."""
    return x if isinstance(x, np.ndarray) else x.get() if hasattr(x, "get") else np.asarray(x)


def accumulator(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the type that sums of ``dtype`` are kept in: float32 for float16, else ``dtype``; in native byte order."""
    native = np.dtype(dtype).newbyteorder("=")  # np.dtype(">f2") == np.float16 is False
    return np.dtype(np.float32) if native == np.float16 else native


def widen(x: Array) -> Array:
    """Return ``x`` in the type its sums are kept in; ``x`` itself where that is its own."""
    return x.astype(accumulator(x.dtype), copy=False)


def matmul(a: Array, b: Array, *, dtype: npt.DTypeLike | None = None) -> Array:
    """Return ``a @ b``, summed in :func:`accumulator` and rounded once to ``dtype``.

    Parameters
    ----------
    a, b : arrays of one floating type, shapes as for ``numpy.matmul``
    dtype : type of the result; that of ``a`` by default

    The operands are widened before they are multiplied. ``matmul(dtype=float32)`` of halves is no
    substitute: CuPy allocates the result in that type, yet multiplies in the type of the operands,
    so that every element has passed through half, and 70,000 has become inf, on its way to float32.
    """
    product = array_module(a).matmul(widen(a), widen(b))
    return product.astype(dtype or a.dtype, copy=False)


def total(x: Array, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> Array:
    """Return the sum of ``x`` over ``axis``, in :func:`accumulator`: never a sum of halves in halves."""
    return x.sum(axis=axis, dtype=accumulator(x.dtype), keepdims=keepdims)
