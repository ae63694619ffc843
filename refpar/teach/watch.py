"""Runs that are looked at from inside: what each rank was given, what it sent, what it got, what it holds.

Everything a narration says comes from here, out of the run itself; see :func:`refpar.teach.recorder.record`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from refpar.arrays import to_host
from refpar.case import Case, HostArray, Layout, Trace
from refpar.comm.communicator import Communicator
from refpar.comm.processes import World
from refpar.nn.layer import live_bytes
from refpar.parallel import hybrid
from refpar.parallel.assembly import collect
from refpar.teach.recorder import Event, Recorder, record


@dataclass
class Watched:
    """A run, seen from inside.

    Attributes
    ----------
    trace : what it computed
    ranks : for each rank what it did, in order
    """

    trace: Trace
    ranks: list[list[Event]]

    def notes(self, rank: int, name: str) -> list[Any]:
        """Return what was noted under ``name`` on a rank."""
        return [event.data for event in self.ranks[rank] if event.kind == "note" and event.name == name]

    def elements_sent(self, group: str) -> list[int]:
        """Return how many elements each rank has sent in a group."""
        return [ledger.total(group).elements for ledger in self.trace.ledgers]


def watch(case: Case, layout: Layout, world: World) -> Watched:
    """Run ``case`` in ``layout`` and look."""
    results, ranks = zip(*world.run(watched, case, layout), strict=True)
    return Watched(collect(case, layout, list(results)), list(ranks))


def watched(comm: Communicator, case: Case, layout: Layout) -> tuple[Any, list[Event]]:
    """Run this rank's part of ``case`` and return it with what was noted."""
    with np.errstate(over="ignore"):  # an overflow is what a story of fp16 is about
        result, events = record(comm, hybrid.train, (case, layout), PROBES, copies=True)
    for event in events:
        if callable(event.data):  # what is held is counted now that all is over
            event.data = event.data()
    return result, [event for event in events if event.kind in ("note", "send", "wait")]


def message(call: str, data: bytes) -> HostArray:
    """Return what was sent, from its bytes and the sentence that names its type and, where it is whole, its shape."""
    match = re.search(r" of (\w+) \(([\d, ]*)\)", call)
    assert match is not None
    values = np.frombuffer(data, match[1])
    shape = tuple(int(n) for n in re.findall(r"\d+", match[2]))
    return values.reshape(shape) if values.size == np.prod(shape, dtype=int) else values


def is_set_up(event: Event) -> bool:
    """Return whether a message only announces a shape."""
    return event.name.startswith("send of int64 (8,)")


# ------------------------------------------------------------------------------------------ probes

Right = Callable[..., Any]


def copy(x: Any) -> HostArray:
    """Return a copy on the host that nothing later changes."""
    return np.array(to_host(x))


def _pass(letter: str) -> Callable[..., Any]:
    def probe(recorder: Recorder, right: Right, stage: Any, m: int) -> Any:
        recorder.note("pass", (letter, m, stage.at[m].rows))
        return right(stage, m)

    return probe


def _arrived(recorder: Recorder, right: Right, store: Any, name: str, gradient: Any) -> Any:
    recorder.note("gradient", (name, copy(gradient)))
    return right(store, name, gradient)


def _collective(kind: str) -> Callable[..., Any]:
    def probe(recorder: Recorder, right: Right, comm: Communicator, array: Any, *args: Any, **options: Any) -> Any:
        given = copy(array)
        result = right(comm, array, *args, **options)
        if not comm.ledger._observing:
            recorder.note(kind, (comm.name, given, copy(result), options.get("counts")))
        return result

    return probe


def _conjugate(kind: str) -> Callable[..., Any]:
    """Note what goes into *g* (forward), or what comes to *f* (backward), and what comes of it."""

    def forward(recorder: Recorder, right: Right, layer: Any, params: Any, x: Any, at: Any) -> Any:
        y, saved = right(layer, params, x, at)
        recorder.note(kind, (copy(x), copy(y)))
        return y, saved

    def backward(recorder: Recorder, right: Right, layer: Any, params: Any, saved: Any, dy: Any) -> Any:
        dx = yield from right(layer, params, saved, dy)
        recorder.note(kind, (copy(dy), copy(dx)))
        return dx

    return forward if kind == "g" else backward


def _named(recorder: Recorder, right: Right, store: Any, names: Any) -> Any:
    if names:
        recorder.note("names", list(names))
    return right(store, names)


def _store(recorder: Recorder, right: Right, *args: Any) -> Any:
    store = right(*args)

    def held() -> dict[str, int]:
        peaks = {key: getattr(store, key, 0) for key in ("peak_gathered", "peak_gradients")}
        return {"weights": elements(store.weights), "gradients": elements(store.gradients), **peaks}

    recorder.note("start", {name: copy(x) for name, x in store.weights.items()})
    recorder.note("held", held)
    return store


def _state(recorder: Recorder, right: Right, *args: Any) -> Any:
    state = right(*args)
    recorder.note("state", lambda: sum(elements(buffers) for buffers in state.values()))
    return state


def _replicas(recorder: Recorder, right: Right, mesh: Any, weights: Any) -> Any:
    recorder.note("weights", {name: copy(x) for name, x in weights.items()})
    return right(mesh, weights)


def _overflowed(recorder: Recorder, right: Right, gradient: Any) -> bool:
    seen = bool(right(gradient))
    recorder.note("overflowed", (copy(gradient), seen))
    return seen


def _agree(recorder: Recorder, right: Right, world: Communicator, *args: Any) -> Any:
    agreed = right(world, *args)
    recorder.note("agreed", agreed)
    return agreed


def _linear(recorder: Recorder, right: Right, layer: Any, params: Any, x: Any, at: Any) -> Any:
    recorder.note("layer", layer.name)
    return right(layer, params, x, at)


def _measure(recorder: Recorder, right: Right, stage: Any) -> Any:
    recorder.note("alive", live_bytes(stage.saved))
    return right(stage)


def elements(arrays: Any) -> int:
    """Return the number of elements that a dictionary of arrays keeps alive: a view keeps all that it is a view of."""
    itemsize = next((x.dtype.itemsize for x in arrays.values()), 1)
    return live_bytes(arrays) // int(itemsize)


PROBES: dict[str, Callable[..., Any]] = {
    "refpar.parallel.pipeline:Stage.forward": _pass("F"),
    "refpar.parallel.pipeline:Stage.backward": _pass("B"),
    "refpar.parallel.pipeline:Stage.measure": _measure,
    "refpar.parallel.data:DataParallel.consume": _arrived,
    "refpar.parallel.zero:Zero.consume": _arrived,
    "refpar.parallel.data:DataParallel.reduce": _named,
    "refpar.parallel.zero:Zero.hand_over": _named,
    "refpar.parallel.zero:Zero.gather": _named,
    "refpar.comm.ring:all_reduce": _collective("all_reduce"),
    "refpar.comm.ring:reduce_scatter": _collective("reduce_scatter"),
    "refpar.comm.ring:all_gather": _collective("all_gather"),
    "refpar.parallel.tensor:G.forward": _conjugate("g"),
    "refpar.parallel.tensor:F.backward": _conjugate("f"),
    "refpar.parallel.hybrid:make_store": _store,
    "refpar.parallel.hybrid:make_state": _state,
    "refpar.parallel.hybrid:check_replicas": _replicas,
    "refpar.parallel.hybrid:agree": _agree,
    "refpar.precision:overflowed": _overflowed,
    "refpar.nn.layers:Linear.forward": _linear,
}
