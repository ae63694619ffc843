"""Small expressions, and what comes of them on CuPy: run on the stand-in everywhere, on the package where a GPU is.

Each is a line of ``xp``, of X and of I on the device, with the outcome that CuPy is expected to give: an array or a
number of the host, or the error. ``test_gpu.py`` asks the package; the tables in ``test_strict.py`` are stricter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from refpar.arrays import matmul, to_host, total

X = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
I = np.array([2, 0, 2])
HALF, SINGLE = np.float16, np.float32

Line = Callable[[Any, Any, Any], Any]

REFUSED: dict[str, tuple[Line, tuple[type[Exception], ...]]] = {
    "conversion to NumPy": (lambda xp, x, i: np.asarray(x), (TypeError,)),
    "into a NumPy array": (lambda xp, x, i: np.zeros((3, 4)).__setitem__(slice(None), x), (TypeError,)),
    "a NumPy array on the right": (lambda xp, x, i: x + np.ones(4, SINGLE), (TypeError,)),
    "a NumPy array on the left": (lambda xp, x, i: np.ones(4, SINGLE) * x, (TypeError,)),
    "a NumPy array in matmul": (lambda xp, x, i: x @ np.ones((4, 2), SINGLE), (TypeError,)),
    "a list as operand": (lambda xp, x, i: x + [1, 2, 3, 4], (TypeError,)),  # noqa: RUF005
    "a list to a function": (lambda xp, x, i: xp.sum([1.0, 2.0]), (TypeError, AttributeError)),
    "an array as a number": (lambda xp, x, i: list(range(i[0])), (TypeError,)),
    "the truth of many": (lambda xp, x, i: bool(x), (ValueError,)),
    "where= in a reduction": (lambda xp, x, i: x.sum(where=x > 0), (TypeError,)),
    "initial= in a reduction": (lambda xp, x, i: x.max(initial=0), (TypeError,)),
    "clip(min=)": (lambda xp, x, i: xp.clip(x, min=0), (TypeError,)),
    "einsum(out=)": (lambda xp, x, i: xp.einsum("ij->i", x, out=xp.zeros(3, SINGLE)), (TypeError,)),
    "zeros(like=)": (lambda xp, x, i: xp.zeros(3, like=x), (TypeError,)),
    "maximum.reduce": (lambda xp, x, i: xp.maximum.reduce(x), (NotImplementedError,)),
    "errstate": (lambda xp, x, i: xp.errstate(), (AttributeError,)),
    "vecdot": (lambda xp, x, i: xp.vecdot(x, x), (AttributeError,)),
    "insert": (lambda xp, x, i: xp.insert(x, 0, 0), (AttributeError,)),
    "a writeable flag": (lambda xp, x, i: x.flags.writeable, (AttributeError,)),
    "the largest of none": (lambda xp, x, i: x[:0].max(), (ValueError,)),
    "shapes that do not fit": (lambda xp, x, i: x + xp.ones(3, SINGLE), (ValueError,)),
}

VALUES: dict[str, tuple[Line, Any]] = {
    "there and back": (lambda xp, x, i: x, X),
    "a view": (lambda xp, x, i: x[1:, ::-2], X[1:, ::-2]),
    "a transposed copy": (lambda xp, x, i: xp.ascontiguousarray(x.T), X.T.copy()),
    "a sum is an array": (lambda xp, x, i: isinstance(x.sum(), xp.ndarray) and x.sum().shape, ()),
    "a number from it": (lambda xp, x, i: float(x.sum()), 6.0),
    "an element is a view": (lambda xp, x, i: (x[0][1], x.fill(7))[0], SINGLE(7)),
    "sums along an axis": (lambda xp, x, i: x.sum(axis=0), X.sum(axis=0)),
    "the sum of no rows": (lambda xp, x, i: x[:0].sum(axis=0), np.zeros(4, SINGLE)),
    "largest": (lambda xp, x, i: x.max(axis=1, keepdims=True), X.max(axis=1, keepdims=True)),
    "half ones, summed": (lambda xp, x, i: xp.ones((4096, 2), HALF).sum(axis=0), np.full(2, 4096, HALF)),
    "half ones, summed in float32": (lambda xp, x, i: total(xp.ones((4096, 2), HALF), 0), np.full(2, 4096, SINGLE)),
    "halves, multiplied": (lambda xp, x, i: xp.ones((1, 4096), HALF) @ xp.ones((4096, 1), HALF), HALF([[4096]])),
    "halves, multiplied in float32": (
        lambda xp, x, i: matmul(xp.full((1, 4), 300, HALF), xp.full((4, 1), 300, HALF), dtype=SINGLE),
        SINGLE([[360000]]),
    ),
    "beyond the largest half": (
        lambda xp, x, i: matmul(xp.full((1, 4), 300, HALF), xp.full((4, 1), 300, HALF)),
        HALF([[np.inf]]),
    ),
    "overflow in silence": (lambda xp, x, i: xp.full(2, 65504, HALF) * 2, np.full(2, np.inf, HALF)),
    "division by zero in silence": (lambda xp, x, i: x[1] / 0, np.array([-np.inf, np.nan, np.inf, np.inf], SINGLE)),
    "to half, ties to even": (
        lambda xp, x, i: xp.asarray(np.array([2049, 2051, 65519, 6e-8, 2e-8], SINGLE)).astype(HALF),
        np.array([2048, 2052, 65504, 6e-8, 0], HALF),
    ),
    "a half and a Python number": (lambda xp, x, i: x.astype(HALF) * 2.0, (X * 2).astype(HALF)),
    "a Python number on the left": (lambda xp, x, i: 1 - x, 1 - X),
    "a NumPy number on the left": (lambda xp, x, i: SINGLE(2) * x, 2 * X),
    "matmul of integers in float32": (lambda xp, x, i: x @ x.T, X @ X.T),
    "matmul of no rows": (lambda xp, x, i: x[:0] @ x.T, np.zeros((0, 3), SINGLE)),
    "batched matmul": (lambda xp, x, i: xp.stack([x, x + 1]) @ x.T, np.stack([X, X + 1]) @ X.T),
    "einsum": (lambda xp, x, i: xp.einsum("ij,ij->i", x, x), (X * X).sum(axis=1)),
    "take": (lambda xp, x, i: x[i], X[I]),
    "take along an axis": (
        lambda xp, x, i: xp.take_along_axis(x, i[:, None], axis=1),
        np.take_along_axis(X, I[:, None], axis=1),
    ),
    "a mask": (lambda xp, x, i: x[x > 0], X[X > 0]),
    "where": (lambda xp, x, i: xp.where(x > 0, x, 0), np.where(X > 0, X, 0)),
    "add.at of integers": (lambda xp, x, i: count_of(xp, i), np.array([1, 0, 2])),
    "a stable sort": (lambda xp, x, i: xp.argsort(i, kind="stable"), np.array([1, 0, 2])),
    "concatenate and split": (lambda xp, x, i: xp.array_split(xp.concatenate([x, x]), 4)[3], X[2:3]),
    "square roots": (lambda xp, x, i: xp.sqrt(xp.maximum(x, 0)), np.sqrt(np.maximum(X, 0))),
    "is it finite": (lambda xp, x, i: bool(xp.isfinite(x / x).all()), False),
    "a maximum with NaN": (lambda xp, x, i: xp.maximum(x[1], x[1] / x[1]), np.array([1, np.nan, 1, 2], SINGLE)),
    "the upper triangle": (lambda xp, x, i: xp.triu(x, 1), np.triu(X, 1)),
    "memory in common": (lambda xp, x, i: [xp.shares_memory(x, x[1:]), xp.shares_memory(x, x.copy())], [True, False]),
    "written in place": (lambda xp, x, i: xp.add(x, x, out=x) is x, True),
    "numbers of the host": (lambda xp, x, i: (x[0, 0].item(), x[0].tolist()), (-5.0, [-5.0, -4.0, -3.0, -2.0])),
}


def count_of(xp: Any, i: Any) -> Any:
    """Return how often each of 0, 1 and 2 is in ``i``."""
    counts = xp.zeros(3, np.int64)
    xp.add.at(counts, i, 1)
    return counts


def outcomes(xp: Any) -> dict[str, str]:
    """Return what came of each expression that did not come out as it is expected to; nothing where all did."""
    wrong = {}
    for name, (line, errors) in REFUSED.items():
        try:
            wrong[name] = f"gave {line(xp, xp.asarray(X.copy()), xp.asarray(I))!r}"
        except errors:
            pass
        except Exception as error:
            wrong[name] = f"raised {error!r}"
    for name, (line, expected) in VALUES.items():
        try:
            got = line(xp, xp.asarray(X.copy()), xp.asarray(I))
            got = to_host(got) if isinstance(got, xp.ndarray) else got
            if not equal(got, expected):
                wrong[name] = f"gave {got!r}, not {expected!r}"
        except Exception as error:
            wrong[name] = f"raised {error!r}"
    return wrong


def equal(got: Any, expected: Any) -> bool:
    """Return whether two results are equal in type, shape and every bit; any NaN is as good as another."""
    if isinstance(expected, np.ndarray | np.generic):
        same = getattr(got, "dtype", None) == expected.dtype and got.shape == expected.shape
        return bool(same and np.array_equal(got, expected, equal_nan=expected.dtype.kind == "f"))
    return bool(type(got) is type(expected) and got == expected)
