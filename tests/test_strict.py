"""The stand-in for CuPy refuses what only NumPy can do, and the code runs on it.

Three parts: the stand-in itself, line by line; the list of names that it goes by, against the
cupy package where that is installed; and this project's code on its arrays, held to NumPy's numbers.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import operator
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy_surface
import numpy as np
import on_memory
import on_strict
import pytest
import strategies
import strictpy

import refpar.arrays
from refpar import optim, rng, single
from refpar.arrays import accumulator, array_module, matmul, to_host, total, widen
from refpar.case import Batch, Case, Layout, State, Trace
from refpar.comm import World, ring
from refpar.nn import models
from refpar.nn.layer import At
from refpar.parallel import hybrid
from refpar.precision import LossScale, Precision

pytestmark = pytest.mark.strict

X = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
I = np.array([2, 0, 2])
Line = Callable[[Any, Any, Any], Any]
"""A line of technique code: of the library, of X and of I in it."""

# What only NumPy can do: the line, the error, and the line that says the same and runs on both.
REFUSED: dict[str, tuple[Line, type[Exception], Line]] = {
    "a NumPy function": (lambda xp, x, i: np.sum(x), TypeError, lambda xp, x, i: xp.sum(x)),
    "a NumPy ufunc": (lambda xp, x, i: np.exp(x), TypeError, lambda xp, x, i: xp.exp(x)),
    "a NumPy ufunc of a NumPy scalar": (
        lambda xp, x, i: np.maximum(np.float32(0), x),
        TypeError,
        lambda xp, x, i: xp.maximum(np.float32(0), x),
    ),
    "a NumPy function of a list of arrays": (
        lambda xp, x, i: np.concatenate([x, x]),
        TypeError,
        lambda xp, x, i: xp.concatenate([x, x]),
    ),
    "conversion to NumPy": (lambda xp, x, i: np.asarray(x), TypeError, lambda xp, x, i: to_host(x)),
    "assignment to a NumPy array": (
        lambda xp, x, i: np.zeros((3, 4)).__setitem__(slice(None), x),
        TypeError,
        lambda xp, x, i: np.zeros((3, 4)).__setitem__(slice(None), to_host(x)),
    ),
    "a NumPy array as operand": (
        lambda xp, x, i: x + np.ones(4, np.float32),
        TypeError,
        lambda xp, x, i: x + xp.ones(4, np.float32),
    ),
    "a NumPy array as left operand": (
        lambda xp, x, i: np.ones(4, np.float32) * x,
        TypeError,
        lambda xp, x, i: np.float32(1) * x,
    ),
    "a 0-d NumPy array as operand": (lambda xp, x, i: x * np.array(2.0), TypeError, lambda xp, x, i: x * 2.0),
    "a NumPy array in place": (
        lambda xp, x, i: x.__iadd__(np.ones(4, np.float32)),
        TypeError,
        lambda xp, x, i: x.__iadd__(xp.ones(4, np.float32)),
    ),
    "a NumPy array in matmul": (
        lambda xp, x, i: x @ np.ones((4, 2), np.float32),
        TypeError,
        lambda xp, x, i: x @ xp.ones((4, 2), np.float32),
    ),
    "a list as operand": (
        lambda xp, x, i: operator.add(x, [1, 2, 3, 4]),
        TypeError,
        lambda xp, x, i: x + xp.asarray([1, 2, 3, 4]),
    ),
    "a list to a function": (lambda xp, x, i: xp.sum([1.0, 2.0]), TypeError, lambda xp, x, i: xp.sum(x[0])),
    "a list to a ufunc": (
        lambda xp, x, i: xp.maximum(x, [0, 1, 2, 3]),
        TypeError,
        lambda xp, x, i: xp.maximum(x, xp.arange(4)),
    ),
    "a list of NumPy arrays": (
        lambda xp, x, i: xp.stack([X, X]),
        TypeError,
        lambda xp, x, i: xp.stack([xp.asarray(X), xp.asarray(X)]),
    ),
    "a number to a reduction": (lambda xp, x, i: xp.sum(3.0), TypeError, lambda xp, x, i: xp.sum(xp.asarray(3.0))),
    "an index from NumPy": (lambda xp, x, i: x[np.array([2, 0])], TypeError, lambda xp, x, i: x[xp.asarray([2, 0])]),
    "a mask from NumPy": (lambda xp, x, i: x[X > 0], TypeError, lambda xp, x, i: x[x > 0]),
    "a list as index": (lambda xp, x, i: x[[2, 0]], TypeError, lambda xp, x, i: x[xp.asarray([2, 0])]),
    "take by a list": (lambda xp, x, i: x.take([2, 0], axis=0), TypeError, lambda xp, x, i: x.take(i, axis=0)),
    "assignment of a NumPy array": (
        lambda xp, x, i: x.__setitem__(0, np.ones(4, np.float32)),
        TypeError,
        lambda xp, x, i: x.__setitem__(0, xp.ones(4, np.float32)),
    ),
    "a repeated index in an assignment": (
        lambda xp, x, i: x.__setitem__(i, x),
        IndexError,
        lambda xp, x, i: x.__setitem__(i[:2], x[:2]),
    ),
    "an assignment that overlaps": (
        lambda xp, x, i: x.__setitem__(slice(1, 3), x[0:2]),
        ValueError,
        lambda xp, x, i: x.__setitem__(slice(1, 3), x[0:2].copy()),
    ),
    "a list to a method": (lambda xp, x, i: x.dot([1, 2, 3, 4]), TypeError, lambda xp, x, i: x.dot(x[0])),
    "an array as a number": (lambda xp, x, i: list(range(i[0])), TypeError, lambda xp, x, i: list(range(int(i[0])))),
    "an array as a shape": (
        lambda xp, x, i: xp.zeros(i[0]),
        TypeError,
        lambda xp, x, i: xp.zeros(int(i[0])),
    ),
    "errstate": (lambda xp, x, i: xp.errstate(over="ignore"), AttributeError, lambda xp, x, i: np.errstate() and x),
    "vecdot": (lambda xp, x, i: xp.vecdot(x, x), AttributeError, lambda xp, x, i: xp.einsum("ij,ij->i", x, x)),
    "block": (lambda xp, x, i: xp.block([[x, x]]), AttributeError, lambda xp, x, i: xp.concatenate([x, x], axis=1)),
    "insert": (
        lambda xp, x, i: xp.insert(x, 0, 0, axis=0),
        AttributeError,
        lambda xp, x, i: xp.concatenate([xp.zeros_like(x[:1]), x]),
    ),
    "a writeable flag": (lambda xp, x, i: x.flags.writeable, AttributeError, lambda xp, x, i: x.flags.c_contiguous),
    "a pointer to the host": (lambda xp, x, i: x.ctypes, AttributeError, lambda xp, x, i: to_host(x).ctypes and 0),
    "where= in a reduction": (
        lambda xp, x, i: x.sum(where=x > 0),
        TypeError,
        lambda xp, x, i: xp.where(x > 0, x, 0).sum(),
    ),
    "initial= in a reduction": (
        lambda xp, x, i: x.max(initial=0),
        TypeError,
        lambda xp, x, i: xp.maximum(x.max(), 0),
    ),
    "where= in a ufunc": (
        lambda xp, x, i: xp.exp(x, where=x > 0, out=xp.ones_like(x)),
        TypeError,
        lambda xp, x, i: xp.where(x > 0, xp.exp(x), 1),
    ),
    "clip(min=)": (lambda xp, x, i: xp.clip(x, min=0), TypeError, lambda xp, x, i: xp.clip(x, 0, None)),
    "einsum(out=)": (
        lambda xp, x, i: xp.einsum("ij->i", x, out=xp.zeros(3, np.float32)),
        TypeError,
        lambda xp, x, i: xp.einsum("ij->i", x),
    ),
    "zeros(like=)": (lambda xp, x, i: xp.zeros(3, like=x), TypeError, lambda xp, x, i: xp.zeros_like(x[:, 0])),
    "asarray(device=)": (lambda xp, x, i: xp.asarray(x, device="cpu"), TypeError, lambda xp, x, i: xp.asarray(x)),
    "astype(casting=)": (
        lambda xp, x, i: x.astype(np.float64, casting="safe"),
        TypeError,
        lambda xp, x, i: x.astype(np.float64),
    ),
    "take(mode=)": (lambda xp, x, i: x.take(i, mode="clip"), TypeError, lambda xp, x, i: x.take(xp.clip(i, 0, 11))),
    "item(index)": (lambda xp, x, i: x.item(0), TypeError, lambda xp, x, i: x[0, 0].item()),
    "maximum.reduce": (
        lambda xp, x, i: xp.maximum.reduce(x),
        NotImplementedError,
        lambda xp, x, i: x.max(axis=0),
    ),
    "logical_or.reduce": (
        lambda xp, x, i: xp.logical_or.reduce(x > 0),
        NotImplementedError,
        lambda xp, x, i: (x > 0).any(axis=0),
    ),
    "multiply.at": (
        lambda xp, x, i: xp.multiply.at(x, i[:2], 2.0),
        NotImplementedError,
        lambda xp, x, i: xp.add.at(x, i[:2], x[i[:2]]),
    ),
    "add.at of floats, twice on one row": (
        lambda xp, x, i: xp.add.at(x, i, 1.0),
        IndexError,
        lambda xp, x, i: x.__iadd__((xp.arange(3)[:, None] == i).astype(np.float32) @ xp.ones((3, 4), np.float32)),
    ),
    "add.reduceat of floats": (
        lambda xp, x, i: xp.add.reduceat(x, xp.asarray([0, 2])),
        TypeError,
        lambda xp, x, i: xp.stack([x[:2].sum(axis=0), x[2:].sum(axis=0)]),
    ),
    "matmul(dtype=) of halves": (
        lambda xp, x, i: xp.matmul(x.astype(np.float16), x.T.astype(np.float16), dtype=np.float32),
        TypeError,
        lambda xp, x, i: matmul(x.astype(np.float16), x.T.astype(np.float16), dtype=np.float32),
    ),
    "cumsum of halves": (
        lambda xp, x, i: x.astype(np.float16).cumsum(),
        TypeError,
        lambda xp, x, i: x.astype(np.float16).cumsum(dtype=np.float32),
    ),
    "norm of halves": (
        lambda xp, x, i: xp.linalg.norm(x.astype(np.float16)),
        TypeError,
        lambda xp, x, i: xp.linalg.norm(x),
    ),
    "random numbers drawn on the device": (
        lambda xp, x, i: xp.random.default_rng(0).random(3),
        AttributeError,
        lambda xp, x, i: xp.asarray(np.random.default_rng(0).random(3)),
    ),
}

WITHOUT_A_GPU = (
    *("a list of NumPy arrays", "a NumPy array in matmul", "a pointer to the host", "a writeable flag"),
    *("asarray(device=)", "assignment to a NumPy array", "astype(casting=)", "block", "clip(min=)"),
    *("conversion to NumPy", "errstate", "initial= in a reduction", "insert", "item(index)", "maximum.reduce"),
    *("take(mode=)", "vecdot", "zeros(like=)"),
)
"""Those that the real package refuses before it looks for a device."""

# What both libraries run, with other results: the line, and the one that says what is meant.
DIFFERENT: dict[str, tuple[Line, Line]] = {
    "reading what was never written": (
        lambda xp, x, i: xp.isnan(xp.empty(3)).all(),
        lambda xp, x, i: xp.isnan(xp.zeros(3)).all(),
    ),
    "the sum of 4,096 half ones": (
        lambda xp, x, i: xp.ones((4096, 2), dtype=np.float16).sum(axis=0),
        lambda xp, x, i: total(xp.ones((4096, 2), dtype=np.float16), axis=0),
    ),
    "an element kept while the array changes": (
        lambda xp, x, i: (x[0][1], x.fill(7))[0],
        lambda xp, x, i: (x[0][1].copy(), x.fill(7))[0],
    ),
    "a reduction as a Python number": (
        lambda xp, x, i: isinstance(x.sum(), np.floating),
        lambda xp, x, i: isinstance(float(x.sum()), float),
    ),
}


def on(xp: Any, line: Line) -> Any:
    """Return the result of a line in a library, and what it made of X, both on the host."""
    x = xp.asarray(X.copy())
    result = line(xp, x, xp.asarray(I))
    return to_host(result) if hasattr(result, "dtype") else result, to_host(x)


@pytest.mark.parametrize(("line", "error", "counterpart"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(line: Line, error: type[Exception], counterpart: Line) -> None:
    """What only NumPy can do raises on the stand-in, and its counterpart gives NumPy's numbers."""
    with pytest.raises(error):
        on(strictpy, line)
    same_bits(on(strictpy, counterpart), on(np, counterpart))


