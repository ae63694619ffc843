"""A value in bytes, and back: how the results of ranks travel where nothing may be pickled.

Unpickling runs whatever the sender says. Here numbers, text, arrays, lists, tuples, dicts and dataclasses
are written as JSON, with a place in one buffer for each array::

    | length of the JSON | the JSON, arrays by number | array 0 | array 1 | ...

Arrays of another library arrive as NumPy's: who reads the result need not have a device.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from refpar.arrays import to_host

ALIGNMENT = 8


def pack(value: Any) -> npt.NDArray[np.uint8]:
    """Return ``value`` as bytes, a multiple of 8.

    Raises
    ------
    TypeError
        Where it holds something else than None, bool, int, float, str, arrays, lists, tuples, dicts and dataclasses.
    """
    arrays: list[npt.NDArray[Any]] = []
    tree = _written(value, arrays)
    text = json.dumps({"tree": tree, "arrays": [[x.dtype.str, x.shape] for x in arrays]}).encode()
    blocks = [np.array([len(text)], "<i8"), np.frombuffer(text, np.uint8), *arrays]
    return np.concatenate([part for x in blocks for part in (x.reshape(-1).view(np.uint8), _filling(x.nbytes))])


def unpack(data: npt.NDArray[np.uint8]) -> Any:
    """Return the value that :func:`pack` has written. Its arrays can be written to, and share no memory with ``data``.

    Raises
    ------
    TypeError
        Where it names a dataclass of a module that this program has not loaded: none is imported for it.
    """
    length = int(data[:8].view("<i8")[0])
    head = json.loads(data[8 : 8 + length].tobytes())
    start = 8 + length + len(_filling(length))
    arrays = []
    for kind, shape in head["arrays"]:
        dtype = np.dtype(kind)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        arrays.append(data[start : start + nbytes].copy().view(dtype).reshape(shape))
        start += nbytes + len(_filling(nbytes))
    return _read(head["tree"], arrays)


def _filling(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.zeros(-nbytes % ALIGNMENT, np.uint8)


def _written(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    """Return ``value`` in JSON's types, each container as an object of one key that says what it is."""
    write = functools.partial(_written, arrays=arrays)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [write(x) for x in value]}
    if type(value) is dict:
        return {"dict": [[write(key), write(x)] for key, x in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = [[field.name, write(getattr(value, field.name))] for field in dataclasses.fields(value)]
        return {"dataclass": [kind.__module__, kind.__qualname__, fields]}
    if hasattr(value, "dtype") and value.dtype.kind in "biufc":
        arrays.append(np.asarray(to_host(value), order="C"))
        return {"scalar" if isinstance(value, np.generic) else "array": len(arrays) - 1}
    raise TypeError(f"{type(value).__name__} cannot be sent between ranks without pickling it")


def _read(tree: Any, arrays: Sequence[npt.NDArray[Any]]) -> Any:
    read = functools.partial(_read, arrays=arrays)
    if not isinstance(tree, dict):
        return tree
    [(kind, content)] = tree.items()
    if kind == "array":
        return arrays[content]
    if kind == "scalar":
        return arrays[content][()]
    if kind == "dict":
        return {read(key): read(x) for key, x in content}
    if kind == "dataclass":
        module, name, fields = content
        return _dataclass(module, name, {field: read(x) for field, x in fields})
    return tuple(map(read, content)) if kind == "tuple" else [read(x) for x in content]


def _dataclass(module: str, name: str, fields: dict[str, Any]) -> Any:
    """Return the dataclass with these fields, as pickle would: its ``__init__`` is not called again."""
    kind: Any = functools.reduce(getattr, name.split("."), sys.modules.get(module))
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise TypeError(f"{module}.{name} is no dataclass that this program has loaded")
    result = object.__new__(kind)
    for field, value in fields.items():
        object.__setattr__(result, field, value)
    return result
