"""PyTorch's own distributed training and operations, held to one device; what users do wrong with it is seen."""

from __future__ import annotations

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

torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'refpar[torch]' brings it)")
from refpar.adapters import torch_operations, torch_training  # noqa: E402
from refpar.adapters.pool import Pool, WorkerError  # noqa: E402
from refpar.case import Case, Layout  # noqa: E402
from refpar.conformance import problems  # noqa: E402
from refpar.conformance.adapter import able  # noqa: E402
from refpar.conformance.example import explain  # noqa: E402
from refpar.conformance.launch import on_worker  # noqa: E402
from refpar.conformance.operations import CHECKS, Example, Wrong, judge  # noqa: E402
from refpar.nn.models import GPT  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("default"),  # torch's own
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

EXAMPLES = 8
SAME_VERSION = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="what is known to be wrong is known of torch 2.13"
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Standing workers for all tests of this file."""
    with Pool() as workers:
        yield workers


def quick(examples: int) -> Any:
    return settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate], derandomize=True,
    )  # fmt: skip


TECHNIQUES = ("Ddp", "ZeroOptimizer", "Fsdp", "TensorParallel", "FsdpTensorParallel", "Pipeline", "Interleaved")


@pytest.mark.parametrize("name", TECHNIQUES)
def test_technique_is_one_device(pool: Pool, name: str) -> None:
    """Gradients, norms, optimizer state and weights of random cases and layouts are those of refpar's one device."""
    adapter = getattr(torch_training, name)(pool)

    @quick(EXAMPLES)
    @given(st.data())
    def claim(data: st.DataObject) -> None:
        case, layout = problems.problem(data.draw, adapter.limits)
        if layout.ranks <= 4 and not (hasattr(adapter, "refuses") and adapter.refuses(case, layout)):
            judge(case, layout, adapter.run(case, layout), [])

    claim()


def trapped(name: str) -> tuple[Case, Layout]:
    """A case and a layout in which a trap shows."""
    kind, _ = torch_training.TRAPS[name]
    pipeline = kind is torch_training.Pipeline
    model = GPT(
        vocabulary=10, context=3, width=6, layers=1, heads=2, mlp_width=8, tied=not pipeline or name == "untied"
    )
    batches = tuple(problems.batch(model, 6, 0.6, 1, step, at_least_one=True) for step in range(2))
    case = Case(model, problems.OPTIMIZERS["sgd"], batches, clip=0.05)
    if pipeline:
        return case, Layout(pp=2 if name == "scale_grads" else 3, micro_batches=3, schedule="gpipe")
    return case, Layout(dp=3, micro_batches=2, zero=3 if kind is torch_training.Fsdp else 0)


@pytest.mark.parametrize("name", torch_training.TRAPS)
def test_trap_is_caught_and_named(pool: Pool, name: str) -> None:
    """What users do wrong gives wrong numbers here too, and those of the mistake that the catalogue has."""
    kind, mistake = torch_training.TRAPS[name]
    adapter = kind(pool)
    adapter.trap = name
    case, layout = trapped(name)
    judge(case, layout, kind(pool).run(case, layout), [])
    seen: list[Example] = []
    with pytest.raises(Wrong):
        judge(case, layout, adapter.run(case, layout), seen)
    told = explain(seen[-1])
    assert told.startswith(f"matches {mistake}" if mistake else "matches none"), told


def known_file() -> Path:
    """Where is written what these do otherwise."""
    return Path(torch_operations.__file__).with_name("torch_known.txt")


class Workers:
    """The operations, called on the pool of this file."""

    def __init__(self, pool: Pool, kind: Any) -> None:
        self.pool, self.adapter, self.ranks, self.dtypes = pool, kind(), kind.ranks, ("float32", "float64")
        self.spec = f"refpar.adapters.torch_operations:{kind.__name__}"

    def is_spmd(self, name: str) -> bool:
        return True

    def call(self, name: str, ranks: int, *arguments: Any) -> Any:
        from refpar.conformance.adapter import BY_RANK, TUPLES

        shares = [
            [x[r] if by_rank else x for x, by_rank in zip(arguments, BY_RANK[name], strict=True)] for r in range(ranks)
        ]
        results = self.pool.run(ranks, on_worker, [(self.spec, name, share) for share in shares])
        if name == "checkpoint":
            return results[0]
        return tuple(zip(*results, strict=True)) if name in TUPLES else results


