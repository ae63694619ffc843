"""Collectives: exact where arithmetic is exact, bounded where it is not, the same on all, and no element more sent."""

import math
from typing import Any

import numpy as np
import on_ranks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import Input

from refpar import split
from refpar.comm import ring

RANKS = (1, 2, 3, 5, 8)
LAYOUTS = ("C", "F", "reversed", "strided", "swapped")
UNIT = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}

ranks_strategy = st.sampled_from(RANKS)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def shapes(draw: st.DrawFn, ranks: int) -> tuple[int, ...]:
    """Shapes whose sizes lie around the number of ranks, and others."""
    near = st.sampled_from([0, 1, ranks - 1, ranks, ranks + 1, 2 * ranks + 1])
    length = near | st.integers(0, 40)
    side = st.integers(0, 5)
    return draw(st.just(()) | st.tuples(length) | st.tuples(side, side) | st.tuples(side, side, side))


@st.composite
def inputs(draw: st.DrawFn, ranks: int, dtypes: tuple[str, ...] = ring.DTYPES, kind: str = "integers") -> Input:
    return Input(
        draw(seeds), draw(shapes(ranks)), draw(st.sampled_from(dtypes)), draw(st.sampled_from(LAYOUTS)), kind
    )


def counts_of(n: int, ranks: int) -> st.SearchStrategy[list[int]]:
    """Ways to cut n elements into one part per rank, empty ones too."""
    cuts = st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1).map(sorted)
    return cuts.map(lambda c: [b - a for a, b in zip([0, *c], [*c, n], strict=True)])


def reduced(given_: Input, ranks: int, op: str) -> np.ndarray:
    """Return the exact result: the sums of integers are exact in float64 and in int64."""
    values = np.stack([given_.values(rank) for rank in range(ranks)])
    return (values.sum(0, dtype=values.dtype) if op == "sum" else values.max(0)).astype(given_.dtype)


def accumulators(dtype: str) -> st.SearchStrategy[str | None]:
    wider = {"float16": ["float16", "float32"], "float32": ["float32", "float64"]}
    return st.sampled_from([None, *wider.get(dtype, [dtype])])


def assert_same(results: list[Any], expected: np.ndarray) -> None:
    """Every rank holds the expected values, in the same bits."""
    for result in results:
        np.testing.assert_array_equal(result, expected, strict=True)
        assert result.tobytes() == results[0].tobytes()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), ranks=ranks_strategy, op=st.sampled_from(["sum", "max"]))
def test_all_reduce_is_exact_on_integers(worlds: Any, data: st.DataObject, ranks: int, op: str) -> None:
    """In any type, shape, memory order and place; and every rank sends what its chunks add up to."""
    given_ = data.draw(inputs(ranks))
    accumulate = data.draw(accumulators(given_.dtype))
    place = data.draw(st.sampled_from(["new", "out", "in place"]))
    results, sent = zip(*worlds(ranks).run(on_ranks.all_reduce, given_, op, accumulate, place), strict=True)
    assert_same(list(results), reduced(given_, ranks, op))

    size, own = int(np.prod(given_.shape, dtype=int)), np.dtype(given_.dtype).itemsize
    partial = own if op == "max" else {None: 4 if own == 2 else own}.get(accumulate) or np.dtype(accumulate).itemsize
    for rank, (messages, elements, nbytes) in enumerate(sent):
        first, second = split.ring_elements(size, ranks, rank)
        assert (messages, elements) == (2 * (ranks - 1), first + second)
        assert nbytes == first * partial + second * own
    assert sum(elements for _, elements, _ in sent) == 2 * (ranks - 1) * size


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=ranks_strategy)
def test_all_reduce_of_reals_stays_within_the_bound(worlds: Any, data: st.DataObject, ranks: int) -> None:
    """A sum of W terms in any order errs by at most (W-1) u sum|x|, the u of the type that partial sums are kept in.

    A half whose partial sums were kept wider is then rounded once: half a unit in the last place
    of the result, u |sum|, or 2^-25 below the normal range.
    """
    given_ = data.draw(inputs(ranks, ("float16", "float32", "float64"), "reals"))
    accumulate = data.draw(accumulators(given_.dtype))
    results, _ = zip(*worlds(ranks).run(on_ranks.all_reduce, given_, "sum", accumulate, "new"), strict=True)
    kept = accumulate or ("float32" if given_.dtype == "float16" else given_.dtype)
    terms = np.stack([given_.values(rank).ravel() for rank in range(ranks)]).astype(np.float64)
    for i, got in enumerate(results[0].ravel().tolist()):
        exact, magnitude = math.fsum(terms[:, i]), math.fsum(abs(terms[:, i]))
        bound = (ranks - 1) * UNIT[kept] * magnitude
        if kept != given_.dtype:
            bound += UNIT[given_.dtype] * (abs(exact) + bound) + 2.0**-25
        assert abs(got - exact) <= bound
    assert len({result.tobytes() for result in results}) == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=ranks_strategy, op=st.sampled_from(["sum", "max"]))
