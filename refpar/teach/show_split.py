"""The stories of what splits the model: tensor parallel, pipelines, and all of it together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from refpar import split
from refpar.case import HostArray, Layout
from refpar.parallel import mesh, placement, schedule, simulator
from refpar.teach import toy
from refpar.teach.show import Story, collectives, run, section, sent, spell, update, verdict
from refpar.teach.toy import SHORT, by_name, matrix, numbers, table
from refpar.teach.watch import Watched, is_set_up, message


def tell_tp() -> Story:
    """Tell tensor parallel."""
    seen = run(toy.case(), Layout(tp=2))
    yield "Tensor parallel on 2 ranks: each has a slice of every layer, and all rows."
    yield "Read beside this: refpar/parallel/tensor.py"
    yield ""
    yield from toy.problem()
    yield from section("who holds what")
    yield "W0 is cut by its outputs (column-parallel) and W1 by its inputs (row-parallel); b1 is whole on both."
    yield from by_name("", [(f"rank {rank}", seen.notes(rank, "start")[0]) for rank in range(2)])
    yield from section("forward")
    yield "Each rank has one column of W0, hence one of h; times its row of W1 that is a part of each y, without b1."
    partial, whole = [seen.notes(rank, "g")[0][0] for rank in range(2)], seen.notes(0, "g")[0][1]
    h = hidden()
    yield from table(
        [
            ["", *(f"row {row}" for row in range(len(h)))],
            *([f"h[{r}] on rank {r}", *map(numbers, h[:, r])] for r in range(2)),
            *([f"h[{r}] W1[{r}], rank {r} gives", *map(numbers, partial[r][:, 0])] for r in range(2)),
            ["g: all-reduce, both get", *map(numbers, whole[:, 0])],
            ["+ b1, once: y", *map(numbers, whole[:, 0] + toy.weights()["layers.1.bias"])],
        ]
    )
    yield from section("backward")
    yield "Both have all of y, hence all of its gradient; each gets the gradients of what it holds."
    yield from by_name("", [(f"rank {rank}", dict(seen.notes(rank, "gradient"))) for rank in range(2)])
    yield "f: each rank knows only what its own h contributes to the gradient of x, so these are summed."
    parts = [seen.notes(rank, "f")[0] for rank in range(2)]
    rows = [[f"rank {rank} gives", matrix(part[0])] for rank, part in enumerate(parts)]
    yield from table([*rows, ["all-reduce, both get", matrix(parts[0][1])]])
    yield "x is the input, so nobody needs it here; in a block of a network the layer before does."
    yield from update(seen, "each rank what it holds")
    yield from section("sent")
    numbers_sent = [sum(sum(split.ring_elements(n, 2, rank)) for n in (5, 15)) for rank in range(2)]
    yield from sent(seen, numbers_sent, "2 (N-1) of each: 2 * (5 + 15)", "tp")
    return (yield from verdict(seen.trace))


def hidden() -> HostArray:
    """Return h of every row."""
    w0, b0, _, _ = toy.weights().values()
    x = np.array([row[0] for row in toy.ROWS])
    return np.asarray(np.maximum(x @ w0 + b0, 0))


def tell_pp() -> Story:
    """Tell a pipeline."""
    K, M = 2, 3
    seen = run(toy.case(), Layout(pp=K, micro_batches=M))
    yield f"A pipeline of {K} stages: the first has W0 and b0, the second W1 and b1; {M} micro-batches flow through."
    yield "Read beside this: refpar/parallel/schedule.py, then pipeline.py"
    yield ""
    yield from toy.problem()
    yield from section("schedule, 1F1B")
    lists = schedule.one_f_one_b(K, M)
    yield from (f"  {line}" for line in simulator.render(simulator.simulate(lists)).splitlines())
    bubble = simulator.simulate(lists)
    lives = [simulator.peak_live(instructions) for instructions in lists]
    yield (
        f"  idle {bubble.bubble_of_step} of the step, (K-1)/(M+K-1); "
        f"alive at most {lives[0]} micro-batches on stage 0, {lives[1]} on stage 1"
    )
    for stage in range(K):
        yield from section(f"what stage {stage} did")
        yield from table([[what, value] for what, value in pipeline_events(seen.ranks[stage])])
    yield from section("sum")
    yield "Each stage has added up its own gradients over the micro-batches; nobody else needs them."
    rows = [(f"stage {stage}", summed(seen.notes(stage, "gradient"))) for stage in range(K)]
    yield from by_name("", rows)
    yield from update(seen, "each stage what it holds")
    yield from section("sent")
    yield from sent(seen, [10, 10], "5 rows of 2 each way, in 3 messages", "pp")
    return (yield from verdict(seen.trace))


def pipeline_events(events: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield what a stage did, in order, with the numbers it sent and received."""
    for event in events:
        if event.kind == "note" and event.name == "pass":
            letter, m, rows = event.data
            yield f"{letter}{m}   {'forward' if letter == 'F' else 'backward'}, rows {numbers(rows)}", ""
        elif event.kind in ("send", "wait") and " in pp" in event.name and event.name.startswith("send"):
            out, back = event.data
            if is_set_up(event):
                continue
            what = "activation" if event.to == 1 or event.source == 0 else "gradient"
            if out or event.kind == "send":
                yield f"     send {what} to stage {event.to}", matrix(message(event.name, out))
            else:
                yield f"     receive {what} from stage {event.source}", matrix(message(event.name, back))