OTHERWISE = {line.partition(":")[0] for line in known_file().read_text().splitlines() if not line.startswith("#")}
OPERATIONS = [name for name, check in CHECKS.items() if able(torch_operations.Operations, check.operation)]


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in OTHERWISE])
def test_operation_is_one_device(pool: Pool, name: str) -> None:
    """Collectives, DTensor's linear layers and losses, clipping, GradScaler, checkpoint: value and gradient."""
    subject = Workers(pool, torch_operations.Operations)

    @quick(12)
    @given(st.data())
    def claim(data: st.DataObject) -> None:
        CHECKS[name].body(subject, data.draw, [])  # type: ignore[arg-type]

    claim()


def test_recomputing_with_other_random_numbers_is_caught(pool: Pool) -> None:
    """``preserve_rng_state=False`` gives the gradient of another network."""
    subject = Workers(pool, torch_operations.ForgetsRandomNumbers)

    @quick(20)
    @given(st.data())
    def claim(data: st.DataObject) -> None:
        CHECKS["checkpoint_changes_no_bit"].body(subject, data.draw, [])  # type: ignore[arg-type]

    with pytest.raises(Wrong, match="with recomputation"):
        claim()


SHAPES: list[tuple[tuple[int, ...], int, int, int]] = [  # shape, axis, cut, ranks
    ((4,), 0, 0, 2), ((5,), 0, 0, 3), ((5, 3), 0, 0, 2), ((5, 3), 1, 0, 3), ((3, 7), 1, 1, 2), ((3, 5), 0, -2, 3),
]  # fmt: skip


def examples(name: str) -> Iterator[tuple[torch_operations.Example, int]]:
    for number, (shape, axis, cut, ranks) in enumerate(SHAPES):
        x = np.round(np.random.default_rng(number).standard_normal(shape) * 8) / 8 + 1 / 16
        example = torch_operations.Example(name, x, axis, cut)
        if not torch_operations.empty_pieces(example, ranks):
            yield example, ranks


@pytest.mark.parametrize("name", [name for name in torch_operations.SHARDED if name not in torch_operations.KNOWN])
def test_operation_in_pieces_is_that_on_the_whole(pool: Pool, name: str) -> None:
    """Value and gradient of DTensor's operations, on shards of unequal length and on sums in parts; or they refuse."""
    for example, ranks in examples(name):
        answers = pool.run(ranks, torch_operations.in_pieces_or_refused, [(example,)] * ranks)
        assert {answer.wrong for answer in answers} <= {"", "refused"}, (example, ranks, answers[0])


def test_operations_are_counted_right() -> None:
    """As many as the README says are held to the single device."""
    text = " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    assert f"DTensor's operations, {len(torch_operations.SHARDED)} of them" in text


@SAME_VERSION
@pytest.mark.parametrize("name", torch_operations.KNOWN)
def test_what_is_known_to_be_wrong_is(pool: Pool, name: str) -> None:
    """The smallest input on which each is wrong, on two ranks of gloo: to be reported, and taken out when mended."""
    example, _ = torch_operations.KNOWN[name]
    answers = pool.run(2, torch_operations.in_pieces, [(example,)] * 2)
    assert answers[0].wrong in ("value", "gradient")


def test_pool_survives_an_error(pool: Pool) -> None:
    """What a worker raises is raised here with its rank, and the next call has new workers."""
    with pytest.raises(WorkerError, match="rank 0 of 2: ZeroDivisionError"):
        pool.run(2, divide, [(0,), (1,)])
    assert pool.run(2, divide, [(1,), (2,)]) == [1.0, 0.5]


def divide(by: int) -> float:
    return 1 / by


def test_battery_runs_under_torchrun() -> None:
    """Rank 0 draws and judges, the other one waits for calls; both end."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "refpar", "conformance",
         "refpar.adapters.torch_operations:Operations", "--only=all_reduce_of_integers", "--examples=10"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 of 1 checks passed" in run.stdout
