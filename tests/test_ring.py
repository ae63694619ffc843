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
    return Input(draw(seeds), draw(shapes(ranks)), draw(st.sampled_from(dtypes)), draw(st.sampled_from(LAYOUTS)), kind)


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


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [*((dtype, "integers") for dtype in ring.DTYPES), *((dtype, "reals") for dtype in UNIT)],
)
def test_a_swap_would_show(dtype: str, kind: str) -> None:
    """Of ranks, and of elements: values that repeat hide it (pytorch/pytorch#158903), and so does comparing them
    without regard to their places (ndif-team/nnsight#719).
    """
    drawn = [Input(7, (12,), dtype, kind=kind).values(rank) for rank in range(max(RANKS))]
    for mine in drawn:
        others = [other for other in drawn if other is not mine]
        for wrong in (*others, *(np.roll(mine, n) for n in range(1, 12)), mine[::-1], np.sort(mine)):
            with pytest.raises(AssertionError):
                assert_same([wrong], mine)
        with pytest.raises(AssertionError):
            assert_same([mine, others[0]], mine)


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


SLOT = 2**20


@pytest.mark.parametrize("ranks", [2, 5])
def test_everybody_may_send_before_anybody_receives(worlds: Any, ranks: int) -> None:
    """Messages of less than a slot, exactly one, two, more; to everybody and to oneself; first in, first out."""
    sizes = [nbytes // 4 for nbytes in (4, SLOT - 4, SLOT, SLOT + 4, 2 * SLOT, 2 * SLOT + 4, 0, 5 * SLOT)]
    assert all(worlds(ranks).run(on_ranks.everybody_sends_first, sizes))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_large_messages_cross(worlds: Any, ranks: int) -> None:
    """An exchange of messages larger than the mailbox, in both directions, comes to an end (cupy@909951e12)."""
    assert all(worlds(ranks).run(on_ranks.swap, 3 * SLOT // 4))


# Bugs that others have had


@pytest.mark.parametrize("place", ["new", "in place"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_value_is_sent_on_before_it_is_overwritten(worlds: Any, ranks: int, place: str) -> None:
    """Right for two ranks and wrong for three was microsoft/ark#253: 1, 2, 4 must give 7 everywhere."""
    results = worlds(ranks).run(on_ranks.powers_of_two, place)
    assert results == [[2.0**ranks - 1] * 4] * ranks


@pytest.mark.parametrize(("n", "ranks"), [(6, 5), (33, 8), (5, 3), (9, 8), (2, 5), (0, 5), (1, 8)])
def test_no_element_is_left_out_and_none_written_beyond(worlds: Any, n: int, ranks: int) -> None:
    """Chunks rounded up run past the end (horovod/horovod#411), rounded down leave the tail out
    (ROCm/rocm-systems#7711), and fewer elements than ranks make empty ones (ROCm/rocm-systems#3213).
    """
    given_ = Input(n, (n,), "float64")
    for place in ("new", "out", "in place"):
        results, _ = zip(*worlds(ranks).run(on_ranks.all_reduce, given_, "sum", None, place), strict=True)
        assert_same(list(results), reduced(given_, ranks, "sum"))


def test_the_split_rule_is_that_of_numpy() -> None:
    """5 rows over 4 ranks are 2, 1, 1, 1, not 2, 2, 1, 0 (pytorch/pytorch#103306), and 2 over 4 are 1, 1, 0, 0."""
    assert split.sizes(5, 4) == [2, 1, 1, 1]
    assert split.sizes(2, 4) == [1, 1, 0, 0]
    for n in range(20):
        for parts in range(1, 9):
            assert split.sizes(n, parts) == [len(part) for part in np.array_split(np.arange(n), parts)]


def test_a_transposed_array_is_reduced_and_returned(worlds: Any) -> None:
    """Not reduced in a contiguous copy that nobody looks at (NVIDIA/Megatron-LM#5337)."""
    for result in worlds(2).run(on_ranks.reduce_transposed):
        np.testing.assert_array_equal(result, 2 * np.arange(4).reshape(2, 2).T)


def test_memory_order_may_differ_between_ranks(worlds: Any) -> None:
    """An axis of length 1 makes a permuted array contiguous on one rank alone (helmholtz-analytics/heat#1058)."""
    expected = np.concatenate([np.arange(8.0).reshape(2, 4).T.ravel(), 100 + np.arange(4.0)])
    for result in worlds(2).run(on_ranks.gather_permuted):
        np.testing.assert_array_equal(result, expected)


def test_halves_are_summed_in_float32_and_rounded_once(worlds: Any) -> None:
    """Two 40,000 sum to infinity in halves, although the total is finite (horovod/horovod#1699)."""
    results = worlds(3).run(on_ranks.sum_of_halves, [40000, 40000, -40000])
    assert results == [40000.0] * 3  # 80,000 on the way
    assert worlds(3).run(on_ranks.sum_of_halves, [2048, 1, 1]) == [2050.0] * 3  # 2048 + 1 is 2048 in halves
    assert worlds(2).run(on_ranks.sum_of_halves, [6e-8, 0]) == [float(np.float16(6e-8))] * 2


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_reduction_holds_its_result_and_at_most_two_chunks(worlds: Any, ranks: int) -> None:
    """Partial sums lie where the result will; only one that has no room for them takes two chunks besides."""
    n = 60 * 4096
    chunk = 4 * n // ranks
    least = {"in place": 0, "out": 0, "halves": 2 * n + 2 * chunk, "part": min(2, ranks - 2) * chunk}
    for held in worlds(ranks).run(on_ranks.room_of_reductions, n):
        assert all(0 <= held[name] - least[name] < 2**16 for name in least), (held, least)


def test_one_rank_changes_nothing(worlds: Any) -> None:
    """A world of one is no special case that collapses an array (huggingface/accelerate#1268)."""
    (got,) = worlds(1).run(on_ranks.every_collective_of_123)
    assert got == [[1, 2, 3], [1, 2, 3], [1, 2, 3], [[1, 2, 3]], [1, 2, 3]]


def test_an_empty_contribution_is_a_contribution(worlds: Any) -> None:
    """Ranks without work take part (NVIDIA/Megatron-LM@90f39a3bfa)."""
    assert worlds(3).run(on_ranks.gather_what_there_is) == [[10, 11, 30]] * 3


def test_nan_wins_a_maximum(worlds: Any) -> None:
    """An overflow seen by one rank is seen by all."""
    for result in worlds(3).run(on_ranks.maximum_with_nan):
        np.testing.assert_array_equal(result, [np.nan, 2.0])


def test_a_slow_reader_sees_every_message(worlds: Any) -> None:
    """Two slots are not refilled before they were read (deepspeedai/DeepSpeed#7371)."""
    assert worlds(2).run(on_ranks.slow_reader, 20) == [None, list(range(20))]


def test_overlap_is_refused(worlds: Any) -> None:
    """Results that would overwrite input before it was sent (NVIDIA/nccl-tests#261)."""
    for messages in worlds(2).run(on_ranks.overlaps):
        assert len(messages) == 4
        assert all("overlaps array" in message for message in messages)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (on_ranks.reduce_bool, "array is of bool"),
        (on_ranks.mean, "op is 'mean'; it must be one of 'sum', 'max'"),
        (on_ranks.narrower, "accumulate is float32; sums of float64"),
        (on_ranks.wrong_out, "out is ndarray float64 (3,); it must be ndarray float64 (2,)"),
        (on_ranks.wrong_counts, "counts is [1, 1]; it must be 2 numbers, not negative that sum to 3"),
        (on_ranks.no_such_rank, "dest is 2; the ranks of world are 0 to 1"),
        (on_ranks.no_such_root, "root is 5; the ranks of world are 0 to 1"),
        (on_ranks.rows_for_nobody, "its first axis must be the 2 receivers"),
    ],
)
def test_bad_arguments_are_named(worlds: Any, fn: Any, words: str) -> None:
    """On the rank that gave them, before anything is sent."""
    for message in worlds(2).run(on_ranks.complaint, fn):
        assert words in message
