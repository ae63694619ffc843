"""The catalogue of mistakes: each is seen, by what it should be seen by, and leaves nothing behind."""

import contextlib
import functools
import math
from dataclasses import replace

import pytest
from strategies import batch, overflowing
from truth import Worlds

from refpar import RankError, World, optim, single
from refpar.case import Case, State, Trace
from refpar.nn.models import GPT
from refpar.optim import SGD, AdamW
from refpar.oracle import bounds, compare, explain, mistakes
from refpar.oracle.mistakes import CATALOGUE, Mistake
from refpar.parallel import hybrid
from refpar.precision import LossScale, Precision

MARGIN = 1e6
"""A mistake must be this many times its bound off: the bound has room for rounding, not for anything else."""

RELATIVE = 2.0**-10
"""Where nothing may be off, a mistake must show in the digits that a half has: of the largest entry, so much."""

INSIDE = {
    "replicas": "drifted apart",
    "agreement": "ranks disagree",
    "mismatch": "ranks do not agree on what to do",
    "pieces": "was written|drifted apart",
    "recomputation": "not deterministic",
}
"""What a run notices by itself."""

LETS_GO_ON = ("replicas", "agreement", "recomputation")
"""Of these, what yields numbers all the same where nobody looks: ranks not in one collective, or pieces that are not a
whole, yield none."""


def witness(mistake: Mistake) -> Case:
    """A case on which every mistake shows: odd sizes, tied weight, dropout, ragged tokens, decay, a clip that bites.

    Under a loss scale, small integers in float16, one entry of whose gradient overflows in the first step.
    """
    if mistake.scaled:
        case = overflowing(8, 0)
        plain, wild, *_ = case.batches
        optimizer = SGD(lr=0.25, momentum=0.5, weight_decay=0.25)
        types = Precision("float16", loss_scale=LossScale(64.0, interval=1, cap=64.0))
        return replace(
            case, optimizer=optimizer, batches=(wild, plain, plain, plain), precision=types, clip=mistake.clip
        )
    model = GPT(vocabulary=11, context=5, width=6, layers=2, heads=3, dropout=0.25)
    batches = tuple(batch(model, rows=7, share=0.6, seed=5, step=step) for step in range(3))
    optimizer = AdamW(lr=0.05, weight_decay=0.1)
    return Case(model, optimizer, batches, clip=mistake.clip, seed=5, frozen=mistake.frozen)


@functools.cache
def truth_of(clip: float, scaled: bool, frozen: tuple[str, ...]) -> tuple[Trace, bounds.Bounds]:
    """The witness on one device, and what is allowed: nothing in small integers."""
    truth = single.train(witness(replace(next(iter(CATALOGUE.values())), clip=clip, scaled=scaled, frozen=frozen)))
    return truth, [] if scaled else bounds.spread(truth)


@pytest.mark.parametrize("name", CATALOGUE)
def test_mistake_is_caught(worlds: Worlds, name: str) -> None:
    """Made on purpose, it is seen first where it first goes wrong, and by a margin of a million bounds."""
    mistake = CATALOGUE[name]
    case, world = witness(mistake), worlds(mistake.layout.ranks)
    truth, allowed = truth_of(mistake.clip, mistake.scaled, mistake.frozen)
    assert compare.compare(hybrid.run(case, mistake.layout, world=world), truth, bounds=allowed).ok
    if mistake.seen in INSIDE:
        with pytest.raises((RankError, AssertionError), match=INSIDE[mistake.seen]):
            mistakes.run(name, case, mistake.layout, world=world)
        if mistake.seen in LETS_GO_ON:
            assert shows_anyway(name, case, truth, allowed, world), "nothing but the check inside would have noticed"
        return
    trace = mistakes.run(name, case, mistake.layout, world=world)
    verdict = compare.compare(trace, truth, bounds=allowed)
    assert verdict.first is not None, "nobody would have noticed"
    assert verdict.first.name.partition("/")[0] == mistake.seen
    assert is_large(verdict.first, truth)


def is_large(found: compare.Divergence, truth: Trace) -> bool:
    """Return whether what differs does so by the margin: in bounds, or beside its largest entry where there is none."""
    true = dict(truth.steps[found.step].items()).get(found.name)
    if found.bound or true is None or isinstance(true, str) or not math.isfinite(found.error):
        return found.error >= MARGIN * found.bound
    return found.error >= RELATIVE * bounds.largest(true)


def shows_anyway(name: str, case: Case, truth: Trace, allowed: bounds.Bounds, world: World) -> bool:
    """Return whether a mistake that a run notices by itself shows by the margin where nobody looks, on some rank."""
    start = State.initial(case).parameters
    values = explain.replay(name, case, CATALOGUE[name].layout, start, world)
    for number, step in enumerate(truth.steps):
        for key, true in step.items():
            for value in values.get(f"step{number}/{key}", []):
                bound = allowed[number].get(key, 0.0) if allowed else 0.0
                found, _ = compare.judge(number, key, value, explain.outcome(true), bound)
                if found is not None and is_large(found, truth):
                    return True
    return False


@pytest.mark.parametrize("name", CATALOGUE)
def test_mistake_is_explained(name: str) -> None:
    """Each says in words what is done wrong and where it was made."""
    mistake = CATALOGUE[name]
    assert mistake.what.endswith(".")
    assert all("#" in bug or "@" in bug for bug in mistake.bugs)
    assert mistake.bugs


def test_right_function_comes_back_whatever_happens() -> None:
    """Also when the run inside raises; and one mistake at a time."""
    right = optim.clip_factor
    with contextlib.suppress(ZeroDivisionError), mistakes.applied("nothing_clipped"):
        assert optim.clip_factor(5.0, 1.0) == 1.0
        assert mistakes.active() == "nothing_clipped"
        with pytest.raises(RuntimeError, match="norms_added cannot be made while nothing_clipped is"):
            mistakes.applied("norms_added").__enter__()
        raise ZeroDivisionError
    assert optim.clip_factor is right
    assert mistakes.active() is None
    assert math.isclose(optim.clip_factor(5.0, 1.0), 0.2)


def test_ranks_are_clean_after_a_mistake(worlds: Worlds) -> None:
    """A standing rank does not remember the mistake it has made."""
    case = witness(CATALOGUE["nothing_clipped"])
    mistakes.run("nothing_clipped", case, CATALOGUE["nothing_clipped"].layout, world=worlds(1))
    assert worlds(1).run(lambda comm: mistakes.active()) == [None]
