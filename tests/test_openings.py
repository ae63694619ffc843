"""What a technique file says of itself in numbers, before its code begins, is what a run gives."""

from dataclasses import replace
from types import ModuleType

import numpy as np
import on_openings
import pytest
from truth import Worlds

from refpar import optim, precision
from refpar.case import Batch, Case, Layout
from refpar.comm import ring
from refpar.nn import checkpoint
from refpar.nn.layer import ParamSpec
from refpar.nn.models import GPT
from refpar.parallel import assembly, data, hybrid, mesh, pipeline, placement, schedule, tensor, traffic, zero
from refpar.parallel.simulator import render, simulate
from refpar.precision import Precision
from refpar.teach import toy


def says(module: ModuleType, *texts: str) -> None:
    """Assert that the opening of ``module`` has each of the texts, wherever its lines break."""
    opening = " ".join((module.__doc__ or "").split())
    for text in texts:
        assert " ".join(text.split()) in opening, f"{module.__name__} does not open with {text!r}"


def gpt(**fields: object) -> Case:
    """Return a step of a GPT of one block, 10 wide with 5 heads, on 2 rows of 4 tokens."""
    model = replace(GPT(vocabulary=7, context=4, width=10, layers=1, heads=5), **fields)
    tokens = np.arange(8).reshape(2, 4) % 7
    return Case(model, optim.SGD(lr=0.5), (Batch(tokens, tokens, np.ones((2, 4), bool)),))


def sent(case: Case, layout: Layout, worlds: Worlds, group: str) -> list[int]:
    """Return the elements that each rank sends in a group."""
    return [ledger.total(group).elements for ledger in hybrid.run(case, layout, world=worlds(layout.ranks)).ledgers]


def test_ring(worlds: Worlds) -> None:
    """A sum, not a mean; and what 7 elements cost 3 ranks."""
    sums, elements = zip(*worlds(3).run(on_openings.sum_of_seven), strict=True)
    assert set(map(tuple, sums)) == {(6.0,) * 7}
    a, b, c = elements
    says(ring, f"the ranks send {a}, {b} and {c}: {a + b + c} in all", "leaves the *sum*", "never the mean")


