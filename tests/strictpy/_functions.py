"""The functions of the module: NumPy's, behind CuPy's names and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from strictpy._array import (
    HALF,
    SCALARS,
    call,
    device,
    device_only,
    elementwise,
    garbage,
    host_index,
    ndarray,
    operand,
    refuse_repeated,
    synchronise,
    unwrap,
    wrap,
)
from strictpy._surface import bind, entry

ARRAYS = {
    *("a", "a1", "a2", "ar", "ar1", "ar2", "arr", "arr1", "arr2", "array", "ary", "A", "b", "condition", "dst"),
    *("element", "f", "filt", "indices", "m", "p", "prototype", "sample", "test_elements", "v", "x", "xp", "fp", "y"),
}
"""Parameters that are arrays: a list, a NumPy array or, in most functions, a scalar is refused."""

ALSO_SCALARS = {"allclose", "array_equal", "clip", "isclose", "where", "full_like", "tile", "meshgrid", "pad"}
OPERANDS = {
    *("a_max", "a_min", "append", "args", "arrays", "arrays_and_dtypes", "arys", "bins", "choicelist", "choices"),
    *("condlist", "default", "fill_value", "ind", "keys", "mask", "operands", "out", "prepend", "q", "repeats"),
    *("sorter", "src", "start", "stop", "tup", "to_begin", "to_end", "val", "vals", "values", "weights", "where", "xi"),
}
"""Parameters that may be arrays, or hold arrays. No other takes one: a shape is no 0-d array."""

ON_DEVICE = {"array_equal", "array_equiv", "allclose", "count_nonzero"}
"""Functions that return a Python number in NumPy and a 0-d array in CuPy."""

WAITING = {"argwhere", "array_equal", "extract", "flatnonzero", "nonzero", "unique", "bincount", "compress"}
HOST = {
    *("broadcast_shapes", "can_cast", "common_type", "isdtype", "isscalar", "issubdtype", "iterable", "mintypecode"),
    *("min_scalar_type", "promote_types", "result_type", "shape", "ndim", "size", "iscomplexobj", "isrealobj"),
}
"""Functions about types and shapes, that return no arrays."""

PRODUCTS = {"dot", "inner", "vdot", "tensordot", "einsum", "outer", "kron"}


def find(name: str, kind: str) -> Any:
    """Return what CuPy has under ``name``, as the stand-in has it."""
    if name in _OWN:
        return _OWN[name]
    if name == "random":
        raise AttributeError("cupy.random is there, but its streams are not stable: draw on the host")
    if name == "linalg":
        return _Linalg()
    if kind.startswith("ufunc"):
        return ufunc(name, kind)
    if kind.startswith("(") and hasattr(np, name):
        return _function(name, getattr(np, name))
    raise NotImplementedError(f"cupy has {name} ({kind}); the stand-in does not model it yet")


def _function(name: str, theirs: Callable[..., Any], namespace: str = "cupy") -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        bound = bind(namespace, name, args, kwargs)
        arrays = [value for value in bound.values() if isinstance(value, ndarray)]
        _refuse(name, bound, arrays, namespace)
        positional, plain = _arguments(name, theirs, bound)
        if name in WAITING:
            synchronise()
        halves = name in PRODUCTS and HALF in [x.dtype for x in _leaves(positional)]
        if halves:
            positional = [x.astype(np.float32) if x.dtype == HALF else x for x in positional]
        first = arrays[0] if arrays else np.empty(0)
        result = call(theirs, name, first, tuple(positional), plain)
        if halves and result.dtype == np.float32 and plain.get("dtype") is None:
            result = result.astype(HALF)
        if bound.get("out") is not None:
            return bound["out"]
        return wrap(np.asarray(result) if name in ON_DEVICE else result, *arrays, *_leaves(bound.get("tup", ())))

    function.__name__ = name
    return function


def _refuse(name: str, bound: dict[str, Any], arrays: list[ndarray], namespace: str) -> None:
    for parameter, value in bound.items():
        lenient = name in ALSO_SCALARS or parameter not in ("a", "x", "arr", "ary", "array", "condition")
        if name in HOST or value is None:
            continue
        if parameter in ARRAYS and not (lenient and isinstance(value, SCALARS)):
            device_only(f"cupy.{name}, {parameter}", value)
        elif parameter not in OPERANDS | ARRAYS and isinstance(value, ndarray):
            raise TypeError(f"cupy.{name}: {parameter} must not be a device array")
        else:
            unwrap(f"cupy.{name}", value)
    if any(x.dtype == HALF for x in arrays):
        if namespace == "cupy.linalg":
            raise TypeError(f"cupy.linalg.{name} of halves: widen them first")
        if name in ("cumsum", "cumprod") and bound.get("dtype") is None:
            raise TypeError(f"{name} of halves: in which type CuPy accumulates is not said; name dtype=float32")
    if name == "bincount" and bound.get("weights") is not None:
        raise TypeError("bincount with weights: atomic additions, in no fixed order")


def _arguments(name: str, theirs: Callable[..., Any], bound: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments as NumPy takes them: by name, but for the first and those that it names otherwise."""
    try:
        parameters = inspect.signature(theirs).parameters.values()
        known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    except ValueError:
        known = set()
    if name in ("sort", "argsort"):
        bound = {**bound, "kind": "stable"}
    positional: list[Any] = []
    plain: dict[str, Any] = {}
    for parameter, value in bound.items():
        if parameter in ("args", "arys", "operands", "xi", "arrays_and_dtypes", "arrays", "varargs"):
            positional.extend(unwrap(name, part) for part in value)
        elif parameter in ("kwargs", "kwds"):
            plain.update({key: unwrap(name, part) for key, part in value.items()})
        elif plain and parameter not in known and parameter not in ("dtype", "optimize"):
            raise NotImplementedError(f"the stand-in cannot pass {parameter} on to numpy.{name}")
        elif (parameter in known and positional) or parameter in ("dtype", "optimize"):
            plain[parameter] = unwrap(name, value)
        else:
            positional.append(unwrap(name, value))
    return positional, plain


