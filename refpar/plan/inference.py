"""Memory of a model that only answers: weights in 16, 8 or 4 bits, and the cache of keys and values.

A parameter takes 2, 1 or half a byte: 70 B are 140 GB, or 35 GB in 4 bits. Quantisation keeps a scale, and at 4 bits a
zero point, for each group of weights; with a model of known shape these are lines of their own, and embedding, head
and norms stay in 16 bits, as they usually do.

The cache takes ``2 x layers x kv_heads x head_dim`` numbers a token, for every token of every sequence at hand:
819,200 bytes a token for OPT-13B in fp16 (Kwon et al. 2023, section 3). A tensor-parallel rank has its heads' share
of it, and where there are fewer heads than ranks, one whole head.

Every new token reads all weights and the cache once, so ``bytes / bandwidth`` is the least time for it. Published
figures of 17.07 ms for a 13B model on an A100 are that bound; measured were 22.0 ms.
"""

from __future__ import annotations

import math

from refpar.plan.ledger import ALWAYS, Line
from refpar.plan.models import Bare, Model, Transformer, network
from refpar.plan.tensors import Grid
from refpar.plan.units import size

TYPES = {16: "float16", 8: "int8", 4: "int4"}
GROUP = 128


def lines(
    model: Model, bits: int, *, tp: int = 1, pp: int = 1, tokens: int = 0, sequences: int = 1, cache_bits: int = 16
) -> list[Line]:
    """Return what the most loaded device holds.

    Parameters
    ----------
    bits : of a weight: 16, 8 or 4
    tp, pp : slices and stages
    tokens : of each sequence, prompt and answer together; 0 for the model's context
    sequences : how many at once
    cache_bits : of a number in the cache
    """
    if bits not in TYPES or cache_bits not in TYPES:
        raise ValueError(f"bits is {bits}, cache_bits {cache_bits}: each must be 16, 8 or 4")
    if isinstance(model, Bare):
        return [Line("weights", "parameters", "", (-(-model.size // (tp * pp)),), TYPES[bits], 1, "", "always", ALWAYS)]
    found = []
    blocks = 0
    grid = Grid(0, 0, tp)
    units = network(model).units
    seen: dict[str, tuple[tuple[int, ...], str, int]] = {}
    for unit in units:
        if unit.kind.name == "block":
            blocks += 1
            if blocks > -(-(len(units) - 2) // pp):
                continue
        for tensor in unit.kind.parameters:
            name = tensor.name.replace("*", "blocks.*" if unit.kind.name == "block" else unit.name)
            matrix = unit.kind.name == "block" and len(tensor.shape) > 1 and name.endswith(".weight")
            count = seen.get(name, ((), "", 0))[2] + 1 if "*" in name else 1
            seen[name] = tensor.local(grid), TYPES[bits] if matrix else "float16", count
    sharded = f"tp {tp}" if tp > 1 else "whole"
    for name, (shape, dtype, count) in seen.items():
        found.append(Line("weights", name, "", shape, dtype, count, sharded, "always", ALWAYS))
        if dtype != "float16":
            groups = -(-math.prod(shape) // GROUP) * (2 if bits == 4 else 1)
            found.append(Line("weights", name, "scales", (groups,), "float16", count, sharded, "always", ALWAYS))
    if isinstance(model, Transformer):
        heads = -(-model.kv_heads // tp)
        shape = (sequences, tokens or model.context, 2, heads, model.head_dim)
        layers = -(-model.layers // pp)
        found.append(
            Line("cache", "keys and values", "", shape, TYPES[cache_bits], layers, sharded, "a request", ALWAYS)
        )
    return found


def cache_bytes(model: Transformer, bits: int = 16) -> int:
    """Return the bytes of keys and values of one token, on all devices together."""
    return size(2 * model.layers * model.kv_heads * model.head_dim, TYPES[bits])


def least_seconds(found: list[Line], bandwidth: float) -> float:
    """Return the least time of a token, at so many bytes a second of memory bandwidth."""
    return sum(line.bytes for line in found) / bandwidth
