"""Calls and results in bytes: how a function gets to the ranks, and how what it returns gets back.

What can be imported goes by name, as pickle does it. What cannot, because it was written in a script, a notebook or
another function, goes by value, as dill does it: that needs no importable file, and takes longer.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from refpar import arrays


def call_in_bytes(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the call in bytes.

    Functions and classes of importable modules go by name. The others, and all that belongs to the
    main module, which a rank does not have, go by value.
    """
    try:
        data = pickle.dumps((fn, args))
        if b"__main__" not in data:
            return data
    except Exception:  # pickle raises whatever it likes; dill may know how
        pass
    try:
        return _by_value((fn, args))
    except Exception as error:
        for what, value in [("fn", fn), *((f"argument {i + 1}", arg) for i, arg in enumerate(args))]:
            try:
                _by_value(value)
            except Exception:
                raise TypeError(f"{what} of World.run, {value!r:.200}, cannot be sent to the ranks: {error}") from error
        raise


def _by_value(value: Any) -> bytes:
    """Return ``value`` in bytes, functions that have no importable name with what they refer to.

    A module that such a function refers to goes by name: dill would send one that is not installed, but lies where
    it was started, with all that it holds.
    """
    import dill

    class Pickler(dill.Pickler):  # type: ignore[misc]
        def reducer_override(self, x: Any) -> Any:
            if isinstance(x, ModuleType) and x.__name__ != "__main__":
                return importlib.import_module, (x.__name__,)
            return NotImplemented

    room = io.BytesIO()
    Pickler(room, recurse=True).dump(value)
    return room.getvalue()


def from_bytes(data: bytes | memoryview) -> Any:
    """Return what either of the others has made bytes of."""
    import dill

    return dill.loads(data)


def result_in_bytes(result: Any, xp: ModuleType) -> bytes:
    """Return the result in bytes, arrays of a device as NumPy's: by dill where pickle cannot."""
    try:
        if xp is np:
            return pickle.dumps(result)
        data = io.BytesIO()
        _Homeward(data, xp.ndarray).dump(result)
        return data.getvalue()
    except Exception:
        try:
            return _by_value(result)
        except Exception as error:
            raise TypeError(f"the result, {type(result).__name__}, cannot be sent to the caller: {error}") from error


class _Homeward(pickle.Pickler):
    """Pickles device arrays as host arrays: the caller has no device, and shall not import the library."""

    def __init__(self, file: Any, kind: type) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._kind = kind

    def reducer_override(self, x: Any) -> Any:
        return arrays.to_host(x).__reduce_ex__(pickle.HIGHEST_PROTOCOL) if isinstance(x, self._kind) else NotImplemented
