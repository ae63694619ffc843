"""A failing example in files: a golden that says what was asked for, and what the adapter answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from refpar import single
from refpar.conformance.operations import Example
from refpar.oracle import bounds
from refpar.oracle.explain import events
from refpar.oracle.explain import explain as name_mistake
from refpar.oracle.golden import BadGolden, Golden, build, ring_account


def write(folder: Path, name: str, example: Example) -> str:
    """Write ``folder/golden`` and ``folder/got.safetensors``; return a line that says how to reproduce it."""
    try:
        golden = of(name, example)
        folder.mkdir(parents=True, exist_ok=True)
        golden.write(folder / "golden")
    except (BadGolden, OSError, ValueError) as error:
        return f"the example was not written: {error}"
    save_file({key: np.ascontiguousarray(x) for key, x in example.got.items()}, folder / "got.safetensors")
    return f"written: refpar compare {folder / 'golden'} {folder / 'got.safetensors'}"


def of(name: str, example: Example) -> Golden:
    """Return the golden of an example."""
    what = f"the smallest failing example of {name}"
    if example.case is not None and example.layout is not None:
        return build(name, what, example.case, example.layout)
    sizes = [int(x.size) for key, x in example.inputs.items() if key.startswith("rank0/")]
    ledger: list[Any] = [ring_account(sizes, example.dtype, example.ranks, r) for r in range(example.ranks)]
    arrays = example.inputs, example.expected, example.bound
    return Golden(name, what, example.dtype, "reduction", *arrays, schedule=[], ledger=ledger)


def explain(example: Example) -> str:
    """Return which known mistake gives the numbers of a training run, in words."""
    case, layout = example.case, example.layout
    assert case is not None
    assert layout is not None
    if case.precision.compute == "float64":
        truth = single.train(case)
        limits = bounds.spread(truth)
    else:
        truth = bounds.truth(case)
        limits = bounds.allowed(case, layout).steps
    bound = {f"step{n}/{name}": x for n, step in enumerate(limits) for name, x in step.items()}
    try:
        return str(name_mistake(example.got, case, layout, events(truth), bound, first=example.first))
    except Exception as error:  # an explanation that fails must not hide what it was to explain
        return f"no explanation: {type(error).__name__}: {error}"