def test_reduce_scatter_gives_each_rank_its_part(worlds: Any, data: st.DataObject, ranks: int, op: str) -> None:
    """By the near-even rule or by given counts; the parts of all ranks make up the all-reduce."""
    given_ = data.draw(inputs(ranks))
    accumulate = data.draw(accumulators(given_.dtype))
    place = data.draw(st.sampled_from(["new", "out"]))
    size = int(np.prod(given_.shape, dtype=int))
    counts = data.draw(st.none() | counts_of(size, ranks))
    call = on_ranks.reduce_scatter, given_, op, accumulate, place, counts
    results, sent = zip(*worlds(ranks).run(*call), strict=True)
    whole = reduced(given_, ranks, op).ravel()
    sizes = counts or split.sizes(size, ranks)
    for rank, part in enumerate(split.ranges(sizes)):
        np.testing.assert_array_equal(results[rank], whole[part.start : part.stop], strict=True)
        assert sent[rank][:2] == (ranks - 1, size - sizes[rank])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=ranks_strategy, place=st.sampled_from(["new", "out"]))
def test_all_gather_gives_everybody_everything(worlds: Any, data: st.DataObject, ranks: int, place: str) -> None:
    """Stacked where all bring the same shape, one after another where counts say how much each brings."""
    given_ = data.draw(inputs(ranks))
    size = int(np.prod(given_.shape, dtype=int))
    counts = data.draw(st.none() | counts_of(size, ranks))
    results, sent = zip(*worlds(ranks).run(on_ranks.all_gather, given_, place, counts), strict=True)
    if counts is None:
        expected = np.stack([given_.values(rank) for rank in range(ranks)])
    else:
        expected = np.concatenate([given_.values(rank, (counts[rank],)) for rank in range(ranks)])
    assert_same(list(results), expected)
    sizes = counts or [size] * ranks
    for rank in range(ranks):
        assert sent[rank][:2] == (ranks - 1, sum(sizes) - sizes[(rank + 1) % ranks])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), ranks=ranks_strategy)
def test_all_gather_works_in_place(worlds: Any, data: st.DataObject, ranks: int) -> None:
    """A rank's own block is at its own place, not at the start of the buffer (pmodels/mpich#2049, openucx/xccl#123)."""
    given_ = data.draw(inputs(ranks))
    counts = data.draw(counts_of(data.draw(st.integers(0, 20)), ranks))
    results = worlds(ranks).run(on_ranks.all_gather_in_place, given_, counts)
    assert_same(results, np.concatenate([given_.values(rank, (counts[rank],)) for rank in range(ranks)]))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=ranks_strategy)
def test_broadcast_gives_everybody_what_the_root_has(worlds: Any, data: st.DataObject, ranks: int) -> None:
    """And every rank but the last of the chain sends it once."""
    given_ = data.draw(inputs(ranks))
    root = data.draw(st.integers(0, ranks - 1))
    place = data.draw(st.sampled_from(["new", "out", "in place"]))
    results, sent = zip(*worlds(ranks).run(on_ranks.broadcast, given_, root, place), strict=True)
    assert_same(list(results), given_.values(root))
    size = int(np.prod(given_.shape, dtype=int))
    for rank in range(ranks):
        assert sent[rank][1] == split.broadcast_elements(size, ranks, rank, root)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=ranks_strategy)
def test_all_to_all_transposes_ranks_and_rows(worlds: Any, data: st.DataObject, ranks: int) -> None:
    """Row d of rank s becomes row s of rank d."""
    given_ = data.draw(inputs(ranks))
    results, sent = zip(*worlds(ranks).run(on_ranks.all_to_all, given_), strict=True)
    everything = np.stack([given_.values(rank, (ranks, *given_.shape)) for rank in range(ranks)])
    for rank in range(ranks):
        np.testing.assert_array_equal(results[rank], everything[:, rank], strict=True)
        assert sent[rank][0] == ranks - 1


# Messages between two


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=ranks_strategy, into=st.sampled_from(LAYOUTS))
def test_a_message_arrives_in_its_logical_order(worlds: Any, data: st.DataObject, ranks: int, into: str) -> None:
    """Whatever the memory order on either side (pytorch/pytorch#62283)."""
    given_ = data.draw(inputs(ranks))
    results = worlds(ranks).run(on_ranks.send_and_receive, given_, into)
    for rank in range(ranks):
        np.testing.assert_array_equal(results[rank], given_.values((rank - 1) % ranks), strict=True)


SLOT = 2**20 - 512


@pytest.mark.parametrize("ranks", [2, 5])
def test_everybody_may_send_before_anybody_receives(worlds: Any, ranks: int) -> None:
    """Messages of less than a slot, exactly one, two, more; to everybody and to oneself; first in, first out."""
    sizes = [nbytes // 4 for nbytes in (4, SLOT - 4, SLOT, SLOT + 4, 2 * SLOT, 2 * SLOT + 4, 0, 5 * SLOT)]
    assert all(worlds(ranks).run(on_ranks.everybody_sends_first, sizes))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_large_messages_cross(worlds: Any, ranks: int) -> None:
    """An exchange of messages larger than the mailbox, in both directions, comes to an end (cupy@909951e12)."""
    assert all(worlds(ranks).run(on_ranks.swap, 3 * SLOT // 4))