def test_data_parallel(worlds: Worlds) -> None:
    """7 rows and 7 elements on 3 ranks; 4 bytes an element of a sum, 2 of a result."""
    ranks = [elements for _, [(elements, _), *_] in worlds(3).run(on_openings.seven, 0, "float32")]
    halves = [nbytes for _, [(_, nbytes), *_] in worlds(3).run(on_openings.seven, 0, "float16")]
    results = [(4 * n - nbytes) // 2 for n, nbytes in zip(ranks, halves, strict=True)]  # 4 sums + 2 results
    sums = [n - r for n, r in zip(ranks, results, strict=True)]
    says(data, "sums " + " ".join(f"sends {n}" for n in sums), "results " + " ".join(f"sends {n}" for n in results))
    rows = [" ".join(map(str, placement.rows(7, 3, rank))) for rank in range(3)]
    says(
        data, f"rows {' '.join(rows)} gradients", f"chunks {' '.join(rows)} of about", "sums have 4 bytes and results 2"
    )


def test_zero_owners(worlds: Worlds) -> None:
    """Who owns what of 7 elements, and of the 11 of four small parameters."""
    sizes = {name: spec.shape for name, spec in toy.case().model.build().specs.items()}
    sevens = worlds(3).run(on_openings.seven, 1, "float32")
    for rank, (own, _) in enumerate(sevens):
        parts = [zero.owned(int(np.prod(shape)), 3, rank) for shape in sizes.values()]
        cells = [" ".join(map(str, part)) or "-" for part in (own, *parts)]
        says(zero, f"rank {rank} owns {' '.join(cells)} {sum(map(len, parts))}")
    header = " ".join(f"{toy.SHORT[name]} {shape}" for name, shape in sizes.items())
    says(zero, f"on 3 ranks of 7 of {header} of these 11")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sends(worlds: Worlds, stage: int) -> None:
    """What each of 3 ranks scatters and gathers of 7 elements; and in bytes, of which 1.5 is 4/3."""
    ranks = [
        (scattered, gathered) for _, [_, scattered, gathered] in worlds(3).run(on_openings.seven, stage, "float16")
    ]
    cells = [f"{s}+{g}" if stage < 3 else f"{s}+{g // 2}+{g - g // 2}" for (s, _), (g, _) in ranks]
    says(zero, f"psi {' '.join(cells)} {sum(s + g for (s, _), (g, _) in ranks)}")
    nbytes = sum(s + g for (_, s), (_, g) in ranks)
    assert nbytes == {1: 4 + 2, 2: 4 + 2, 3: 4 + 2 + 2}[stage] * 2 * 7
    says(zero, "it is (4+2+2)/(4+2) = 4/3")


@pytest.mark.parametrize(("stage", "held"), [(0, 16), (1, "4 + 12/N"), (2, "2 + 14/N"), (3, "16 psi / N")])
def test_bytes_a_parameter(worlds: Worlds, stage: int, held: int | str) -> None:
    """What a rank holds from step to step in mixed precision, from the elements that it owns; and in other types."""
    case = replace(toy.case(), optimizer=optim.Adam(lr=1.0))
    own = [5, 4, 2] if stage else [11, 11, 11]
    kept, shared = {0: (0, 16), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
    halves = hybrid.run(replace(case, precision=Precision("float16")), Layout(dp=3, zero=stage), world=worlds(3))
    assert halves.bytes_held == [kept * 11 + shared * n for n in own]
    says(zero, {0: "16 psi stage 1", 3: str(held)}.get(stage, f"({held}) psi"))
    if stage == 0:
        wide, single = Precision("float16", gradients="float32"), Precision("float32")
        traces = [hybrid.run(replace(case, precision=p), Layout(dp=3), world=worlds(3)) for p in (wide, single)]
        assert [trace.bytes_held[0] / 11 for trace in traces] == [18, 16]
        says(precision, "2 + 2 + 12 = 16 bytes a parameter, 18 where gradients are stored in float32, and 16 where all")
        says(data, "16 bytes a parameter")


def test_tensor_parallel(worlds: Worlds) -> None:
    """Elements of the embedding and head, of a block, of a recomputed block; and 5 heads on 2 ranks."""
    ends, block = sent(gpt(layers=0), Layout(tp=2), worlds, "tp"), sent(gpt(), Layout(tp=2), worlds, "tp")
    again = sent(gpt(), Layout(tp=2, recompute="block"), worlds, "tp")
    assert ends == [8 * (10 + 10 + 3)] * 2
    assert [b - e for b, e in zip(block, ends, strict=True)] == [8 * (2 * 10 + 2 * 10)] * 2
    assert [a - b for a, b in zip(again, block, strict=True)] == [8 * 2 * 10] * 2
    says(tensor, f"8 (10 + 40 + 10 + 3) = {block[0]} elements from each")
    heads = [len(placement.positions(ParamSpec((5,), 0), 2, t)) for t in range(2)]
    says(tensor, f"of 5 heads rank 0 of 2 has {heads[0]}, and rank 1 has {heads[1]}")
    with pytest.raises(ValueError, match="every rank needs at least one"):
        hybrid.run(gpt(heads=1), Layout(tp=2), world=worlds(2))


def test_pipeline(worlds: Worlds) -> None:
    """Three messages each way, the last of them empty; a tied weight's gradient is on both stages, once."""
    case = gpt()
    trace = hybrid.run(case, Layout(pp=2, micro_batches=3), world=worlds(2))
    messages = [4 * 10 * len(rows) for rows in placement.micro_batches(range(2), 3)]
    assert [(s.messages, s.elements) for s in (ledger.total("pp") for ledger in trace.ledgers)] == [
        (3, sum(messages))
    ] * 2
    says(pipeline, "are messages of {}, {} and {}".format(*messages))
    says(pipeline, "(3 units on 2 stages are {} and {})".format(*map(len, schedule.stages_of(3, 2))))
    assert [ledger.total("tied").elements for ledger in trace.ledgers] == [7 * 10] * 2
    assert sent(gpt(tied=False), Layout(pp=2, micro_batches=3), worlds, "tied") == [0, 0]


def test_schedule() -> None:
    """Both drawings are what the simulator draws of the lists; the bubble by both definitions; the messages."""
    for name, lists in (("gpipe(3, 4)", schedule.gpipe(3, 4)), ("one_f_one_b(3, 4)", schedule.one_f_one_b(3, 4))):
        simulation = simulate(lists)
        header, *stages = render(simulation).splitlines()
        says(schedule, f"{name} {header}", *stages)
        says(schedule, f"{simulation.bubble_of_step} above", f"{simulation.bubble_of_ideal} above")
        sends = [i for stage in lists for i in stage if isinstance(i, schedule.SendActivation | schedule.SendGradient)]
        says(schedule, f"{len(sends)} messages above")
    says(schedule, "{}, {} and {} of 7 units".format(*map(len, schedule.stages_of(7, 3))))


def test_checkpoint() -> None:
    """6 blocks that keep three times their input, alone and in pairs; and where the square root is best."""
    alone, pairs = (row.bytes for row in checkpoint.trade(6, 3, 1) if row.k in (0, 2))
    says(checkpoint, f"At B = 3 A that is {pairs} A here, and without it {alone} A")
    square = [row.bytes for row in checkpoint.trade(36, 1, 1)]
    assert square[6] == min(square[1:]) == 2 * 6
    assert [
        checkpoint.trade(blocks, 17, 1)[2].bytes - checkpoint.trade(blocks, 17, 1)[1].bytes for blocks in (34, 36)
    ] == [0, -1]


def test_halves() -> None:
    """What float16 loses: 2^-25, and 2^-12 of any weight, though not 2^-11; and what a scale of 2^15 keeps."""
    assert np.float16(2.0**-25) == 0 < np.float16(1.001 * 2.0**-25)
    assert np.float16(2.0**-25 * 2.0**15) == 2.0**-10
    weights = np.arange(1024, 2048).astype(np.float16) / np.float16(1024)  # every half from 1 up to 2
    update = weights.astype(np.float32) * 2.0**-12
    for sign in (1, -1):
        assert (weights + (sign * update).astype(np.float16) == weights).all()
    assert (weights[1:] + (2 * update[1:]).astype(np.float16) != weights[1:]).all()
    says(precision, "A gradient of 2^-25 or less is zero", "one of 2^-25 is stored as 2^-10", "an update of 2^-12")


def test_placement() -> None:
    """The rows of each micro-batch, and whose each element of a weight is."""
    for d in range(3):
        parts = placement.micro_batches(placement.rows(5, 3, d), 2)
        says(placement, f"d={d}: " + " | ".join(" ".join(map(str, part)) or "none" for part in parts))
    held = [placement.positions(ParamSpec((3, 5), 1), 2, t) for t in range(2)]
    table = [" ".join(map(str, part)) for row in range(3) for part in (h.reshape(3, -1)[row] for h in held)]
    says(placement, "flat positions " + " ".join(table) + " and with ZeRO")
    for d in range(2):
        mine = [[str(h[i]) for i in zero.owned(len(h), 2, d)] for h in held]
        says(placement, f"d={d} owns {' '.join(mine[0])} {' '.join(mine[1])}")


def test_mesh() -> None:
    """The rank's number, and whom rank 5 talks to."""
    layout = Layout(dp=2, tp=2, pp=2)
    places = [mesh.place(layout, rank) for rank in range(8)]
    assert [(p * 2 + d) * 2 + t for d, t, p in places] == list(range(8))
    d, t, p = places[5]
    tp, dp, pp = (
        [r for r, at in enumerate(places) if at[:i] + at[i + 1 :] == (d, t, p)[:i] + (d, t, p)[i + 1 :]]
        for i in (1, 0, 2)
    )
    says(mesh, "in rank 5 ``tp`` {} {}, ``dp`` {} {} and ``pp`` {} {}".format(*tp, *dp, *pp))


def test_traffic(worlds: Worlds) -> None:
    """Bytes an element, of every group, in a mixed-precision step of everything together."""
    case = replace(gpt(), precision=Precision("float16"))
    trace = hybrid.run(case, Layout(dp=2, tp=2, pp=2, zero=1), world=worlds(8))
    size: dict[tuple[str, str], float] = {}
    for key in trace.ledgers[0].sent:
        entries = [ledger.sent[key] for ledger in trace.ledgers if key in ledger.sent]
        size[key] = sum(s.bytes for s in entries) / sum(s.elements for s in entries)
    assert size == {
        ("dp", "reduce_scatter"): 4,
        ("dp", "all_gather"): 2,
        ("tp", "all_reduce"): 4,
        ("pp", "send"): 2,
        ("tied", "all_reduce"): (4 + 2) / 2,
        ("world", "all_reduce"): 8,
    }
    says(
        traffic,
        "on their way to owners or to all 4",
        "weights from their owners 2",
        "4 to sum, 2 to give",
        "flag (three) 8",
    )
    says(hybrid, "(``world``, 8 bytes a number)")


def test_assembly() -> None:
    """Who speaks for which of 7 elements: the first of those that hold the same, or each for its own."""
    own = [" ".join(map(str, zero.owned(7, 3, rank))) for rank in range(3)]
    says(assembly, "data parallel 0 1 .. 6 none none", f"ZeRO {' '.join(own)} each")