@pytest.mark.parametrize(("line", "error"), [(line, error) for line, error, _ in REFUSED.values()], ids=REFUSED.keys())
def test_refused_lines_are_numpy_lines(line: Line, error: type[Exception]) -> None:
    """Each refused line is one that NumPy does run, or it would prove nothing."""
    with np.errstate(all="ignore"):
        on(np, line)


@pytest.mark.parametrize(("line", "counterpart"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_different(line: Line, counterpart: Line) -> None:
    """Where CuPy answers otherwise than NumPy, so does the stand-in, and the counterpart agrees."""
    with pytest.raises(AssertionError):
        same_bits(on(strictpy, line), on(np, line))
    same_bits(on(strictpy, counterpart), on(np, counterpart))


def same_bits(actual: Any, expected: Any) -> None:
    """Assert equal values, shapes and types."""
    if isinstance(expected, tuple | list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            same_bits(one, other)
    elif isinstance(expected, np.ndarray | np.generic):
        actual = to_host(actual)
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(actual, expected)
    else:
        assert actual == expected


def test_an_array_says_where_it_is_from() -> None:
    """``array_module`` finds the stand-in by the type of its arrays."""
    x = strictpy.asarray(X)
    assert array_module(x) is strictpy
    assert type(x).__module__ == "strictpy"
    assert array_module(x.sum()) is strictpy
    assert array_module(np.float32(1)) is np


def test_views_share_memory_and_name_their_owner() -> None:
    """A slice, a transpose and a flat view write through to the array that ``base`` names."""
    x = strictpy.zeros((3, 4))
    for part in (x[1], x[1, 2], x.T, x.reshape(-1), x[..., None], strictpy.split(x, 3)[1], x.T[1:][0]):
        assert part.base is x
        part += 1
        assert bool(part.all())
    assert x.base is None
    assert (x + 0).base is None
    assert x.copy().base is None
    assert x[strictpy.asarray([0, 1])].base is None
    assert int(x[1, 2]) == 6  # all seven but the last, which is column 1


def test_an_array_is_copied_on_the_way_in_and_out() -> None:
    """No memory is shared with the host."""
    host = X.copy()
    x = strictpy.asarray(host)
    host[:] = 0
    x.get()[:] = 0
    same_bits(x.get(), X)
    assert strictpy.asarray(x) is x
    assert strictpy.array(x) is not x
    x.set(2 * X)
    same_bits(strictpy.asnumpy(x), 2 * X)
    for twin in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
        same_bits(twin.get(), 2 * X)


def test_waiting_for_the_device_is_counted() -> None:
    """Each way out makes the host wait; arithmetic does not."""
    x = strictpy.asarray(X)
    with strictpy.synchronisations() as count:
        y = (x @ x.T).sum(axis=0) + x[:, 0] * 2
    assert count.total == 0
    with strictpy.synchronisations() as count:
        float(y[0]), int(y[0]), bool(y[0] > 0), y.get(), y.tolist(), y[y > 0], strictpy.asnumpy(y)
        strictpy.cuda.get_current_stream().synchronize()
    assert count.total == 8


def test_nothing_warns() -> None:
    """A GPU overflows, and divides by zero, in silence."""
    x = strictpy.asarray(np.array([0.0, 1.0, 65504.0], np.float16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same_bits((x * 2 / 0).get(), np.array([np.nan, np.inf, np.inf], np.float16))
        strictpy.log(x), strictpy.exp(x), (x * x).sum(), x.astype(np.float32) * 1e38
    assert caught == []


def test_halves_accumulate_in_float32() -> None:
    """Sums, means and products of halves are rounded once; NumPy's sum along axis 0 stops at 2,048."""
    ones = strictpy.ones((4096, 3), dtype=np.float16)
    for summed in (ones.sum(axis=0), strictpy.sum(ones, axis=0), strictpy.add.reduce(ones), (ones.T @ ones)[0]):
        assert summed.dtype == np.float16
        assert summed.tolist() == [4096] * 3
    assert np.ones((4096, 3), np.float16).sum(axis=0).tolist() == [2048] * 3
    assert float(ones.mean()) == 1
    assert (accumulator(ones.dtype), widen(ones).dtype, total(ones).dtype) == (np.float32, np.float32, np.float32)


def test_products_of_halves_never_pass_through_half() -> None:
    """``matmul`` hands on 300 * 300 * 4 in float32, beyond the largest half."""
    halves = strictpy.full((1, 4), 300, dtype=np.float16)
    assert matmul(halves, halves.T, dtype=np.float32).tolist() == [[360000]]
    assert matmul(halves, halves.T).tolist() == [[np.inf]]


def test_only_names_that_cupy_has() -> None:
    """Whatever is asked of the stand-in, it either is in CuPy or raises AttributeError."""
    for name in set(dir(np)) - set(strictpy._surface.CUPY["cupy"]):
        if not name.startswith("_"):
            with pytest.raises(AttributeError):
                getattr(strictpy, name)
    for name in set(dir(np.ndarray)) - set(strictpy._surface.CUPY["cupy.ndarray"]):
        if not name.startswith("_"):
            with pytest.raises(AttributeError):
                getattr(strictpy.ones(1), name)
    assert {n for n in dir(strictpy.ndarray) if n[0] != "_"} <= set(strictpy._surface.CUPY["cupy.ndarray"])
    assert not hasattr(strictpy.ndarray, "__index__")


def test_an_index_out_of_range_raises() -> None:
    """CuPy wraps an array of indices around; whoever relies on an error, or on the wrap, is told."""
    x, i = strictpy.asarray(X), strictpy.asarray([0, 3])
    for line in (lambda: x[i], lambda: x.take(i, axis=0), lambda: x.__setitem__(i, 0.0), lambda: x[3]):
        with pytest.raises(IndexError):
            line()
    for line in (strictpy.take_along_axis, lambda x, i, axis: strictpy.put_along_axis(x, i, 0.0, axis)):
        with pytest.raises(IndexError):
            line(x, i[None] + 1, 1)


def needs_cupy(test: Any) -> Any:
    missing = importlib.util.find_spec("cupy") is None
    return pytest.mark.cupy(pytest.mark.skipif(missing, reason="the cupy package is not installed")(test))


SOURCES = sorted(Path(refpar.arrays.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_every_name_taken_from_the_library_is_in_cupy(path: Path) -> None:
    """Lines that no test runs are read: ``xp.name(keyword=...)``, whatever ``xp`` is, must be in the package."""
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Attribute) and (names := from_library(call)) and names[0][0] != "_":
            kind = strictpy._surface.entry("cupy", names[0])
            if len(names) > 1 and kind.startswith("ufunc"):
                assert names[1] in kind.split(), f"{path}:{call.lineno}: no {'.'.join(names)} in cupy"
        elif isinstance(call, ast.Call) and len(names := from_library(call.func)) == 1:
            ufunc = strictpy._surface.entry("cupy", names[0]).startswith("ufunc")
            signature = strictpy._surface.signature(*(("cupy.ufunc", "__call__") if ufunc else ("cupy", names[0])))
            unknown = {keyword.arg for keyword in call.keywords} - set(signature.parameters) - {None}
            assert not unknown, f"{path}:{call.lineno}: no {unknown} in cupy.{names[0]}{signature}"


def from_library(node: ast.AST) -> list[str]:
    """Return ``["add", "at"]`` for ``xp.add.at``, and for ``array_module(x).add.at``; nothing for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Call):
        node = node.func
        return names if isinstance(node, ast.Name) and node.id == "array_module" else []
    return names if isinstance(node, ast.Name) and node.id == "xp" else []


@needs_cupy
@pytest.mark.parametrize("name", WITHOUT_A_GPU)
def test_refused_by_cupy_itself(name: str) -> None:
    """The real package answers as the stand-in does, as far as it can be asked without a GPU."""
    import cupy

    line, error, _ = REFUSED[name]
    shell = cupy_surface.shell(cupy)
    with pytest.raises(error):
        line(cupy, shell, shell)


@needs_cupy
def test_the_committed_surface_is_that_of_the_installed_cupy() -> None:
    """``python tests/cupy_surface.py`` rewrites the file after a new release."""
    committed, installed = cupy_surface.committed(), cupy_surface.installed()
    if committed["versions"] != installed["versions"]:
        pytest.skip(f"the file is of {committed['versions']}, installed is {installed['versions']}")
    assert committed == installed


# The code of this project on it, held to NumPy's numbers bit for bit: the stand-in computes with NumPy.


GPT_TIED = models.GPT(vocabulary=11, context=7, width=12, layers=2, heads=3, dropout=0.25)
GPT_UNTIED = models.GPT(vocabulary=11, context=7, width=12, layers=1, heads=2, tied=False, activation="relu")
MODELS = {"mlp": models.MLP((5, 6, 4, 3)), "gpt": GPT_TIED, "gpt, untied, relu": GPT_UNTIED}


def batch_of(model: models.MLP | models.GPT, rows: int, step: int = 0) -> Batch:
    """Return a batch with a ragged mask."""
    if isinstance(model, models.GPT):
        ids = rng.integers((step, "ids"), (2, rows, model.context), 0, model.vocabulary)
        return Batch(ids[0], ids[1], rng.uniform((step, "mask"), ids[0].shape) < 0.7)
    x, y = (rng.uniform((step, what), (rows, model.widths[end])) for what, end in (("x", 0), ("y", -1)))
    return Batch(x, y, rng.uniform((step, "mask"), (rows,)) < 0.7)


def forward_and_backward(xp: Any, model: models.MLP | models.GPT, dtype: str, rows: int) -> dict[str, Any]:
    """Return output, loss and every gradient."""
    built, at = model.build(), At(seed=7, step=1, rows=tuple(range(rows)))
    params = {name: xp.asarray(models.initial_value(3, name, s, dtype)) for name, s in built.specs.items()}
    batch = batch_of(model, rows).on(xp, dtype)
    y, saved = built.network.forward(params, batch.inputs, at)
    loss, kept = built.loss.forward(y, batch.targets, batch.mask)
    gradients: dict[str, Any] = {}
    for name, g in built.network.backward(params, saved, built.loss.backward(kept, seed=1 / 8)):
        gradients[name] = gradients[name] + g if name in gradients else g
    results = {"y": y, "loss": loss, **gradients}
    assert {array_module(x) for x in results.values()} == {xp}
    return {name: to_host(x) for name, x in results.items()}


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_networks(model: models.MLP | models.GPT, dtype: str, rows: int) -> None:
    """Forward and backward of whole networks, a batch without rows among them."""
    expected = forward_and_backward(np, model, dtype, rows)
    same_dict(forward_and_backward(strictpy, model, dtype, rows), expected)


def same_dict(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        try:
            same_bits(actual[name], value)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def test_a_network_waits_for_the_device_once_a_lookup() -> None:
    """Nothing in a GPT's step waits for the device but the embedding's gradient, for the ids it sorts."""
    with strictpy.synchronisations() as count:
        forward_and_backward(strictpy, GPT_TIED, "float32", 2)
    fetched = len(GPT_TIED.build().specs) + 2  # by forward_and_backward itself: y, loss and the gradients
    assert count.total == fetched + 1


@pytest.mark.parametrize(
    "optimizer",
    [optim.SGD(0.1), optim.SGD(0.1, 0.9, 0.01), optim.Adam(0.1, weight_decay=0.1), optim.AdamW(0.1, warmup=2)],
    ids=repr,
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_optimizers(optimizer: optim.Optimizer, dtype: str) -> None:
    """Three updates, with clipping."""

    def updates(xp: Any) -> dict[str, Any]:
        p = xp.asarray(rng.uniform((0, "p"), (9,)).astype(dtype))
        state = optim.new_state(optimizer, p)
        for t in (1, 2, 3):
            g = xp.asarray(rng.uniform((t, "g"), (9,)).astype(dtype))
            g = g * optim.clip_factor(optim.squared_norm(g) ** 0.5, 0.5)
            optim.update(optimizer, p, g, state, t, decay=True)
        assert {array_module(x) for x in (p, *state.values())} == {xp}
        return {"p": to_host(p), **{name: to_host(x) for name, x in state.items()}}

    same_dict(updates(strictpy), updates(np))


@pytest.mark.parametrize("dtype", ring.DTYPES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ring(worlds: Callable[[int], World], ranks: int, dtype: str) -> None:
    """Every collective, in real ranks, with shapes that do not divide, down to nothing."""
    for shape in [(), (0,), (2,), (3, 4)]:
        for theirs, mine in worlds(ranks).run(on_strict.both, dtype, shape):
            same_dict(theirs, mine)


CASES = {
    "float64 mlp": Case(MODELS["mlp"], optim.SGD(0.1), tuple(batch_of(MODELS["mlp"], 7, step) for step in range(2))),
    "float16 gpt": Case(
        GPT_TIED,
        optim.AdamW(0.01),
        tuple(batch_of(GPT_TIED, 5, step) for step in range(2)),
        precision=Precision("float16", loss_scale=LossScale(1024.0)),
        clip=0.5,
    ),
}


def flat(trace: Trace) -> dict[str, Any]:
    """Return everything in a trace, by name."""
    return {f"step {i}, {name}": value for i, step in enumerate(trace.steps) for name, value in step.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_single_device(case: Case) -> None:
    """A whole training run: what it keeps and the peak of what it holds, too."""
    one, other = single.train(case, xp=strictpy), single.train(case)
    same_dict(flat(one), flat(other))
    assert (one.bytes_held, one.peak_bytes) == (other.bytes_held, other.peak_bytes)


LAYOUTS = [
    "dp=3",
    "dp=3,micro_batches=2,bucket=50",
    "dp=3,zero=1",
    "dp=3,zero=2,micro_batches=2",
    "dp=3,zero=3,recompute=block",
    "tp=2",
    "pp=3,micro_batches=3",
    "pp=3,micro_batches=2,schedule=gpipe",
    "dp=2,tp=2,pp=2,zero=2,micro_batches=2,recompute=1",
    "tp=3,pp=2,micro_batches=3,schedule=gpipe,recompute=sqrt",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_techniques(worlds: Callable[[int], World], case: Case, layout: str) -> None:
    """Real ranks train on arrays of the stand-in, and send and hold what they do on NumPy's."""
    split = Layout.parse(layout)
    one = hybrid.collect(case, split, worlds(split.ranks).run(on_strict.train, case, split))
    other = hybrid.run(case, split, world=worlds(split.ranks))
    same_dict(flat(one), flat(other))
    assert (one.bytes_held, one.peak_bytes) == (other.bytes_held, other.peak_bytes)
    assert one.ledgers == other.ledgers
    assert (one.schedule, one.peak_live) == (other.schedule, other.peak_live)


def of_network(name: str, **options: Any) -> Case:
    """Return a case of a network of ``on_memory.py``."""
    model = on_memory.Network(name=name)
    batches = tuple(strategies.batch(model, rows, 0.8, 1, step) for step, rows in enumerate([5, 1]))
    return Case(model, optim.AdamW(0.01), batches, **options)


MEMORY_CASES = {
    "an overflow": strategies.overflowing(6, 0),
    "frozen": dataclasses.replace(CASES["float16 gpt"], frozen=("blocks.0", "embedding.position")),
    "sums in halves": dataclasses.replace(CASES["float16 gpt"], precision=Precision("float16", reduce="float16")),
    "wide gradients": dataclasses.replace(CASES["float16 gpt"], precision=Precision("float16", gradients="float32")),
    **{name: of_network(name) for name in on_memory.NETWORKS},
}


@pytest.mark.parametrize("layout", ["dp=3", "dp=3,zero=1,bucket=5", "dp=2,zero=2,micro_batches=2", "dp=3,zero=3"])
@pytest.mark.parametrize("case", MEMORY_CASES.values(), ids=MEMORY_CASES.keys())
def test_techniques_that_save_memory(worlds: Callable[[int], World], case: Case, layout: str) -> None:
    """Skipped steps, frozen and unused parameters, every choice of types, at every stage of ZeRO, recomputed by two."""
    split = Layout.parse(f"{layout},recompute=2")
    one = hybrid.collect(case, split, worlds(split.ranks).run(on_strict.train, case, split))
    other = hybrid.run(case, split, world=worlds(split.ranks))
    same_dict(flat(one), flat(other))
    assert one.ledgers == other.ledgers
    for peaks in ("bytes_held", "peak_bytes", "peak_gradients", "peak_gathered"):
        assert getattr(one, peaks) == getattr(other, peaks)


@pytest.mark.parametrize("layout", ["dp=3,zero=1", "tp=2,pp=2"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_going_on(worlds: Callable[[int], World], case: Case, layout: str) -> None:
    """A run goes on from a state on the host, on one device and on many, and leaves it as it is."""
    split = Layout.parse(layout)
    start = State.after(single.train(dataclasses.replace(case, batches=case.batches[:1])))
    one = hybrid.collect(case, split, worlds(split.ranks).run(on_strict.train, case, split, start))
    same_dict(flat(one), flat(hybrid.run(case, split, world=worlds(split.ranks), start=start)))
    same_dict(flat(single.train(case, xp=strictpy, start=start)), flat(single.train(case, start=start)))


def test_spawned_ranks() -> None:
    """Ranks that do not descend from a fork, as CUDA needs them."""
    with World(2, start_method="spawn") as world:
        for theirs, mine in world.run(on_strict.both, "float16", (3,)):
            same_dict(theirs, mine)
