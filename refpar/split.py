"""The one split rule, and what a ring sends under it.

``n`` things over ``parts`` parts: near-even, the first ``n % parts`` one longer, as
``numpy.array_split`` does it. Nothing is padded, so no padding can leak; parts may be empty::

    sizes(5, 4) == [2, 1, 1, 1]        sizes(2, 4) == [1, 1, 0, 0]

Everything that is split in refpar is split so: rows over replicas, a parameter over the owners of
its shards, an array over the steps of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def sizes(n: int, parts: int) -> list[int]:
    """Return the length of each part."""
    _check(n, parts)
    quotient, longer = divmod(n, parts)
    return [quotient + 1] * longer + [quotient] * (parts - longer)


def ranges(counts: Sequence[int]) -> list[range]:
    """Return the indices of each part, for parts of the given lengths one after another."""
    return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


def part(n: int, parts: int, index: int) -> range:
    """Return the indices of part ``index``: of 5 over 3 they are ``0 1``, ``2 3``, ``4``."""
    _check(n, parts)
    quotient, longer = divmod(n, parts)
    index = range(parts)[index]
    start = index * quotient + min(index, longer)
    return range(start, start + quotient + (index < longer))


def ring_elements(n: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return how many elements ``rank`` sends in the two halves of a ring all-reduce of ``n``.

    In the first (reduce-scatter) a rank sends every chunk but its own, in the second (all-gather)
    every chunk but its right neighbour's; over all ranks that is ``2 (ranks - 1) n``, exactly. One
    rank sends nothing.
    """
    return n - len(part(n, ranks, rank)), n - len(part(n, ranks, (rank + 1) % ranks))


def broadcast_elements(n: int, ranks: int, rank: int, root: int) -> int:
    """Return how many elements ``rank`` sends in a broadcast of ``n``: all, but for the last of the chain."""
    return n if (rank - root) % ranks < ranks - 1 else 0


def _check(n: int, parts: int) -> None:
    if parts < 1:
        raise ValueError(f"parts is {parts}; a split needs at least 1")
    if n < 0:
        raise ValueError(f"n is {n}; nothing can be split that has a negative length")
