"""Seconds of collectives, by latency and bandwidth.

A message of S bytes takes ``alpha + S beta``. From that alone, for n ranks that each have S bytes:

=====================  ======================================================  ==================================
all-reduce             seconds                                                 best for
=====================  ======================================================  ==================================
ring                   2 (n-1) alpha + 2 (n-1)/n S beta                        large S
tree                   2 log2(n) (alpha + S beta)                              reduce, then broadcast, unpipelined
double tree            2 log2(n) alpha + 2 S beta                              small S, many ranks (NCCL)
recursive doubling     log2(n) (alpha + S beta)                                smallest S
halving and doubling   2 log2(n) alpha + 2 (n-1)/n S beta                      on a network without bottlenecks
hierarchical           reduce-scatter in each server, ring of S/g across       several ranks a server
                       servers, all-gather in each server
=====================  ======================================================  ==================================

Reduce-scatter and all-gather are half a ring. Where sums are made in software, each byte that is added takes
``gamma`` more. Patarasuk & Yuan 2009 (ring); Thakur, Rabenseifner & Gropp 2005 (doubling, halving); Sanders,
Speck & Traff 2009 (double tree). :func:`fit` finds the constants of a machine from measured rings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Link:
    """Between two ranks: seconds a message, seconds a byte, and seconds for each byte that is added up."""

    alpha: float
    beta: float
    gamma: float = 0.0

    @classmethod
    def of(cls, rate: float, latency: float = 5e-6) -> Link:
        """Return a link of so many bytes a second."""
        return cls(latency, 1 / rate)


def ring(S: float, n: int, link: Link) -> float:
    """Return the time of a ring all-reduce."""
    return reduce_scatter(S, n, link) + all_gather(S, n, link)


def reduce_scatter(S: float, n: int, link: Link) -> float:
    """Return the time of a ring reduce-scatter of S bytes a rank."""
    return (n - 1) * link.alpha + (n - 1) / n * S * (link.beta + link.gamma)


def all_gather(S: float, n: int, link: Link) -> float:
    """Return the time of a ring all-gather, of S bytes once gathered."""
    return (n - 1) * link.alpha + (n - 1) / n * S * link.beta


def tree(S: float, n: int, link: Link) -> float:
    """Return the time of a reduction to one rank and a broadcast from it, along binary trees, S at a time."""
    return math.ceil(math.log2(n)) * (2 * (link.alpha + S * link.beta) + S * link.gamma)


def double_tree(S: float, n: int, link: Link) -> float:
    """Return the time of an all-reduce along two trees that share the work, in small pieces."""
    return 0.0 if n == 1 else 2 * math.log2(n) * link.alpha + S * (2 * link.beta + link.gamma)


def recursive_doubling(S: float, n: int, link: Link) -> float:
    """Return the time of log2(n) exchanges of everything."""
    return math.ceil(math.log2(n)) * (link.alpha + S * (link.beta + link.gamma))


def halving_doubling(S: float, n: int, link: Link) -> float:
    """Return the time of Rabenseifner's all-reduce: partners at distance 1, 2, 4, ... and back."""
    return 2 * math.log2(n) * link.alpha + (n - 1) / n * S * (2 * link.beta + link.gamma)


def hierarchical(S: float, inside: int, servers: int, intra: Link, inter: Link) -> float:
    """Return the time of an all-reduce over ``inside * servers`` ranks, each link as one rank sees it."""
    return (
        reduce_scatter(S, inside, intra) + ring(S / inside, servers, inter) + all_gather(S, inside, intra)
    )  # fmt: skip


def broadcast(S: float, n: int, link: Link) -> float:
    """Return the time of a broadcast along a chain, in small pieces."""
    return 0.0 if n == 1 else (n - 1) * link.alpha + S * link.beta


def point_to_point(S: float, link: Link) -> float:
    """Return the time of one message."""
    return link.alpha + S * link.beta


FLAT: Mapping[str, Callable[[float, int, Link], float]] = {
    "ring": ring,
    "double tree": double_tree,
    "recursive doubling": recursive_doubling,
}


def all_reduce(S: float, n: int, link: Link) -> tuple[float, str]:
    """Return the shortest time of an all-reduce over one kind of link, and the algorithm that has it."""
    return min((time(S, n, link), name) for name, time in FLAT.items())


def crossover(n: int, link: Link) -> float:
    """Return the bytes above which a ring is faster than a double tree: ``n (n - 1 - log2 n) alpha / beta``."""
    return n * (n - 1 - math.log2(n)) * link.alpha / link.beta


def bus_bandwidth(S: float, n: int, seconds: float, operation: str = "all_reduce") -> float:
    """Return bytes a second through each link, as nccl-tests counts them; comparable between numbers of ranks."""
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}.get(operation, (n - 1) / n)
    return S / seconds * factor


def fit(measured: Sequence[tuple[int, float, float]]) -> Link:
    """Return the link that explains measured rings best: least squares of *relative* errors, nothing negative.

    Parameters
    ----------
    measured : (ranks, bytes, seconds) of ring all-reduces. ``gamma`` cannot be told from ``beta`` by rings
        alone and is part of it.
    """
    rows = np.array([[2 * (n - 1) / t, 2 * (n - 1) / n * S / t] for n, S, t in measured if n > 1])
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} measurements of more than one rank: two constants need at least 2")
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
    if alpha < 0:
        alpha, beta = 0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())
    if beta < 0:
        alpha, beta = float(rows[:, 0].sum() / (rows[:, 0] ** 2).sum()), 0.0
    return Link(alpha, beta)


def piecewise(measured: Sequence[tuple[int, float, float]]) -> Callable[[int, float], float]:
    """Return a predictor ``(ranks, bytes) -> seconds`` with two regimes, the split chosen to fit best.

    One latency and one bandwidth cannot describe both messages that stay in cache and messages that do not.
    """
    sizes = sorted({S for _, S, _ in measured})

    def error(link: Link, part: Sequence[tuple[int, float, float]]) -> float:
        return sum((ring(S, n, link) / t - 1) ** 2 for n, S, t in part)

    best: tuple[float, float, Link, Link] | None = None
    for cut in sizes[2:-1]:
        small, large = [m for m in measured if m[1] < cut], [m for m in measured if m[1] >= cut]
        links = fit(small), fit(large)
        total = error(links[0], small) + error(links[1], large)
        if best is None or total < best[0]:
            best = total, cut, *links
    if best is None:
        link = fit(measured)
        return lambda n, S: ring(S, n, link)
    _, cut, small_link, large_link = best
    return lambda n, S: ring(S, n, large_link if cut <= S else small_link)
