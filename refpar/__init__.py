"""The reference implementation of distributed training, in NumPy, on real processes that stand in for GPUs.

Read :mod:`refpar.single` first: it trains on one device, and everything else is held to it. Then
:mod:`refpar.comm.ring`, and one file of :mod:`refpar.parallel` a technique.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refpar.case import Batch, Case, Layout, State, Trace
    from refpar.comm import CollectiveMismatch, CommTimeout, RankError
    from refpar.comm.processes import World
    from refpar.oracle.compare import Comparison, compare
    from refpar.parallel.hybrid import run as train
    from refpar.state import StateError, load, save

__version__ = "0.1.0"

# Names are imported when first used: `import refpar` alone costs next to nothing.
_HOMES = {
    "Batch": "case", "Case": "case", "Layout": "case", "State": "case", "Trace": "case",
    "StateError": "state", "load": "state", "save": "state",
    "RankError": "comm", "CollectiveMismatch": "comm", "CommTimeout": "comm", "World": "comm.processes",
    "Comparison": "oracle.compare", "compare": "oracle.compare", "train": "parallel.hybrid:run",
}  # fmt: skip
__all__ = ["Batch", "Case", "CollectiveMismatch", "CommTimeout", "Comparison", "Layout", "RankError", "State",
           "StateError", "Trace", "World", "compare", "load", "save", "train"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(importlib.import_module(f"refpar.{module}"), attribute or name)
    try:
        return importlib.import_module(f"refpar.{name}")  # refpar.single.train without importing it first
    except ModuleNotFoundError:
        raise AttributeError(f"module 'refpar' has no attribute {name!r}") from None
