"""``refpar show NAME``: a technique run very small on real ranks, and told in numbers that can be checked by hand.

Every number that is printed comes out of the run (:mod:`refpar.teach.watch`); what a reader is to work out is the
problem (:mod:`refpar.teach.toy`), the sums and the products. At the end all is held to one device, bit for bit.

This file tells of the ring, of data parallel and of ZeRO; :mod:`refpar.teach.show_split` of what splits the model;
:mod:`refpar.teach.show_memory` of checkpointing and fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from refpar import single, split
from refpar.case import Case, HostArray, Layout, Trace
from refpar.comm import ring
from refpar.comm.communicator import Communicator
from refpar.comm.processes import World
from refpar.oracle.compare import compare
from refpar.parallel import data, zero
from refpar.teach import toy
from refpar.teach.recorder import Event, record
from refpar.teach.toy import SHORT, by_name, numbers, table
from refpar.teach.watch import Watched, message, watch

Story = Generator[str, None, bool]
"""Yields lines; returns whether what ran is right."""


def section(title: str) -> list[str]:
    """Return the heading of a part of a story."""
    return ["", title.upper()]


def verdict(trace: Trace, truth: Trace | None = None) -> Generator[str, None, bool]:
    """Tell whether a run has given the bits of one device."""
    comparison = compare(trace, truth or single.train(trace.case), bounds=[])
    yield ""
    if comparison.ok:
        yield f"Equal to one device, bit for bit: {comparison.compared} values."
    else:
        yield f"NOT what one device gives: {comparison}"
    return comparison.ok


# -------------------------------------------------------------------------------------------- the ring

RING = 3, 7
"""Ranks and elements: 7 over 3 is 3, 2 and 2."""


def tell_ring() -> Story:
    """Tell a ring all-reduce, step by step."""
    ranks, n = RING
    inputs = [np.arange(1, n + 1) * 10**rank for rank in range(ranks)]
    counts = split.sizes(n, ranks)
    with World(ranks) as world:
        results, events = zip(*world.run(ring_run), strict=True)
    yield f"All-reduce of {n} numbers on {ranks} ranks: everybody is to have the sum of all {ranks} arrays."
    yield "Read beside this: refpar/comm/ring.py"
    yield from section("each rank's array, in chunks")
    yield "Rank 0 has ones, rank 1 tens, rank 2 hundreds: the digits of a number say whose have been added already."
    yield from table([[f"rank {rank}", barred(array, counts)] for rank, array in enumerate(inputs)])
    steps = [[e for e in happened if e.kind == "wait"] for happened in events]
    halves = ("reduce-scatter: what arrives is added to one's own, and the sum is sent on",
              "all-gather: what arrives is complete; it is kept, and sent on")  # fmt: skip
    for half, title in enumerate(halves):
        yield from section(title)
        rows = [["step", "sends", "to", "gets", "from", "has now"]]
        for step in range(ranks - 1):
            for rank in range(ranks):
                rows.append(ring_step(half, step, rank, steps[rank], results[rank], counts))
        yield from table(rows)
    yield from section("sent")
    elements = [sum(e.sent for e in happened) // 8 for happened in steps]
    expected = [sum(split.ring_elements(n, ranks, rank)) for rank in range(ranks)]
    yield (
        f"Elements: {', '.join(f'rank {r} {sent}' for r, sent in enumerate(elements))}; {sum(elements)} in all, "
        f"which is 2 (N-1) n = 2 * {ranks - 1} * {n}."
    )
    yield f"About 2 (N-1)/N = {2 * (ranks - 1) / ranks:.3g} times the array from each rank; never more than twice."
    right = all(np.array_equal(result, sum(inputs)) for result in results) and elements == expected
    yield ""
    yield f"Every rank has {numbers(results[0])}: {'the sum of all, and as predicted' if right else 'WRONG'}."
    return right


def ring_run(comm: Communicator) -> tuple[HostArray, list[Event]]:
    """All-reduce this rank's array, and record it."""
    mine = np.arange(1, RING[1] + 1) * 10**comm.rank
    return record(comm, ring.all_reduce, (mine,), {}, copies=True)


