"""The battery: right code passes, each check sees what it is for, and it runs wherever the ranks are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from on_conformance import Own
from test_mpi import MPIEXEC, needs_mpi

from refpar import single
from refpar.arrays import Array
from refpar.case import Batch, Case, Layout
from refpar.conformance import BadAdapter, Limits, operations
from refpar.conformance.adapter import BY_RANK, Subject, load, spmd
from refpar.conformance.operations import CHECKS, Wrong
from refpar.nn.loss import CrossEntropy
from refpar.nn.models import MLP
from refpar.optim import SGD
from refpar.oracle import golden, mistakes
from refpar.oracle.dumps import open_dump
from refpar.precision import Precision

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def own() -> Iterator[Own]:
    adapter = Own()
    yield adapter
    adapter.close()


class Called:
    """An adapter that is called as it is."""

    def __init__(self, adapter: Any) -> None:
        self.adapter, self.ranks = adapter, (1, 2, 3)
        self.dtypes = ("float16", "float32", "float64")

    def is_spmd(self, name: str) -> bool:
        return False

    def call(self, name: str, ranks: int, *arguments: Any) -> Any:
        return getattr(self.adapter, name)(*arguments)


def held(name: str, adapter: Any, examples: int = 60) -> None:
    """Run a check without pytest."""

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
              phases=[Phase.generate], derandomize=True)  # fmt: skip
    @given(st.data())
    def claim(data: st.DataObject) -> None:
        CHECKS[name].body(Called(adapter), data.draw, [])  # type: ignore[arg-type]

    claim()


@pytest.mark.parametrize("name", CHECKS)
def test_refpar_passes_its_own_battery(own: Own, name: str) -> None:
    """Every check is passed by refpar's own technique: it asks for nothing that cannot be had."""
    held(name, own, 6 if name == "run_equals_one_device" else 20)


def test_verdict_names_the_ground_of_its_bounds() -> None:
    """The spread of one device in float64, and the tier of what is allowed to others in float32."""
    for model, inputs, dtype, ground in (
        (MLP((3, 2)), np.ones((2, 3)) / 3, "float64", "spread"),
        (MLP((3, 2)), np.ones((2, 3)) / 3, "float32", "running"),
        (MLP((3, 2), init="integers"), np.ones((2, 3)), "float32", "exact"),
    ):
        rows = Batch(inputs, np.ones((2, 2)), np.ones(2, bool))
        case = Case(model, SGD(0.5), (rows,), Precision(dtype), divide="after")
        assert operations.judge(case, Layout(), single.train(case), []).bound_kind == ground


# One wrong version of each operation, and the checks that must see it.


def halves(arrays: list[Array]) -> list[Array]:
    with np.errstate(over="ignore"):
        return [np.sum(arrays, axis=0, dtype=arrays[0].dtype)] * len(arrays)


def drifting(arrays: list[Array]) -> list[Array]:
    """Return sums in another order on each rank."""
    return [sum(np.roll(arrays, r, axis=0)) for r in range(len(arrays))]


def in_place(arrays: list[Array]) -> list[Array]:
    for x in arrays[1:]:
        arrays[0] += x
    return [arrays[0]] * len(arrays)


