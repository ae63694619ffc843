"""What is commonly got wrong, said where a plan does it."""

from __future__ import annotations

from collections.abc import Iterator

from refpar.plan import speed
from refpar.plan.models import Transformer
from refpar.plan.plans import Plan
from refpar.plan.units import gb

SPARSE = {624e12: "A100", 1979e12: "H100", 3958e12: "H100 in fp8", 4500e12: "B200", 9000e12: "B200 in fp8"}


def warnings(plan: Plan) -> Iterator[str]:
    """Yield what is commonly got wrong, where this plan does."""
    setup, hardware, recipe = plan.setup, plan.hardware, plan.recipe
    mine = plan.memory.parts()
    if not plan.fits and mine["weights"] < hardware.usable / 2:
        yield (
            f"the weights are {gb(mine['weights'])} GB and would fit; what training holds beside them is "
            f"{(plan.memory.peak - mine['weights']) / max(1, mine['weights']):.1f} times that"
        )
    if not plan.fits and setup.zero == 0 and setup.dp > 1:
        yield "data parallel does not save memory: every replica holds everything, however many there are"
    if setup.zero and setup.sharing == 1:
        yield f"ZeRO {setup.zero} shards over replicas, and there is one: it saves nothing (DeepSpeed#237)"
    if setup.tp > hardware.per_server:
        yield (
            f"tp {setup.tp} reaches across servers of {hardware.per_server}: its sums wait for the slow network, "
            "in every layer"
        )
    if setup.zero >= 2 and setup.pp > 1:
        yield f"ZeRO {setup.zero} with a pipeline reduces gradients in every micro-batch; ZeRO 1 does so once"
    if setup.pp > 1 and setup.micro_batches < 4 * setup.pp:
        ideal, real = speed.bubble(setup.pp, setup.micro_batches, setup.chunks)
        yield (
            f"{setup.micro_batches} micro-batches for {setup.pp} stages: a bubble of {float(ideal):.0%} of the ideal "
            f"step, {float(real):.0%} of the real one; at least {4 * setup.pp} are advised"
        )
    if recipe.scaled:
        yield "float16 gradients below 2^-24 vanish: keep a dynamic loss scale, or take bfloat16"
    for peak, name in SPARSE.items():
        if abs(hardware.peak / peak - 1) < 0.01:
            yield f"{hardware.peak / 1e12:,.0f} TFLOPS is the {name}'s figure for 2:4 sparsity: dense is half of it"
    yield from uneven(plan)


def uneven(plan: Plan) -> Iterator[str]:
    """Yield what does not divide."""
    setup, model = plan.setup, plan.model
    if setup.batch % (setup.dp * setup.micro_batches):
        parts = f"dp x micro-batches, {setup.dp} x {setup.micro_batches}"
        yield f"a batch of {setup.batch} rows is not a multiple of {parts}: some micro-batches are smaller"
    if not isinstance(model, Transformer):
        return
    if model.heads % setup.tp:
        yield f"tp {setup.tp} does not divide {model.heads} heads: some ranks have more work than others"
    if model.kv_heads < model.heads and model.kv_heads % setup.tp:
        yield f"tp {setup.tp} does not divide {model.kv_heads} key and value heads: ranks hold copies of them"
    if setup.pp > 1 and not setup.stages and model.layers % setup.pp:
        more = model.layers % setup.pp
        yield f"{setup.pp} stages do not divide {model.layers} blocks: the first {more} have one more"
    if setup.tp > 1 and model.vocabulary % (128 * setup.tp):
        padded = model.padded(setup.tp).vocabulary
        yield f"a vocabulary of {model.vocabulary:,} runs faster padded, to {padded:,} for tp {setup.tp}"
