"""The reference implementation of distributed training, in NumPy, on real processes that stand in for GPUs.

Read :mod:`refpar.single` first: it trains on one device, and everything else is held to it. Then
:mod:`refpar.comm.ring`, and one file of :mod:`refpar.parallel` a technique.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refpar.case import Batch, Case, Layout, State, Trace, text_batches
    from refpar.comm import CollectiveMismatch, CommTimeout, RankError
    from refpar.comm.processes import World
    from refpar.nn.models import GPT, MLP
    from refpar.optim import SGD, Adam, AdamW
    from refpar.oracle.compare import Comparison, compare
    from refpar.parallel.hybrid import run as train
    from refpar.precision import LossScale, Precision
    from refpar.state import StateError, load, save

__version__ = "0.1.0"

# Names are imported when first used: `import refpar` alone costs next to nothing.
_HOMES = {
    **dict.fromkeys(("Batch", "Case", "Layout", "State", "Trace", "text_batches"), "case"),
    **dict.fromkeys(("CollectiveMismatch", "CommTimeout", "RankError"), "comm"),
    "World": "comm.processes",
    **dict.fromkeys(("GPT", "MLP"), "nn.models"),
    **dict.fromkeys(("SGD", "Adam", "AdamW"), "optim"),
    **dict.fromkeys(("Comparison", "compare"), "oracle.compare"),
    "train": "parallel.hybrid:run",
    **dict.fromkeys(("LossScale", "Precision"), "precision"),
    **dict.fromkeys(("StateError", "load", "save"), "state"),
}
__all__ = [
    "GPT",
    "MLP",
    "SGD",
    "Adam",
    "AdamW",
    "Batch",
    "Case",
    "CollectiveMismatch",
    "CommTimeout",
    "Comparison",
    "Layout",
    "LossScale",
    "Precision",
    "RankError",
    "State",
    "StateError",
    "Trace",
    "World",
    "compare",
    "load",
    "save",
    "text_batches",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(importlib.import_module(f"refpar.{module}"), attribute or name)
    try:
        return importlib.import_module(f"refpar.{name}")  # refpar.single.train without importing it first
    except ModuleNotFoundError as error:
        if error.name != f"refpar.{name}":  # something that the module needs is missing
            raise
        raise AttributeError(f"module 'refpar' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
