"""Groups of ranks, and the account of what they send."""

import pickle
from typing import Any

import numpy as np
import on_ranks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar import split
from refpar.comm import Communicator, Ledger, ring
from refpar.comm.ledger import Sent, Tally
from refpar.comm.mailbox import shorten
from refpar.comm.region import TEXT_BYTES


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.sampled_from([1, 2, 3, 5, 8]))
def test_split_groups_by_colour_and_orders_by_key(worlds: Any, data: st.DataObject, ranks: int) -> None:
    """Ranks of one colour, ordered by key, then by rank; those without a colour get no group."""
    colors = data.draw(st.lists(st.none() | st.integers(0, 2), min_size=ranks, max_size=ranks))
    keys = data.draw(st.lists(st.integers(-2, 2), min_size=ranks, max_size=ranks))
    for rank, (members, ledger) in enumerate(worlds(ranks).run(on_ranks.grouped, colors, keys)):
        if colors[rank] is None:
            assert members is None
        else:
            same = [other for other in range(ranks) if colors[other] == colors[rank]]
            assert members == sorted(same, key=lambda other: keys[other])
            assert ledger.total("part") == Sent(len(same) - 1, len(same) - 1, 8 * (len(same) - 1))
        assert ledger.total("world") == Sent(), "what splitting sends is not the computation's"
        assert ledger.observed.messages_sent == ranks - 1


def test_groups_cross(worlds: Any) -> None:
    """Each collective runs within its own group, and is on the ledger under its name."""
    with_six = worlds(6).run(on_ranks.mesh)
    for rank, (along_tp, along_dp, both, ledger, names) in enumerate(with_six):
        row, column = divmod(rank, 3)
        assert along_tp == sum(10.0 ** (3 * row + c) for c in range(3))
        assert along_dp == sum(10.0 ** (3 * r + column) for r in range(2))
        assert both == 111111.0
        assert names == ("tp", "dp")
        assert ledger.total("tp").messages == 4
        assert ledger.total("dp").messages == 2 * (column + 2)
        assert set(ledger.sent) == {("tp", "all_reduce"), ("dp", "all_reduce")}


def test_the_ledger_tells_operations_apart(worlds: Any) -> None:
    """And counts a collective's messages under the collective, not as what it is made of."""

    def fn(comm: Communicator) -> Ledger:
        x = np.ones(6, np.float32)
        ring.all_reduce(comm, x)
        ring.all_reduce(comm, x.astype(np.float16))
        ring.reduce_scatter(comm, x)
        ring.all_gather(comm, x)
        comm.send(x, (comm.rank + 1) % 3)
        comm.recv(x, (comm.rank - 1) % 3)
        with comm.ledger.observing():
            ring.all_gather(comm, x)
        ring.broadcast(comm, x)
        comm.barrier()
        return comm.ledger

    for rank, ledger in enumerate(worlds(3).run(fn)):
        broadcast = ledger.sent.pop(("world", "broadcast"), Sent())
        assert broadcast == (Sent(3, 6, 24) if rank < 2 else Sent())  # the last of the chain sends nothing
        assert ledger.sent == {
            ("world", "all_reduce"): Sent(8, 16, 4 * (4 + 4 + 4) + 2 * 4),  # halves: 4 elements wide, 4 narrow
            ("world", "reduce_scatter"): Sent(2, 4, 16),
            ("world", "all_gather"): Sent(2, 12, 48),
            ("world", "send"): Sent(1, 6, 24),
            ("world", "barrier"): Sent(2, 0, 0),
        }
        assert ledger.observed.sent == {("world", "all_gather"): Sent(2, 12, 48)}
        assert (ledger.messages_sent, ledger.elements_sent, ledger.bytes_sent) == (15, 38, 144)


def test_groups_without_a_name_are_not_added_up(worlds: Any) -> None:
    """Rows, columns and their parts by one colour have a line each; groups that were given one name have one."""

    def fn(comm: Communicator) -> Ledger:
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        part = row.split(0)
        named = comm.split(comm.rank // 2, name="x"), comm.split(comm.rank % 2, name="x")
        for n, group in enumerate((comm, row, column, part, *named), start=1):
            ring.broadcast(group, np.arange(float(n)), 0)
        return comm.ledger

    for rank, ledger in enumerate(worlds(4).run(fn)):
        row, column = divmod(rank, 2)
        expected = {  # elements: who is not the last of a chain sends them once
            "world": 1 if rank < 3 else 0,
            f"world.1.{row}": 2 if column == 0 else 0,
            f"world.2.{column}": 3 if row == 0 else 0,
            f"world.1.{row}.1.0": 4 if column == 0 else 0,
            "x": (5 if column == 0 else 0) + (6 if row == 0 else 0),
        }
        sent = {group: line.elements for (group, _), line in ledger.sent.items()}
        assert sent == {group: n for group, n in expected.items() if n}


def test_a_snapshot_stays_as_it_is() -> None:
    ledger = Ledger()
    ledger.add("dp", "all_reduce", 3, 12)
    snapshot = pickle.loads(pickle.dumps(ledger.snapshot()))
    ledger.add("dp", "all_reduce", 3, 12)
    assert snapshot.sent == {("dp", "all_reduce"): Sent(1, 3, 12)}
    assert ledger.total(operation="all_reduce") == Sent(2, 6, 24)
    assert ledger.total("tp") == Sent()


def test_observing_ends_with_its_block() -> None:
    """Nested, and by an exception too."""
    ledger = Ledger()

    def look() -> None:
        with ledger.observing():
            with ledger.observing():
                ledger.add("dp", "a", 1, 1)
            ledger.add("dp", "a", 1, 1)
            raise KeyError

    with pytest.raises(KeyError):
        look()
    ledger.add("dp", "a", 10, 10)
    assert ledger.elements_sent == 10
    assert ledger.observed == Tally({("dp", "a"): Sent(2, 2, 2)})


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_nobody_passes_a_barrier_before_all_have_come(worlds: Any, ranks: int) -> None:
    """Whoever comes last, the others leave after it has come."""

    def fn(comm: Communicator, last: int) -> tuple[float, float]:
        import time

        if comm.rank == last:
            time.sleep(0.02)
        came = time.monotonic()
        comm.barrier()
        return came, time.monotonic()

    for last in range(ranks):
        came, left = zip(*worlds(ranks).run(fn, last), strict=True)
        assert max(came) <= min(left)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_formulas_add_up(n: int, ranks: int) -> None:
    """Over all ranks a ring all-reduce sends 2(N-1)n elements exactly; each rank 2(N-1)n/N where N divides n."""
    sent = [sum(split.ring_elements(n, ranks, rank)) for rank in range(ranks)]
    assert sum(sent) == 2 * (ranks - 1) * n
    if n % ranks == 0:
        assert set(sent) == {2 * (ranks - 1) * n // ranks}
    assert sum(split.broadcast_elements(n, ranks, rank, ranks // 2) for rank in range(ranks)) == (ranks - 1) * n


@pytest.mark.parametrize("bad", [lambda: split.sizes(-1, 2), lambda: split.sizes(3, 0)])
def test_a_split_of_nothing_into_nothing_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"is -?[01];"):
        bad()


def test_long_calls_are_told_apart() -> None:
    """A sentence that is too long for a message's head is cut, but its hash is not."""
    long = "reduce_scatter #1 by " + "1, " * 300
    assert len(shorten(long + "2")) == len(shorten(long + "3")) == TEXT_BYTES - 20 + 3 + 16
    assert shorten(long + "2") != shorten(long + "3")
    assert shorten("all_reduce #1") == b"all_reduce #1"