def summed(gradients: Sequence[tuple[str, HostArray]]) -> dict[str, HostArray]:
    """Return the sums by name."""
    sums: dict[str, HostArray] = {}
    for name, g in gradients:
        sums[name] = sums.get(name, 0) + g
    return sums


def tell_hybrid() -> Story:
    """Tell all three together."""
    layout = Layout(dp=2, tp=2, pp=2)
    seen = run(toy.case(), layout)
    problem = seen.trace.case
    specs = problem.model.build().specs
    yield "Everything together on 8 ranks: 2 replicas, of 2 stages, of 2 slices."
    yield "Read beside this: refpar/parallel/hybrid.py, then mesh.py and placement.py"
    yield ""
    yield from toy.problem()
    yield from section("who is where, and holds what")
    rows = [["", "replica", "slice", "stage", "rows", *SHORT.values()]]
    for rank in range(layout.ranks):
        d, t, p = mesh.place(layout, rank)
        mine = placement.rows(len(toy.ROWS), layout.dp, d)
        held = seen.notes(rank, "start")[0]
        shown = [numbers(held[name]) if name in held else "" for name in SHORT]
        rows.append([f"rank {rank}", f"d={d}", f"t={t}", f"p={p}", numbers(list(mine)), *shown])
    yield from table(rows)
    yield "Neighbours in t talk most, in every layer, and are neighbours in rank too."
    yield from section("forward")
    for d in range(layout.dp):
        sends = {t: next(e for e in seen.ranks[2 * d + t] if e.kind == "send" and not is_set_up(e)) for t in range(2)}
        for t, event in sends.items():
            y = message(event.name, event.data[0])
            yield f"  rank {2 * d + t} sends h[{t}] of its rows to stage 1, rank {event.to}: {numbers(y)}"
        parts = [seen.notes(4 + 2 * d + t, "g")[0] for t in range(2)]
        gives = [f"rank {4 + 2 * d + t} gives {numbers(part[0])}" for t, part in enumerate(parts)]
        yield f"  g: {', '.join(gives)}; both get {numbers(parts[0][1])}, and add b1"
    yield from section("backward")
    for rank in range(layout.ranks):
        alone = ", ".join(f"{SHORT[name]}: {numbers(g)}" for name, g in seen.notes(rank, "gradient"))
        yield f"  rank {rank} has for its rows {alone}"
    yield from section("all-reduce between replicas")
    for pair in [(0, 2), (1, 3), (4, 6), (5, 7)]:
        view = Watched(seen.trace, [seen.ranks[rank] for rank in pair])
        for names, _, notes in collectives(view):
            both = ", ".join(f"rank {rank} gives {numbers(note[1])}" for rank, note in zip(pair, notes, strict=True))
            yield f"  {spell(names)}: {both}; both get {numbers(notes[0][2])}"
    yield from update(seen, "each rank what it holds")
    yield from section("sent, in elements, by group")
    groups = ("tp", "pp", "dp", "world")
    by_rank = zip(*(seen.elements_sent(group) for group in groups), strict=True)
    sent_by_all = [[f"rank {rank}", *map(str, amounts)] for rank, amounts in enumerate(by_rank)]
    yield from table([["", *groups], *sent_by_all])
    yield "world is what all agree on: the count, and once a step loss, norm and overflow."
    assert set(specs) == set(SHORT)
    return (yield from verdict(seen.trace))
