"""One problem small enough to do by hand, that every narration of ``refpar show`` works on.

Two layers, eleven parameters, five rows of small integers::

    h = relu(x W0 + b0)        x (row, 3)   W0 (3, 2)   b0 (2,)
    y = h W1 + b1              h (row, 2)   W1 (2, 1)   b1 (1,)

Everything is a small integer until the sum of the gradients is divided by the four rows that count, and then a
quarter of one: no sum is rounded, in whatever order it is added up, so every layout gives the very bits of one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from refpar.case import Batch, Case, HostArray
from refpar.nn.models import MLP, initial_value
from refpar.optim import SGD
from refpar.precision import Precision

SHORT = {"layers.0.weight": "W0", "layers.0.bias": "b0", "layers.1.weight": "W1", "layers.1.bias": "b1"}
ROWS = (
    # x, target, whether it counts
    ((1, 0, 2), -6, True),
    ((0, 1, 1), -1, True),
    ((2, 1, 0), -3, True),
    ((1, 1, 1), 0, False),
    ((0, 2, 1), -1, True),
)
SEED = 2868
"""It draws weights of which none is zero that matters: every element has a gradient, one ReLU is off."""


def case() -> Case:
    """Return the problem: one step of SGD with momentum, learning rate 1, divided by the count at the end."""
    inputs, targets, mask = zip(*ROWS, strict=True)
    batch = Batch(np.array(inputs, np.float64), np.array(targets, np.float64)[:, None], np.array(mask))
    model = MLP((3, 2, 1), init="integers")
    return Case(model, SGD(lr=1.0, momentum=0.5), (batch,), precision=Precision("float32"), divide="after", seed=SEED)


def weights() -> dict[str, HostArray]:
    """Return the initial values, by name."""
    problem = case()
    specs = problem.model.build().specs
    return {name: initial_value(problem.seed, name, spec, np.float32) for name, spec in specs.items()}


def problem() -> list[str]:
    """Return the problem in words and numbers, the forward pass of each row included."""
    w0, b0, w1, b1 = weights().values()
    x, target, counts = (np.array(column) for column in zip(*ROWS, strict=True))
    h = np.maximum(x @ w0 + b0, 0)
    y = (h @ w1 + b1)[:, 0]
    rows = [
        [row, numbers(x[row]), numbers(h[row]), numbers(y[row]), target[row], numbers(y[row] - target[row]), word]
        for row, word in enumerate(("" if c else "masked out") for c in counts)
    ]
    return [
        "The problem: h = relu(x W0 + b0), y = h W1 + b1, squared error, one step of SGD with learning rate 1.",
        "",
        *table([["row", "x", "h", "y", "target", "y - target", ""], *rows]),
        "",
        f"  W0 = {matrix(w0)}   b0 = {numbers(b0)}   W1 = {matrix(w1)}   b1 = {numbers(b1)}     (/ between rows)",
    ]


def numbers(values: Any) -> str:
    """Return numbers one after another, as short as they can be written."""
    return " ".join(f"{value:.10g}" for value in np.asarray(values, np.float64).reshape(-1).tolist())


def matrix(values: HostArray) -> str:
    """Return the rows of a matrix, or of anything with a first axis, one after another."""
    if values.ndim < 2:
        return numbers(values)
    return " / ".join(numbers(row) for row in values) if values.size else "-"


def table(rows: Sequence[Sequence[Any]], indent: int = 2) -> list[str]:
    """Return rows of cells as aligned lines."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [" " * indent + "   ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def by_name(header: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Return a table with a column for each parameter, in the model's order."""
    names = list(SHORT)
    lines = [[label, *(numbers(values[n]) if n in values else "" for n in names)] for label, values in rows]
    return table([[header, *SHORT.values()], *lines])