def _leaves(values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return [leaf for value in values for leaf in _leaves(value)]
    return [values] if hasattr(values, "dtype") else []


class ufunc:
    """An elementwise function and those of NumPy's five methods that CuPy has for it."""

    __module__ = "strictpy"

    def __init__(self, name: str, kind: str) -> None:
        _, nin, nout, *self._methods = kind.split()
        self.__name__ = self.name = name
        self.nin, self.nout = int(nin), int(nout)
        self._ufunc = getattr(np, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bind("cupy.ufunc", "__call__", args, kwargs)
        inputs, given = args[: self.nin], args[self.nin :] or kwargs.pop("out", None)
        outputs = given if isinstance(given, tuple) or given is None else (given,)
        if outputs is not None and any(out is not None for out in outputs):
            kwargs["out"] = tuple(None if out is None else device_only(self.name, out) for out in outputs)
        result = elementwise(self._ufunc, *inputs, **kwargs)
        if outputs is None:
            return result
        return outputs[0] if self.nout == 1 else outputs

    def __getattr__(self, method: str) -> Any:
        entry("cupy.ufunc", method)
        if method not in self._methods:
            raise NotImplementedError(f"cupy.{self.name}.{method} is not supported")
        return getattr(self, f"_{method}")

    def _reduce(self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return {"add": array.sum, "multiply": array.prod}[self.name](axis, dtype, out, keepdims)

    def _accumulate(self, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        return {"add": array.cumsum, "multiply": array.cumprod}[self.name](axis, dtype, out)

    def _reduceat(self, array: Any, indices: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        if array.dtype.kind == "f":
            raise TypeError("cupy.add.reduceat of floats: differences of one cumulative sum, not sums of segments")
        host = device_only("add.reduceat", indices)
        return wrap(np.add.reduceat(array._host, host, axis, dtype))

    def _at(self, a: Any, indices: Any, b: Any = None) -> None:
        host = host_index(indices, a.shape)
        if a.dtype.kind == "f" and self.name in ("add", "subtract"):
            refuse_repeated(host, a.shape, "atomic additions")
        self._ufunc.at(device_only(self.name, a), host, operand(self.name, b))

    def _outer(self, A: Any, B: Any, **kwargs: Any) -> Any:
        return self(A.reshape(A.shape + (1,) * B.ndim), B, **kwargs)


def array(obj: Any, dtype: Any = None, copy: bool = True, order: Any = "K", subok: bool = False,
          ndmin: int = 0, *, blocking: bool = False) -> ndarray:  # fmt: skip
    """The way in: NumPy arrays, numbers, lists of them; lists of device arrays are stacked."""
    if isinstance(obj, ndarray):
        made = obj.astype(dtype or obj.dtype, copy=bool(copy))
    elif isinstance(obj, list | tuple) and any(isinstance(part, ndarray) for part in obj):
        made = device([device_only("array", part) for part in obj], dtype)
    else:
        made = device(obj, dtype)
    return made.reshape((1,) * (ndmin - made.ndim) + made.shape) if made.ndim < ndmin else made


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    """As ``array``, and a device array of that type is returned itself."""
    return array(a, dtype, bool(copy), order)


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    """The way out."""
    return a.get(order=order, out=out) if isinstance(a, ndarray) else np.asarray(a, order=order)


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """NaN, where an element is read before it is written."""
    return ndarray(unwrap("empty", shape), dtype, order=order)


def empty_like(prototype: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    like = np.empty_like(device_only("empty_like", prototype), dtype, order, shape=shape)
    return device(garbage(like), copy=False)


def matmul(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
    """Halves are multiplied exactly, summed in float32 and rounded once; ``dtype`` does not change that."""
    bound = bind("cupy", "matmul", (a, b, *args), kwargs)
    left, right = device_only("matmul", a), device_only("matmul", b)
    given = np.result_type(left, right)
    if np.dtype(bound.get("dtype") or given) != given:
        raise TypeError(f"cupy.matmul(dtype={bound['dtype']}) of {given} rounds to {given} first: widen the operands")
    inner = np.float32 if given == HALF else given
    with np.errstate(all="ignore"):
        result = np.matmul(left.astype(inner, copy=False), right.astype(inner, copy=False)).astype(given, copy=False)
    out = bound.get("out")
    if out is None:
        return wrap(result)
    out[...] = wrap(result)
    return out


def get_array_module(*args: Any) -> Any:
    import strictpy

    return strictpy if any(isinstance(x, ndarray) for x in args) else np


class _Linalg:
    """``cupy.linalg``."""

    def __getattr__(self, name: str) -> Any:
        entry("cupy.linalg", name)
        return matmul if name == "matmul" else _function(name, getattr(np.linalg, name), "cupy.linalg")


_OWN: dict[str, Any] = {
    "ufunc": ufunc,
    **{f.__name__: f for f in (array, asarray, asnumpy, empty, empty_like, matmul, get_array_module)},
    "asanyarray": asarray,
}