def first_bias_only(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
    y = sum(a @ w + b for a, w, b in zip(x, weight, bias, strict=True))  # a bias a rank
    dx = [g @ w.T for g, w in zip(dy, weight, strict=True)]
    return [y] * len(x), dx, [a.T @ g for a, g in zip(x, dy, strict=True)], [g.sum(axis=0) for g in dy]


def without_f(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
    y = [a @ w + b for a, w, b in zip(x, weight, bias, strict=True)]
    dx = [g @ w.T for g, w in zip(dy, weight, strict=True)]  # not summed over ranks
    return y, dx, [a.T @ g for a, g in zip(x, dy, strict=True)], [g.sum(axis=0) for g in dy]


def without_a_maximum(logits: Any, targets: Any, mask: Any) -> Any:
    joined, ends = np.concatenate(logits, axis=1), np.cumsum([x.shape[1] for x in logits])[:-1]
    _, kept = CrossEntropy().forward(joined[None], targets[0][None], mask[0][None])
    with np.errstate(all="ignore"):
        p = np.exp(joined) / np.exp(joined).sum(axis=1, keepdims=True)
        loss = -np.log(p[np.arange(len(p)), np.where(mask[0], targets[0], 0)])[mask[0]].sum()
    return [loss] * len(logits), np.split(CrossEntropy().backward(kept, 1.0)[0], ends, axis=1)


def local_clip(gradients: Any, max_norm: float) -> Any:
    norms = [float(np.sqrt(sum((g**2).sum() for g in own.values()))) for own in gradients]
    clipped = [
        {name: g * min(1.0, max_norm / max(n, 1e-30)) for name, g in own.items()}
        for own, n in zip(gradients, norms, strict=True)
    ]
    return norms, clipped


def scale_of_own(rule: Any, overflows: Any) -> Any:
    both = [Own.loss_scale(None, rule, [own]) for own in overflows]  # type: ignore[arg-type]
    return [scales[0] for scales, _ in both], [goods[0] for _, goods in both]


def redrawn(x: Array, weight: Array, rate: float, seed: int, recompute: bool) -> Any:
    return Own.checkpoint(None, x, weight, rate, seed + recompute, recompute)  # type: ignore[arg-type]


WRONG = {
    "all_reduce_of_integers": ("all_reduce", in_place),
    "all_reduce_of_reals": ("all_reduce", drifting),
    "all_reduce_of_halves": ("all_reduce", halves),
    "all_reduce_max_is_exact": ("all_reduce_max", lambda arrays: [np.maximum(0, np.max(arrays, axis=0))] * len(arrays)),
    "reduce_scatter_of_integers": (
        "reduce_scatter", lambda arrays, counts: np.array_split(np.sum(arrays, axis=0), len(arrays)),
    ),
    "all_gather_in_order": ("all_gather", lambda arrays: [np.concatenate(arrays[::-1])] * len(arrays)),
    "broadcast_from_any_root": ("broadcast", lambda arrays, root: [arrays[0]] * len(arrays)),
    "all_to_all_transposes": ("all_to_all", lambda arrays: list(arrays)),
    "column_linear_and_its_gradients": ("column_linear", without_f),
    "row_linear_and_its_gradients": ("row_linear", first_bias_only),
    "vocabulary_cross_entropy_and_its_gradient": ("vocabulary_cross_entropy", without_a_maximum),
    "clip_by_the_global_norm": ("clip", local_clip),
    "loss_scale_moves_everywhere_alike": ("loss_scale", scale_of_own),
    "checkpoint_changes_no_bit": ("checkpoint", redrawn),
}  # fmt: skip


class Just:
    """An adapter of one function."""

    def __init__(self, operation: str, function: Any) -> None:
        setattr(self, operation, function)


@pytest.mark.parametrize("name", WRONG)
def test_each_check_sees_what_it_is_for(name: str) -> None:
    """A plausible wrong version of the operation fails."""
    with pytest.raises(Wrong):
        held(name, Just(*WRONG[name]))


def test_wrong_training_is_seen_and_named(own: Own, worlds: Any) -> None:
    """A run with a mistake fails at the first number that is wrong."""

    def run(case: Case, layout: Layout) -> Any:
        return mistakes.run("last_micro_batch_only", case, layout, world=worlds(layout.ranks))

    adapter = Just("run", run)
    adapter.limits = Limits(dp=(1, 2), micro_batches=(2, 3), models=("mlp",), empty=False)  # type: ignore[attr-defined]
    with pytest.raises(Wrong, match="step 0: gradient/"):
        held("run_equals_one_device", adapter)


def test_every_operation_has_a_check() -> None:
    """And every check says what it claims."""
    assert {check.operation for check in CHECKS.values()} == set(BY_RANK)
    assert all(check.claim.endswith(".") for check in CHECKS.values())
    assert {*WRONG, "run_equals_one_device"} == set(CHECKS)


# How it is run


def refpar(*arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``python -m refpar``, under mpiexec with ``ranks``."""
    launcher = [str(MPIEXEC), "-n", str(ranks)] if ranks else []
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [*launcher, sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120, cwd=HERE,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_verb_reports_writes_and_knows(tmp_path: Path) -> None:
    """A failing example is shrunk and written as a golden that shows it; a known failure is expected."""
    known, report = tmp_path / "known.txt", tmp_path / "report.json"
    known.write_text("all_reduce_of_halves: sums in float16\n")
    run = refpar("refpar", "conformance", "on_conformance:Mistaken", "--only", "all_reduce_of", "--known", str(known),
                 "--write", str(tmp_path / "failed"), "--report", str(report), "--examples", "20")  # fmt: skip
    assert run.returncode == 1, run.stdout
    assert "rank 0: the sum is 100.0, must be 300.0" in run.stdout
    told = json.loads(report.read_text())["outcomes"]
    assert told["all_reduce_of_integers"] == "failed"
    assert told["all_reduce_of_halves"] == "known"
    folder = tmp_path / "failed" / "all_reduce_of_integers"
    made, dump = golden.load(folder / "golden"), open_dump([folder / "got.safetensors"])
    assert (made.expected["sum/x"], dump.read("sum/x")[0]) == (300.0, 100.0)


def test_pytest_runs_the_battery_and_nothing_else() -> None:
    """With the option, pytest collects the checks; what the adapter lacks is skipped by name."""
    run = refpar("pytest", "-p", "refpar.conformance.plugin", "--refpar-adapter=on_conformance:OnlySums", "-rs",
                 "--refpar-examples=10", "-c", os.devnull, "-p", "no:cacheprovider")  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed, 12 skipped" in run.stdout
    assert "the adapter has no row_linear" in run.stdout
    assert "sums 0.1: 3 of 3 checks passed" in run.stdout


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("on_conformance", "must be written package.module:Class"),
        ("no_such_module:X", "cannot import no_such_module"),
        ("on_conformance:Nothing", "has no Nothing"),
        ("refpar.conformance.example:Example", r"Example\(\) raised TypeError: .* missing 4 required"),
        ("on_conformance:Limits", "can do nothing: it must have one of all_reduce"),
    ],
)
def test_adapter_that_cannot_be_used(spec: str, why: str) -> None:
    """One line says what is wrong with it."""
    with pytest.raises(BadAdapter, match=why):
        load(spec)


def test_adapter_in_a_file_that_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's mistake, and is told as one."""
    (tmp_path / "no_python.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadAdapter, match="cannot import no_python: SyntaxError: invalid syntax"):
        load("no_python:X")


def test_methods_for_ranks_need_ranks() -> None:
    """Without a launcher, what to type is said."""
    with pytest.raises(BadAdapter, match="start it as mpiexec -n 3 refpar conformance on_conformance:OnRanks"):
        Subject("on_conformance:OnRanks")
    assert spmd(lambda self: None).refpar_spmd  # type: ignore[attr-defined]


@needs_mpi
@pytest.mark.parametrize(("adapter", "status"), [("Mpi", 0), ("Ring", 0), ("CutsTheTail", 1)])
def test_adapters_of_mpi(adapter: str, status: int) -> None:
    """MPI's collectives and a ring of one's own pass under mpiexec; a ring that cuts the tail does not."""
    run = refpar("refpar", "conformance", f"refpar.adapters.mpi:{adapter}", "--examples", "25", ranks=3)
    assert run.returncode == status, run.stdout + run.stderr
    if status:
        assert "failed: all_reduce_of_integers, all_reduce_of_reals" in run.stdout


@needs_mpi
def test_error_on_one_rank_is_told_with_its_rank() -> None:
    """The rank that raises is named, with its traceback, and those that wait for it are ended."""
    run = refpar("refpar", "conformance", "on_conformance:Raises", "--examples", "40", ranks=2)
    assert run.returncode != 0
    assert "rank 1 of 2: ZeroDivisionError: three are too many" in run.stderr
    assert "still wait for it in all_reduce: ending all" in run.stderr
