"""What the real cupy package has: its names, and the parameters that each of them accepts.

``cupy_surface.json`` is that list, one name a line, taken from the package itself::

    python tests/cupy_surface.py            # rewrites the file; cupy must be importable, a GPU is not needed

``strictpy`` knows the names in it and no others. ``test_strict.py`` compares the file with the
package where cupy is installed, so a new release shows as a failing test and a readable diff.

What an entry says::

    numpy                  the very object that NumPy has under that name (float32, pi, newaxis, ...)
    constant               a number
    module, attribute      what it says
    class ...              a class, with the parameters of its constructor where it tells them
    ufunc NIN NOUT ...     an elementwise function, and those of its methods that do not raise NotImplementedError
    (a, axis=None, ...)    a function or method and its parameters; a default that is no literal reads "..."
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("cupy_surface.json")

Surface = dict[str, dict[str, str]]


def committed() -> Surface:
    """Return the committed surface, by namespace: ``cupy``, ``cupy.linalg``, ``cupy.ndarray``, ..."""
    surface: Surface = json.loads(FILE.read_text())
    return surface


def installed() -> Surface:
    """Return the surface of the cupy package that is installed."""
    import cupy
    import numpy

    cuda = cupy.cuda
    return {
        "versions": {"cupy": cupy.__version__},
        "cupy": _namespace(cupy, numpy),
        "cupy.linalg": _namespace(cupy.linalg, numpy.linalg),
        "cupy.ndarray": _members(cupy.ndarray),
        "cupy.ndarray.flags": _members(type(cupy.ndarray.flags.__get__(shell(cupy)))),
        "cupy.ufunc": _members(cupy.ufunc) | {"__call__": _ufunc_parameters(cupy.add)},
        "cupy.cuda": _namespace(cuda, None),
        **{f"cupy.cuda.{name}": _members(getattr(cuda, name)) for name in ("Device", "Event", "Stream")},
        "cupy.cuda.runtime": {name: e for name, e in _members(cuda.runtime).items() if e != "attribute"},
    }


def _namespace(module: Any, numpy: Any) -> dict[str, str]:
    names = sorted(name for name in dir(module) if not name.startswith("_"))
    return {name: _entry(name, getattr(module, name), getattr(numpy, name, None)) for name in names}


def _entry(name: str, thing: Any, theirs: Any) -> str:
    if thing is theirs:
        return "numpy"
    if inspect.ismodule(thing) or type(thing).__name__ == "_LazyModule":
        return "module"
    if type(thing).__name__ == "ufunc":
        return " ".join(["ufunc", str(thing.nin), str(thing.nout), *_ufunc_methods(thing)])
    if isinstance(thing, type):
        return f"class {_parameters(thing)}".rstrip()
    if callable(thing):
        return _parameters(thing) or "(*args, **kwargs)"
    return "constant" if isinstance(thing, int | float) else "attribute"


def _members(thing: Any) -> dict[str, str]:
    """Return the members of a class (or of a module in C), less what every Python object has."""
    names = sorted(set(dir(thing)) - set(dir(object)) - _MACHINERY)
    public = [name for name in names if not name.startswith("_") or name.endswith("__")]
    return {name: _member(name, inspect.getattr_static(thing, name)) for name in public}


_MACHINERY = {"__del__", "__dict__", "__module__", "__pyx_vtable__", "__setstate__", "__slots__", "__weakref__"}


def _member(name: str, member: Any) -> str:
    member = getattr(member, "__func__", member)
    if not callable(member):
        return "attribute"
    return "(*args)" if name.startswith("__") else _parameters(member) or "(*args, **kwargs)"


def _parameters(function: Any) -> str:
    """Return ``(a, axis=None)``, from the signature or, for what is written in Cython, from the docstring."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        head = re.match(r"[\w.]+(\(.*\))( ->.*)?$", (function.__doc__ or "").partition("\n")[0])
        return _without_types(head[1]) if head else ""
    parameters = [p.replace(annotation=p.empty, default=_literal(p.default)) for p in signature.parameters.values()]
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty)).replace("Ellipsis", "...")
    return _with_popped_keywords(function, text)


def _literal(default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return default
    try:
        ast.literal_eval(repr(default))
    except (ValueError, SyntaxError):
        return ...
    return default


def _without_types(text: str) -> str:
    """Turn Cython's ``(self, Py_ssize_t axis1, bool copy=True)`` into ``(axis1, copy=True)``."""
    parts = [part.strip() for part in text[1:-1].split(",") if part.strip() and part.strip() != "self"]
    parts = [re.sub(r"^[\w.]+ +(?=\w)", "", part) for part in parts]
    return f"({', '.join(parts)})"


def _with_popped_keywords(function: Any, text: str) -> str:
    """Spell out ``**kwargs`` where the source takes keywords out of it by name and refuses the rest."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return text
    keywords = re.findall(r"^ +\w+ = (?:\w+\()?kwargs\.pop\('(\w+)'", source, re.MULTILINE)
    if "**kwargs" not in text or not keywords or "raise TypeError" not in source:
        return text
    return text.replace("**kwargs", ", ".join(f"{keyword}=..." for keyword in keywords))


class _Probe:
    """Stands for an array: every method can be called and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _ufunc_methods(ufunc: Any) -> list[str]:
    """Return the methods that work: each is called on a probe, and says so itself where it is not supported."""
    calls = {"accumulate": (_Probe(),), "at": (_Probe(), 0, 0), "reduce": (_Probe(),), "reduceat": (_Probe(), 0)}
    found = []
    for method, arguments in calls.items():
        try:
            getattr(ufunc, method)(*arguments)
        except NotImplementedError:
            continue
        found.append(method)
    return [*found, "outer"] if ufunc.nin == 2 and ufunc.nout == 1 else found


def _ufunc_parameters(ufunc: Any) -> str:
    """Return the keywords of a ufunc's call: unknown ones are refused before a device is looked for."""
    known = []
    for keyword in ("axes", "axis", "casting", "dtype", "keepdims", "order", "out", "signature", "subok", "where"):
        try:
            ufunc(1, 2, **{keyword: None})
        except TypeError as error:
            if "Wrong arguments" in str(error):
                continue
        except Exception:  # no GPU: the keyword was accepted
            pass
        known.append(keyword)
    return f"(*args, {', '.join(f'{keyword}=...' for keyword in known)})"


def shell(cupy: Any) -> Any:
    """Return an array without memory, which needs no device."""
    return cupy.ndarray.__new__(cupy.ndarray, _no_init=True)


if __name__ == "__main__":
    FILE.write_text(json.dumps(installed(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {FILE}")
