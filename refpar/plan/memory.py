"""What each rank holds, and which one holds most: the ledger of a rank, from a model, a setup and a recipe.

::

    weights        whole; at ZeRO 3 what this rank owns                                   states.py
    gradients      whole; from ZeRO 2 on what this rank owns
    optimizer      master weights and moments: whole, or from ZeRO 1 on what it owns
    buffers        what is on its way between layers, gradients and owners
    activations    what layers keep for the backward pass, by micro-batch in flight       activations.py

Splits are near-even, the first parts longer, so the first rank of a stage is its most loaded one; and of stages with
the same units the first has the most micro-batches in flight. 10^5 ranks have a handful of kinds.

Eight peaks measured with Megatron-LM on B200 devices (SimuMax v1.2, 28 to 87 GiB) come out within 2 %, with nothing
fitted. Not on the ledger: gradients of activations on their way, workspaces of kernels, fragmentation, the process.
"""

from __future__ import annotations

from functools import lru_cache

from refpar.plan.activations import activations
from refpar.plan.ledger import RankMemory
from refpar.plan.models import Model
from refpar.plan.recipes import Recipe
from refpar.plan.setups import Place, Setup, check, distinct, network_of
from refpar.plan.states import states


@lru_cache(maxsize=1024)
def most_loaded(model: Model, setup: Setup, recipe: Recipe) -> RankMemory:
    """Return the rank that needs the most memory: the first one of the stage that does."""
    check(model, setup)
    kinds = distinct(network_of(model, setup), setup)
    ranks = (of_rank(model, setup, recipe, setup.rank(Place(p, 0, 0))) for p in kinds)
    return max(ranks, key=lambda rank: rank.peak)


def by_stage(model: Model, setup: Setup, recipe: Recipe) -> list[RankMemory]:
    """Return the most loaded rank of each stage."""
    return [of_rank(model, setup, recipe, setup.rank(Place(p, 0, 0))) for p in range(setup.pp)]


def of_rank(model: Model, setup: Setup, recipe: Recipe, rank: int) -> RankMemory:
    """Return the ledger of one rank.

    Raises
    ------
    ValueError
        Where the setup cannot run the model.
    """
    check(model, setup)
    place, net = setup.place(rank), network_of(model, setup)
    lines = (*states(net, model, setup, recipe, place), *activations(net, model, setup, recipe, place))
    return RankMemory(rank, place, lines)