def ring_step(
    half: int, step: int, rank: int, waits: Sequence[Event], result: HostArray, counts: Sequence[int]
) -> list[str]:
    """Return the row of one rank in one step."""
    ranks = len(counts)
    parts = split.ranges(counts)
    event = waits[half * (ranks - 1) + step]
    sent, got = (message(event.name, data) for data in event.data)
    going, coming = ((rank - step - 1 + half) % ranks, (rank - step - 2 + half) % ranks)
    if half == 0:
        has = numbers(message(event.name, waits[step + 1].data[0]))  # what it sends next is what it has now
    else:
        has = numbers(result[parts[coming].start : parts[coming].stop])
    return [
        f"{step}   rank {rank}",
        f"chunk {going}: {numbers(sent)}",
        f"rank {event.to}",
        f"chunk {coming}: {numbers(got)}",
        f"rank {event.source}",
        f"{has}{'   complete' if half or step == ranks - 2 else ''}",
    ]


# ------------------------------------------------------------------------------- data parallel and ZeRO


def tell_dp() -> Story:
    """Tell data parallel."""
    seen = run(toy.case(), Layout(dp=3))
    yield "Data parallel on 3 ranks: every rank has the whole model, and rows of its own."
    yield "Read beside this: refpar/parallel/data.py"
    yield ""
    yield from toy.problem()
    yield from backward_alone(seen)
    yield from section("one all-reduce")
    yield "The gradients become one flat array, and every rank gets the sum of all three: the same bits everywhere."
    for names, kind, notes in collectives(seen):
        yield f"  {kind.replace('_', '-')} of {spell(names)}"
        yield from table([[f"  rank {r} gives", numbers(given)] for r, (_, given, _, _) in enumerate(notes)])
        yield f"    all get        {numbers(notes[0][2])}"
    yield from update(seen, "the same on every rank")
    yield from section("held and sent")
    yield from held(seen)
    sizes = {name: w.size for name, w in toy.weights().items()}
    model, types = seen.trace.case.model.build(), seen.trace.case.precision
    bucket = seen.trace.layout.bucket
    expected = [data.bytes_sent(model.units, sizes, types, bucket, 3, rank) // 4 for rank in range(3)]
    yield from sent(seen, expected, "2 (N-1) psi = 2 * 2 * 11")
    return (yield from verdict(seen.trace))


def tell_zero(stage: int) -> Story:
    """Tell ZeRO at a stage."""
    dropped = {
        1: "the optimizer's state",
        2: "the optimizer's state and the gradients",
        3: "the optimizer's state, the gradients and the weights",
    }
    seen = run(toy.case(), Layout(dp=3, zero=stage))
    yield f"ZeRO, stage {stage}, on 3 ranks: every rank keeps only what it owns of {dropped[stage]}."
    yield "Read beside this: refpar/parallel/zero.py"
    yield ""
    yield from toy.problem()
    yield from section("who owns what")
    yield "Each parameter is split by itself, near-evenly; numbers are positions in it. Small ones leave some without."
    yield from owners()
    yield from backward_alone(seen, stage)
    yield from section(f"hand over{', unit by unit' if stage > 1 else ''}")
    yield "Reduce-scatter: laid out by owner (a bar between owners), each owner gets the sum of what it owns."
    if stage > 1:
        yield "The rest is dropped before the next unit runs backward."
    for names, kind, notes in collectives(seen):
        if kind == "reduce_scatter":
            yield from told(names, kind, notes)
    yield from update(seen, "each rank what it owns", owned=True)
    if stage < 3:
        yield from section("give back")
        yield "All-gather: everybody gets the new weights from their owners."
        for names, kind, notes in collectives(seen):
            if kind == "all_gather":
                yield from told(names, kind, notes)
    yield from section("held and sent")
    yield from held(seen)
    yield from sent_by_zero(seen, stage)
    return (yield from verdict(seen.trace))


def run(case: Case, layout: Layout) -> Watched:
    """Run a case on ranks of its own, and look."""
    with World(layout.ranks) as world:
        return watch(case, layout, world)


def backward_alone(seen: Watched, stage: int = 0) -> Iterator[str]:
    """Tell the count, and the gradients of each rank's own rows."""
    ranks = range(len(seen.ranks))
    counts = [seen.notes(rank, "all_reduce")[0][1:3] for rank in ranks]
    yield from section("count")
    mine = [int(given[0]) for given, _ in counts]
    rows = [seen.notes(rank, "pass")[0][2] for rank in ranks]
    yield from (f"  rank {r} has rows {numbers(rows[r])}, of which {mine[r]} count" for r in ranks)
    total = f"{' + '.join(map(str, mine))} = {int(counts[0][1][0])}"
    yield f"  in all {total}, known to everybody before anything runs forward"
    if stage == 3:
        yield from section("gather, forward and again backward")
        yield "The weights of a unit are gathered from their owners, used, and dropped; backward they are once more."
        for names, kind, notes in collectives(seen):
            if kind == "all_gather":
                yield from told(names, kind, notes)
    yield from section("backward, each rank its own rows")
    yield "b1 gets 2 (y - target) of each row that counts, W1 that times h; what is masked out gives nothing."
    yield from by_name("", [(f"rank {rank}", dict(seen.notes(rank, "gradient"))) for rank in ranks])
    yield from one_entry(rows[0])


def one_entry(rows: Sequence[int]) -> Iterator[str]:
    """Work out the first entry of the gradient of W0 for some rows."""
    w0, b0, w1, _ = toy.weights().values()
    terms = []
    for row in rows:
        x, target, counts = toy.ROWS[row]
        h = np.maximum(np.array(x) @ w0 + b0, 0)
        error = float((h @ w1)[0] + toy.weights()["layers.1.bias"][0] - target) * counts
        terms.append(
            f"2 * {numbers(error)} * {numbers(w1[0])} * {x[0]} = {numbers(2 * error * w1[0] * x[0] * (h[0] > 0))}"
        )
    yield "For instance the first of W0 on rank 0: each row gives 2 (y - target) W1[0] x[0], where h[0] is above 0,"
    yield f"  {', '.join(f'row {row}: {term}' for row, term in zip(rows, terms, strict=True))}"


def owners() -> list[str]:
    """Return who owns which positions of which parameter."""
    sizes = {name: w.size for name, w in toy.weights().items()}
    rows = [["", *SHORT.values(), "in all"]]
    for rank in range(3):
        owned = [split.part(size, 3, rank) for size in sizes.values()]
        rows.append([f"rank {rank}", *(numbers(list(r)) or "-" for r in owned), str(sum(map(len, owned)))])
    return table(rows)


COLLECTIVES = "all_reduce", "reduce_scatter", "all_gather"
Collective = tuple[list[str], str, list[Any]]


def collectives(seen: Watched, group: str = "dp") -> Iterator[Collective]:
    """Yield the names, the kind, and each rank's ``(group, given, got, counts)``, of the collectives on parameters."""
    by_rank = []
    for happened in seen.ranks:
        names: list[str] = []
        mine = []
        for event in happened:
            if event.kind == "note" and event.name == "names":
                names = event.data
            elif event.kind == "note" and event.name in COLLECTIVES and event.data[0] == group:
                mine.append((names, event.name, event.data))
        by_rank.append(mine)
    for together in zip(*by_rank, strict=True):
        yield together[0][0], together[0][1], [data for _, _, data in together]


def told(names: Sequence[str], kind: str, notes: Sequence[Any]) -> Iterator[str]:
    """Tell a reduce-scatter or an all-gather."""
    counts = notes[0][3]
    yield f"  {kind.replace('_', '-')} of {spell(names)}"
    if kind == "reduce_scatter":
        rows = [[f"  rank {r}", "gives " + barred(note[1], counts), "gets " + (numbers(note[2]) or "-")]
                for r, note in enumerate(notes)]  # fmt: skip
        yield from table(rows)
    else:
        gives = ", ".join(f"rank {r} gives {numbers(note[1]) or 'nothing'}" for r, note in enumerate(notes))
        yield f"    {gives}"
        yield f"    all get {barred(notes[0][2], counts)}"


def update(seen: Watched, who: str, owned: bool = False) -> Iterator[str]:
    """Tell what is updated, and what comes of it."""
    step = seen.trace.steps[0]
    yield from section(f"update, {who}")
    bars = " (bars between owners)" if owned else ""
    yield f"The gradients are divided by the count, {step.count}, and subtracted: the learning rate is 1{bars}."
    rows = [["", *SHORT.values()]]
    for label, values in (("w", toy.weights()), (f"g / {step.count}", step.gradients), ("new w", step.parameters)):
        shown = (values[name].reshape(-1) for name in SHORT)
        rows.append([label, *(barred(v, split.sizes(v.size, 3)) if owned else numbers(v) for v in shown)])
    yield from table(rows)


def held(seen: Watched) -> Iterator[str]:
    """Tell what each rank keeps from step to step."""
    rows = [["elements", "weights", "gradients", "momentum", "in all"]]
    for rank in range(len(seen.ranks)):
        amounts = seen.notes(rank, "held")[0]
        kept = [amounts["weights"], amounts["gradients"], seen.notes(rank, "state")[0]]
        rows.append([f"rank {rank} holds", *map(str, kept), str(sum(kept))])
    yield from table(rows)


def sent(seen: Watched, expected: Sequence[int], formula: str, group: str = "dp") -> Iterator[str]:
    """Tell what each rank has sent for the technique, beside what it must have sent."""
    elements = seen.elements_sent(group)
    word = "as predicted" if elements == list(expected) else f"PREDICTED {expected}"
    each = ", ".join(f"rank {r} {n}" for r, n in enumerate(elements))
    yield f"  sent: {each} elements; {sum(elements)} in all = {formula}; {word}"


def sent_by_zero(seen: Watched, stage: int) -> Iterator[str]:
    """Tell where the 2 and the 3 come from."""
    sizes: list[Mapping[str, int]] = [
        {name: w.size for name, w in toy.weights().items() if name.startswith(unit)}
        for unit in ("layers.0", "layers.1")
    ]
    expected = [sum(zero.elements_sent(sizes, stage, 1, 3, rank)) for rank in range(3)]
    times = 3 if stage == 3 else 2
    yield from sent(seen, expected, f"{times} (N-1) psi = {times} * 2 * 11")
    if stage < 3:
        yield "        reduce-scatter and all-gather each send (N-1) psi: together what one all-reduce sends"
    else:
        yield "        weights forward, weights backward, gradients: (N-1) psi each, 1.5 times an all-reduce"


def spell(names: Sequence[str]) -> str:
    """Return the short names of parameters."""
    return " ".join(SHORT.get(name, name) for name in names)


def barred(values: HostArray, counts: Sequence[int]) -> str:
    """Return numbers with a bar between the parts."""
    flat = values.reshape(-1)
    return " | ".join(numbers(flat[r.start : r.stop]) or "-" for r in split.ranges(counts))


def stories() -> Mapping[str, Callable[[], Story]]:
    """Return every story by name."""
    from refpar.teach import show_memory, show_split

    return {
        "ring": tell_ring,
        "dp": tell_dp,
        "zero1": lambda: tell_zero(1),
        "zero2": lambda: tell_zero(2),
        "zero3": lambda: tell_zero(3),
        "tp": show_split.tell_tp,
        "pp": show_split.tell_pp,
        "checkpoint": show_memory.tell_checkpoint,
        "fp16": show_memory.tell_fp16,
        "hybrid": show_split.tell_hybrid,
    }


def tell(name: str) -> tuple[list[str], bool]:
    """Run the technique ``name`` and return its story, and whether what ran is right."""
    story = stories()[name]()
    lines = []
    while True:
        try:
            lines.append(next(story))
        except StopIteration as end:
            return lines, bool(end.value)
