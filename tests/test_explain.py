"""Explain: a wrong run's mistake is named, by its numbers; nothing is named that did not happen."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from strategies import batch
from truth import Worlds

from refpar import single
from refpar.case import Case, Layout
from refpar.cli import MISMATCH, main
from refpar.comm import Communicator
from refpar.nn import checkpoint
from refpar.nn.models import GPT
from refpar.optim import SGD
from refpar.oracle import bounds, explain, golden, mistakes
from refpar.oracle.mistakes import CATALOGUE
from refpar.precision import Precision

MODEL = GPT(vocabulary=11, context=3, width=6, layers=1, heads=3, mlp_width=5, dropout=0.25)
CASE = Case(MODEL, SGD(lr=0.25, momentum=0.5, weight_decay=0.125), tuple(batch(MODEL, 7, 0.6, 5, s) for s in range(2)),
            clip=0.05, seed=5)  # fmt: skip
LAYOUT = Layout(dp=3, micro_batches=2)
FEW = (
    "tokens_counted_per_rank", "mean_of_rank_means", "last_micro_batch_only", "gradients_not_reduced",
    "divided_by_ranks_too", "sum_sent_on", "norms_added", "nothing_clipped", "everything_decays",
)  # fmt: skip


def truth() -> tuple[dict[str, Any], dict[str, Any]]:
    """All values of the case on one device, and what an honest run may be off by."""
    reference = single.train(CASE)
    limits = {f"step{n}/{k}": x for n, step in enumerate(bounds.spread(reference)) for k, x in step.items()}
    return explain.events(reference), limits


EXPECTED, BOUND = truth()
NARROW = replace(CASE, precision=Precision("float32"))


@functools.cache
def narrow() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The case in float32: its initial values, its truth, and what an honest run may be off by."""
    start = {name: x.astype(np.float32) for name, x in explain.widened(NARROW)[1].items()}
    allowed = bounds.allowed(NARROW, LAYOUT)
    bound = {f"step{n}/{k}": x for n, step in enumerate(allowed.steps) for k, x in step.items()}
    return start, explain.events(bounds.truth(NARROW)), bound


def test_catalogue_is_wide() -> None:
    """At least forty-five mistakes, some in every part of the field."""
    sections = Counter(mistake.section for mistake in CATALOGUE.values())
    assert len(CATALOGUE) >= 45
    assert min(sections.values()) >= 3
    assert len(sections) >= 9


@pytest.mark.parametrize("name", FEW)
def test_mistake_of_a_float32_run_is_named(worlds: Worlds, name: str) -> None:
    """Made by ranks that compute in float32, it is told from the others by the float64 replays."""
    start, expected, bound = narrow()
    values = explain.replay(name, NARROW, LAYOUT, start, worlds(3))
    got = {key: alternatives[0] for key, alternatives in values.items()}
    told = explain.explain(got, NARROW, LAYOUT, expected, bound, names=FEW, world=worlds(3))
    assert [match.name for match in told.matches] == [name]
    assert told.next_best is not None
    assert told.next_best.distance > 1000
    assert f"matches {name}" in str(told)


def test_nothing_known_is_said_to_be_nothing_known(worlds: Worlds) -> None:
    """Gradients that no mistake gives match none; what is said then is where to look."""
    got = {k: x * 1.5 if "/gradient/" in k else x for k, x in EXPECTED.items()}
    first = "step0/gradient/blocks.0.mlp.down.bias"
    told = explain.explain(got, CASE, LAYOUT, EXPECTED, BOUND, names=FEW, world=worlds(3), first=first)
    assert not told.matches
    assert "matches none" in str(told)
    assert "look next at gradient/blocks.0.mlp.down.bias" in str(told)


def test_right_run_has_made_no_mistake(worlds: Worlds) -> None:
    """The truth itself matches none, not even the mistakes that change nothing here."""
    told = explain.explain(EXPECTED, CASE, LAYOUT, EXPECTED, BOUND, names=(*FEW, "small_gradients_enlarged"),
                           world=worlds(3))  # fmt: skip
    assert not told.matches
    assert {r.name for r in told.replays if r.silent} == {"small_gradients_enlarged"}


def test_counts_that_are_right_are_no_evidence(worlds: Worlds) -> None:
    """Who divides by the wrong count may well report the right one."""
    values = explain.replay("mean_of_rank_means", CASE, LAYOUT, explain.widened(CASE)[1], worlds(3))
    got = {k: EXPECTED[k] if k.endswith(("count", "loss")) else x[0] for k, x in values.items()}
    told = explain.explain(got, CASE, LAYOUT, EXPECTED, BOUND, names=FEW, world=worlds(3))
    assert [match.name for match in told.matches] == ["mean_of_rank_means"]
    assert told.matches[0].reported >= 2
    got["step0/gradient/head.norm.bias"] = EXPECTED["step0/gradient/head.norm.bias"]  # but a right gradient is
    told = explain.explain(got, CASE, LAYOUT, EXPECTED, BOUND, names=FEW, world=worlds(3))
    assert not told.matches


@pytest.mark.parametrize("group", explain.SAME, ids=lambda group: sorted(group)[0])
def test_documented_equivalences_are_real(worlds: Worlds, group: frozenset[str]) -> None:
    """What is said to be the same somewhere is: by layout and mistake, at least two of the group agree in one."""
    layouts = (Layout(dp=2, tp=2, zero=1), Layout(dp=3, micro_batches=2), Layout(dp=2, zero=2))
    start = explain.widened(CASE)[1]
    for layout in layouts:
        runs = {}
        for name in group & set(CATALOGUE):
            runs[name] = explain.replay(name, CASE, layout, start, worlds(layout.ranks))
        for name, values in runs.items():
            got = {key: alternatives[0] for key, alternatives in values.items() if key in EXPECTED}
            alike = [n for n, other in runs.items() if explain.held(n, got, other, EXPECTED_, BOUND, 2.0**-53).matches]
            if name in alike and len(alike) > 1:
                return
    pytest.fail(f"nowhere the same: {sorted(group)}")


EXPECTED_ = {k: explain.outcome(x) for k, x in EXPECTED.items()}


def test_rank_is_clean_after_a_replay(worlds: Worlds) -> None:
    """Neither the mistake nor what lets it run to its end is left behind in a standing rank."""
    explain.replay("norms_added", CASE, LAYOUT, explain.widened(CASE)[1], worlds(3))
    assert worlds(3).run(active) == [(None, False)] * 3


def active(comm: Communicator) -> tuple[str | None, bool]:
    return mistakes.active(), checkpoint.same(np.zeros(1), np.ones(1))


def test_compare_names_the_mistake(worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``refpar compare`` replays the known mistakes where a candidate differs, and says so if it was asked not to."""
    made = golden.build("mine", "a case", NARROW, LAYOUT, world=worlds(3))
    made.write(tmp_path / "golden")
    wide, start = explain.widened(NARROW)
    values = explain.replay("divided_by_ranks_too", wide, LAYOUT, start, worlds(3))
    save_file({k: np.asarray(x[0]) for k, x in values.items()}, tmp_path / "got.safetensors")
    paths = [str(tmp_path / "golden"), str(tmp_path / "got.safetensors")]
    assert main(["compare", *paths]) == MISMATCH
    assert "matches divided_by_ranks_too (NVIDIA/Megatron-LM#3023)" in capsys.readouterr().out
    assert main(["compare", *paths, "--no-explain"]) == MISMATCH
    assert "matches divided_by_ranks_too" not in capsys.readouterr().out
