"""The array: a private NumPy array behind the methods and operators of ``cupy.ndarray``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from strictpy._surface import CUPY, bind, entry, signature

HALF = np.dtype(np.float16)
SCALARS = (bool, int, float, complex, np.generic)
ACCUMULATING = {"mean", "nanmean", "nanprod", "nanstd", "nansum", "nanvar", "prod", "std", "sum", "trace", "var"}
"""Reductions that keep halves in float32 until the end."""

BY_POSITION = {"argpartition", "compress", "partition", "put", "repeat", "searchsorted", "swapaxes"}
OTHERS = {"b", "choices", "condition", "indices", "v"}
"""Parameters of methods that are arrays themselves."""

OPERATORS = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "mod": np.remainder},
    **{"floordiv": np.floor_divide, "divmod": np.divmod, "pow": np.power, "and": np.bitwise_and},
    **{"or": np.bitwise_or, "xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal},
}


@dataclass
class Count:
    """How often the host has waited for the device."""

    total: int = 0


_counts: list[Count] = []


@contextmanager
def synchronisations() -> Iterator[Count]:
    """Count the places at which the host waits for the device."""
    _counts.append(Count())
    try:
        yield _counts[-1]
    finally:
        _counts.pop()


def synchronise() -> None:
    for count in _counts:
        count.total += 1


class ndarray:
    """See the package's docstring; ``base`` is the array that owns the memory, None for an owner."""

    __slots__ = ("__weakref__", "_host", "base")
    __module__ = "strictpy"
    __array_priority__ = 100
    __hash__ = None

    _host: Any
    base: ndarray | None

    def __init__(self, shape: Any, dtype: Any = float, memptr: None = None, strides: None = None, order: str = "C"):
        if memptr is not None or strides is not None:
            raise NotImplementedError("strictpy.ndarray: memptr and strides are not modelled")
        self._host, self.base = garbage(np.empty(shape, dtype, order)), None

    def __reduce__(self) -> Any:
        return device, (self._host,)

    # The ways out. Each waits for the device.

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        synchronise()
        if out is None:
            return self._host.copy(order=order)
        if out.dtype != self.dtype or out.shape != self.shape:
            raise TypeError(f"get: out is {out.dtype} {out.shape}, the array {self.dtype} {self.shape}")
        np.copyto(out, self._host)
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError(f"set: needs a NumPy array of {self.dtype} {self.shape}")
        if not (self._host.flags.c_contiguous or self._host.flags.f_contiguous):
            raise RuntimeError("set: the array is not contiguous")
        np.copyto(self._host, arr)

    def item(self) -> Any:
        synchronise()
        return self._host.item()

    def tolist(self) -> Any:
        synchronise()
        return self._host.tolist()

    def tobytes(self, order: str = "C") -> bytes:
        synchronise()
        return self._host.tobytes(order)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError("the truth value of an array that has not one element is ambiguous")
        return bool(self.item())

    def __repr__(self) -> str:
        return f"strictpy.{self._host!r}"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        synchronise()
        return format(self._host[()], spec)

    # What NumPy tries when it is handed such an array.

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed: use .get()")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"numpy.{func.__name__} of a device array: take the function from array_module(x)")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs and ufunc in OPERATORS.values() and isinstance(inputs[0], np.generic):
            return elementwise(ufunc, *inputs)  # np.float32(2) * x
        for x in inputs:
            operand(ufunc.__name__, x)
        raise TypeError(f"numpy.{ufunc.__name__} of a device array: take the function from array_module(x)")

    # Shape and memory.

    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: Flags(self))
    device = property(lambda self: 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._host.shape

    @shape.setter
    def shape(self, shape: Any) -> None:
        fresh = self._host.view()
        fresh.shape = shape
        self._host = fresh

    @property
    def T(self) -> ndarray:
        return view(self._host.T, self)

    @property
    def mT(self) -> ndarray:
        return view(self._host.mT, self)

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        return view(self._host.view(dtype or self.dtype), self)

    def astype(
        self, dtype: Any, order: str = "K", casting: None = None, subok: None = None, copy: bool = True
    ) -> ndarray:
        if casting is not None or subok is not None:
            raise TypeError("cupy.ndarray.astype: casting and subok are not supported")
        with np.errstate(all="ignore"):
            result = self._host.astype(dtype, order=order, copy=copy)
        return self if result is self._host else device(result, copy=False)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __copy__(self) -> ndarray:
        return device(self._host)

    def __deepcopy__(self, memo: Any) -> ndarray:
        return device(self._host)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Say where the array is: at an address that tells arrays apart, and that no host can follow."""
        address = self._host.__array_interface__["data"][0] + (1 << 62) if self.size else 0
        strides = None if self._host.flags.c_contiguous else self.strides
        kind = {"shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr}
        return {**kind, "version": 3, "strides": strides, "data": (address, False), "stream": 1}

    # Indexing.

    def __getitem__(self, index: Any) -> ndarray:
        host = host_index(index, self.shape)
        basic = not any(isinstance(part, np.ndarray) for part in host)
        return view(self._host[(*host, ...)] if basic and ... not in host else self._host[host], self)

    def __setitem__(self, index: Any, value: Any) -> None:
        host = host_index(index, self.shape)
        if isinstance(value, ndarray) and value.size != 1:
            refuse_repeated(host, self.shape, "an assignment of an array")
            refuse_overlap(self._host[host], value._host)
        with np.errstate(all="ignore"):
            self._host[host] = operand("__setitem__", value)

    def fill(self, value: Any) -> None:
        self[...] = value

    def take(self, indices: Any, axis: int | None = None, out: Any = None) -> ndarray:
        if not isinstance(indices, int | np.integer):
            indices = device_only("take", indices)
        return wrap(self._host.take(indices, axis, None if out is None else out._host), self)

    def nonzero(self) -> Any:
        synchronise()
        return wrap(self._host.nonzero(), self)

    # The rest is NumPy's, under CuPy's names and parameters.

    def __getattr__(self, name: str) -> Any:
        kind = entry("cupy.ndarray", name)  # AttributeError: neither has CuPy
        raise NotImplementedError(f"cupy.ndarray has {name} {kind}; the stand-in does not model it yet")


class Flags:
    """Memory layout, without the ``writeable`` that only NumPy has."""

    def __init__(self, x: ndarray) -> None:
        self._x = x

    def __getattr__(self, name: str) -> bool:
        entry("cupy.ndarray.flags", name)
        return self._x.base is None if name == "owndata" else bool(getattr(self._x._host.flags, name))

    def __getitem__(self, name: str) -> bool:
        return bool(getattr(self, name.lower()))


def device(host: Any, dtype: Any = None, *, copy: bool = True) -> ndarray:
    """Return an array that owns a copy of ``host``, or ``host`` itself where nobody else holds it."""
    x = ndarray.__new__(ndarray)
    x._host, x.base = np.array(host, dtype=dtype, copy=copy or None), None
    if x.dtype.char not in "?bhilqBHILQefdFD":
        raise ValueError(f"Unsupported dtype {x.dtype}")
    return x


def view(host: Any, *owners: ndarray) -> ndarray:
    """Return ``host`` as an array; a view, if it shows the memory of one of ``owners``."""
    x = device(host, copy=False)
    root = _root(x._host)
    owner = next((owner for owner in owners if _root(owner._host) is root), None)
    x.base = owner if owner is None or owner.base is None else owner.base
    return x


def _root(host: Any) -> Any:
    while isinstance(host.base, np.ndarray):
        host = host.base
    return host


def wrap(result: Any, *owners: ndarray) -> Any:
    """Return what a NumPy function returned as CuPy would: arrays, 0-d ones too, on the device."""
    if isinstance(result, np.ndarray | np.generic):
        return view(result, *owners)
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(wrap(part, *owners) for part in result))
    if isinstance(result, list | tuple):
        return type(result)(wrap(part, *owners) for part in result)
    return result


def garbage(host: Any) -> Any:
    """Fill memory that nobody has written yet with what shows: NaN, or the smallest integer."""
    host.fill(np.nan if host.dtype.kind in "fc" else np.iinfo(host.dtype).min if host.dtype.kind in "iu" else True)
    return host


def operand(where: str, x: Any) -> Any:
    """Return the host value of an array or a scalar; TypeError for anything else, as CuPy."""
    if isinstance(x, ndarray):
        return x._host
    if not isinstance(x, SCALARS):
        raise TypeError(f"{where}: Unsupported type {type(x)}: operands are device arrays or scalars")
    return x


def device_only(where: str, x: Any) -> Any:
    """Return the host value of an array; TypeError for a scalar, too."""
    if not isinstance(x, ndarray):
        raise TypeError(f"{where}: a device array is needed, not {type(x)}")
    return x._host


def elementwise(ufunc: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Call a NumPy ufunc; nothing warns on a device."""
    with np.errstate(all="ignore"):
        return wrap(ufunc(*(operand(ufunc.__name__, x) for x in inputs), **kwargs))


def host_index(index: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return ``index`` for NumPy; raise where CuPy would wrap around, copy from the host, or stop."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, np.ndarray | list | tuple):
            raise TypeError(f"an index of {type(part)} is copied to the device each time: make it a device array")
        if isinstance(part, bool | np.bool_ | float | np.floating | str):
            raise IndexError(f"an index of {type(part)}")
        if isinstance(part, ndarray) and part.dtype.kind == "b":
            synchronise()
    return tuple(part._host if isinstance(part, ndarray) else part for part in parts)


def refuse_repeated(host: tuple[Any, ...], shape: tuple[int, ...], what: str) -> None:
    """Raise where index arrays name an element more than once: in which order is not defined."""
    if any(isinstance(part, np.ndarray) and part.dtype.kind in "iu" for part in host):
        touched = np.arange(int(np.prod(shape))).reshape(shape)[host].ravel()
        if len(np.unique(touched)) < touched.size:
            raise IndexError(f"the index names an element twice: the result of {what} is undefined")


def refuse_overlap(room: Any, value: Any) -> None:
    """Raise where CuPy would copy bytes onto themselves, shifted: a slice to its neighbour, say."""
    plain = room.flags.c_contiguous and (room.dtype, room.shape, room.strides) == (
        value.dtype,
        value.shape,
        value.strides,
    )
    if plain and np.may_share_memory(room, value) and room.ctypes.data != value.ctypes.data:
        raise ValueError("the array assigned overlaps its place: what is copied is undefined")


def call(function: Callable[..., Any], name: str, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a NumPy reduction; where it sums halves, sum them in float32 and round once."""
    with np.errstate(all="ignore"):
        if name in ACCUMULATING and x.dtype == HALF and np.dtype(kwargs.get("dtype") or HALF) == HALF:
            out = kwargs.pop("out", None)
            result = np.asarray(function(*args, **{**kwargs, "dtype": np.float32})).astype(HALF)
            if out is None:
                return result
            out[...] = result
            return out
        return function(*args, **kwargs)


def _method(name: str) -> Callable[..., Any]:
    def method(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        bound = bind("cupy.ndarray", name, args, kwargs)
        if name in ("cumsum", "cumprod") and self.dtype == HALF and bound.get("dtype") is None:
            raise TypeError(f"{name} of halves: in which type CuPy accumulates is not said; name dtype=float32")
        if name in ("sort", "argsort"):
            bound["kind"] = "stable"
        out = bound.get("out")
        positional = [unwrap(name, part) for part in bound.pop("shape", bound.pop("axes", ()))]
        plain = {key: (device_only if key in OTHERS else unwrap)(name, value) for key, value in bound.items()}
        if name in BY_POSITION:
            positional, plain = [*plain.values()], {}
        result = call(getattr(self._host, name), name, self, tuple(positional), plain)
        return out if out is not None else wrap(result, self)

    method.__name__ = name
    return method


def unwrap(where: str, value: Any) -> Any:
    """Return the host value of an argument that is not an operand: axis, dtype, out, ..."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError(f"{where}: a NumPy array where a device array belongs")
    if isinstance(value, list | tuple):
        return type(value)(unwrap(where, part) for part in value)
    return value


def _binary(ufunc: Any, *, reverse: bool = False, inplace: bool = False) -> Callable[..., Any]:
    def method(self: ndarray, other: Any) -> Any:
        if inplace:
            elementwise(ufunc, self, other, out=self._host)
            return self
        return elementwise(ufunc, other, self) if reverse else elementwise(ufunc, self, other)

    return method


def _product(name: str) -> Callable[..., Any]:
    def method(self: Any, other: Any, **kwargs: Any) -> Any:
        import strictpy

        return getattr(strictpy, name)(self, other, **kwargs)

    return method


def _furnish() -> None:
    """Give the class the operators and methods of ``cupy.ndarray``, and no others."""
    methods = {f"__{name}__": _binary(ufunc) for name, ufunc in OPERATORS.items()}
    methods |= {f"__r{name}__": _binary(ufunc, reverse=True) for name, ufunc in OPERATORS.items()}
    methods |= {f"__i{name}__": _binary(ufunc, inplace=True) for name, ufunc in OPERATORS.items()}
    methods |= {"__matmul__": _product("matmul"), "__rmatmul__": lambda self, other: _product("matmul")(other, self)}
    methods |= {f"__{n}__": _unary(getattr(operator, n)) for n in ("neg", "pos", "abs", "invert")}
    methods["dot"] = _product("dot")
    compared = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}  # every Python object has those
    for name, method in methods.items():
        if name in compared | set(CUPY["cupy.ndarray"]):
            setattr(ndarray, name, method)
    for name, kind in CUPY["cupy.ndarray"].items():
        if kind.startswith("(") and name not in vars(ndarray) and hasattr(np.ndarray, name) and name[0] != "_":
            signature("cupy.ndarray", name)
            setattr(ndarray, name, _method(name))


def _unary(function: Callable[[Any], Any]) -> Callable[[ndarray], Any]:
    return lambda self: wrap(function(self._host))


_furnish()
