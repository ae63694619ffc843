"""Somebody's dump against a golden, or against their own single-device run: the walk that finds the first wrong number.

Values are walked in causal order. The first that leaves its bound is the one to look at; of each later one it is said
whether it is a consequence (right for what the candidate had before it) or wrong again.

A dump need not be complete. What has to be there is every gradient (of a reduction, every sum); any other kind of value
is compared if there is any of it, and then completely.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refpar import optim
from refpar.case import Case, HostArray, Layout, State
from refpar.oracle import local
from refpar.oracle.bounds import unit_of
from refpar.oracle.causes import Alike, Context, causes, share
from refpar.oracle.compare import NOWHERE, Comparison, Divergence, Nearest, judge
from refpar.oracle.dumps import REPLICAS, BadDump, Dump
from refpar.oracle.golden import Golden
from refpar.oracle.parts import kind_of, micro_gradients, trained
from refpar.precision import Precision

REQUIRED = ("gradient", "sum")
WIDTH = {"float16": 2, "float32": 4, "float64": 8}
SHORT = {"grad": "gradient", "param": "parameter"}
MOST_EXPLAINED = 200
"""Divergences that causes and roles are looked for; a run in which more is wrong is wrong altogether."""


@dataclass
class Walk:
    """A walk over one dump.

    Attributes
    ----------
    expected, bound : arrays by name, ``expected`` in causal order; a name without a bound is exact
    dtype : the least that values must be in
    names : which name of the dump holds which value
    """

    dump: Dump
    expected: Mapping[str, HostArray]
    bound: Mapping[str, Any]
    dtype: str
    names: Mapping[str, str]
    compared: int = 0
    nearest: Nearest = NOWHERE
    found: list[Divergence] = field(default_factory=list)
    missing_kinds: Counter[str] = field(default_factory=Counter)

    def go(self) -> None:
        """Walk all values."""
        kinds = {kind_of(name) for name in self.names}
        for name, true in self.expected.items():
            step, short = split_step(name)
            if name not in self.names:
                if kind_of(name) in kinds or kind_of(name) in REQUIRED:
                    self.problem(step, short, f"missing{self.near(name)}")
                else:
                    self.missing_kinds[kind_of(name)] += 1
                continue
            self.compared += 1
            value = self.dump.values[self.names[name]]
            shape = () if value.shape == (1,) and not true.shape else value.shape
            if shape != true.shape:
                turned = len(shape) > 1 and shape == true.shape[::-1]
                hint = ": it is transposed, as torch keeps weights: (outputs, inputs)" if turned else ""
                self.problem(step, short, f"has shape {value.shape}, expected {true.shape}{hint}")
            elif narrower(value.dtype, self.dtype) and name in self.bound:
                self.problem(step, short, f"is {value.dtype}, which is narrower than {self.dtype}")
            else:
                self.look(name, step, short, true)

    def look(self, name: str, step: int, short: str, true: HostArray) -> None:
        """Judge one value."""
        got, replicas = self.dump.read(self.names[name])
        if replicas:
            self.problem(step, short, f"{REPLICAS}: {replicas}")
        divergence, nearest = judge(step, short, got.reshape(true.shape), true, self.bound.get(name, 0.0))
        self.nearest = max(self.nearest, nearest)
        if divergence is None:
            return
        if self.dump.ranks > 1:
            rank = self.dump.values[self.names[name]].rank_of(divergence.index or ())
            divergence = dataclasses.replace(divergence, rank=rank)
        self.found.append(divergence)

    def problem(self, step: int, short: str, text: str) -> None:
        """Note what is wrong and is no number."""
        self.found.append(Divergence(step, short, None, None, None, np.inf, 0.0, 1.0, problem=text))

    def near(self, name: str) -> str:
        """Return a hint where the dump has something of nearly that name."""
        spare = [own for own in self.dump.values if own not in self.names.values()]
        close = difflib.get_close_matches(name, spare, 1, 0.8)
        return f"; there is a value called {close[0]}" if close else ""

    def read(self, name: str) -> HostArray | None:
        """Return a value of the candidate, None where there is none of that shape."""
        if name not in self.names or name not in self.expected:
            return None
        try:
            got, _ = self.dump.read(self.names[name])
            return got.reshape(self.expected[name].shape)
        except (BadDump, ValueError):
            return None


def check(golden: Golden, dump: Dump, *, steps: int | None = None) -> Comparison:
    """Hold a dump to a golden.

    Parameters
    ----------
    steps : how many steps the dump is of; all by default

    Raises
    ------
    BadDump
        Where a file turns out to be broken.
    """
    expected = {name: x for name, x in golden.expected.items() if steps is None or split_step(name)[0] < steps}
    walk = Walk(dump, expected, golden.bound, golden.dtype, aliases(dump, expected))
    walk.go()
    if golden.case is not None and golden.layout is not None:
        explain(walk, lambda name: context(golden, name), roles(walk, golden.case))
        if walk.found and walk.found[0].name.startswith("gradient/"):
            seen = (*walk.found[0].causes, *whole_gradient(walk, golden, walk.found[0].step))
            walk.found[0] = dataclasses.replace(walk.found[0], causes=tuple(dict.fromkeys(seen)))
    else:
        explain(walk, lambda name: reduction_context(golden, name), {})
    return verdict(walk, golden.tier)


def verdict(walk: Walk, tier: str) -> Comparison:
    """Return the outcome of a walk.

    Raises
    ------
    BadDump
        Where nothing was compared, and nothing that must be there is missing: that is no match.
    """
    if not walk.compared and not walk.found:
        raise BadDump("there is nothing to compare: the dump has no value of a name that is expected")
    strangers = [name for name in walk.dump.values if name not in walk.names.values()]
    notes = [f"{len(strangers)} values of the dump have no counterpart, such as {strangers[0]}"] if strangers else []
    there, steps = {split_step(name)[0] for name in walk.names}, {split_step(name)[0] for name in walk.expected}
    if there and there < steps and max(there) < min(steps - there):
        notes.append(f"of {len(steps)} steps the dump has the first {len(there)}: --steps {len(there)} compares those")
    return Comparison(
        walk.compared, *walk.nearest[1:], tier, walk.found, not_compared=dict(walk.missing_kinds), notes=notes
    )


def explain(walk: Walk, around: Callable[[str], Context], role: Mapping[tuple[int, str], str]) -> None:
    """Add roles and causes to what was found."""
    for i, found in enumerate(walk.found):
        name = full_name(walk, found)
        part = "first" if i == 0 else role.get((found.step, found.name), "later")
        seen: tuple[str, ...] = ()
        readable = not found.problem or found.problem.startswith(REPLICAS)
        if readable and i < MOST_EXPLAINED and part != "consequence":
            got = walk.read(name)
            if got is not None:
                seen = tuple(causes(got, walk.expected[name], walk.bound.get(name, 0.0), around(name)))
        walk.found[i] = dataclasses.replace(found, role=part, causes=seen)


def roles(walk: Walk, case: Case) -> dict[tuple[int, str], str]:
    """Return, of every wrong value but the first, whether it is right for the candidate's own inputs."""
    result: dict[tuple[int, str], str] = {}
    later: dict[int, list[str]] = {}
    for found in walk.found[1:MOST_EXPLAINED]:
        later.setdefault(found.step, []).append(found.name)
    for step, names in later.items():
        own = local.recomputed(case, step, walk.read, walk.expected)
        for name in names:
            got = walk.read(f"step{step}/{name}")
            if name in own and got is not None:
                true, room = own[name]
                result[step, name] = "again" if judge(step, name, got, true, room)[0] else "consequence"
    return result


# --------------------------------------------------------------------------------- what is known around a value


def whole_gradient(walk: Walk, golden: Golden, step: int) -> list[str]:
    """Return how the parts of the batch seem to have been added up, judged by all parameters together."""
    case, layout = golden.case, golden.layout
    assert case is not None
    assert layout is not None
    names = trained(case)
    full = [f"step{step}/gradient/{name}" for name in names]
    got = [walk.read(name) for name in full]
    if any(g is None or not np.isfinite(g).all() for g in got):
        return []

    def flat(arrays: Iterable[Any]) -> HostArray:
        return np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays])

    a, bound = flat(got), flat(np.broadcast_to(walk.bound.get(n, 0.0), golden.expected[n].shape) for n in full)
    start = {
        name: golden.inputs[f"parameter/{name}"].astype(case.precision.compute) for name in case.model.build().specs
    }
    weights = start if step == 0 else {n: golden.expected[f"step{step - 1}/parameter/{n}"] for n in start}
    scale = float(golden.expected[f"step{step - 1}/scale"]) if step else State.initial(case).scale
    wide = dataclasses.replace(case, precision=Precision(loss_scale=case.precision.loss_scale))
    micro = micro_gradients(wide, layout, step, {n: w.astype(np.float64) for n, w in weights.items()}, scale)
    shares = [flat(own[name] for name in names) for own in micro]
    around = Context(unit_of(golden.dtype), shares=shares, part="micro-batch")
    return list(share(a, around, Alike(bound, around.unit)))


def context(golden: Golden, name: str) -> Context:
    """Return what the causes of a wrong value may be made of."""
    case, layout = golden.case, golden.layout
    assert case is not None
    assert layout is not None
    step, short = split_step(name)
    numbers = axes(layout)
    read = {key: golden.expected.get(f"step{step}/{key}") for key in ("count", "norm", "scale")}
    before = golden.expected.get(f"step{step - 1}/scale")
    scale = before if before is not None else case.precision.loss_scale and case.precision.loss_scale.initial
    count, mask = read["count"], case.batches[step].mask
    numbers |= {"loss scale": float(scale or 1), "count": float(count if count is not None else 1)}
    numbers["all over unmasked"] = mask.size / max(int(mask.sum()), 1)
    if read["norm"] is not None:
        numbers["clip factor"] = optim.clip_factor(float(read["norm"]), case.clip)
    counts = [
        sum(int(x) for key, x in golden.expected.items() if re.fullmatch(rf"step{step}/dp{d}/micro\d+/count", key))
        for d in range(layout.dp)
    ]
    shares = (
        [golden.expected[f"step{step}/dp{d}/{short}"] for d in range(layout.dp)] if has_shares(golden, name) else []
    )
    expected = golden.expected[name]
    others = {
        key: x for key, x in golden.expected.items()
        if key != name and key.startswith(f"step{step}/") and x.shape == expected.shape and x.ndim
    }  # fmt: skip
    return Context(
        unit_of(golden.dtype), numbers, shares, counts, previous=previous(golden, step, short), others=others
    )


def axes(layout: Layout) -> dict[str, float]:
    """Return the sizes that people divide by once too often."""
    sizes = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, "micro-batches": layout.micro_batches}
    if sum(size > 1 for size in (layout.dp, layout.tp, layout.pp)) > 1:
        sizes["ranks"] = layout.ranks
    return {name: float(size) for name, size in sizes.items()}


def has_shares(golden: Golden, name: str) -> bool:
    """Return whether the replicas' shares of a value are known."""
    step, short = split_step(name)
    return f"step{step}/dp0/{short}" in golden.expected


def previous(golden: Golden, step: int, short: str) -> HostArray | None:
    """Return the value one step before; of weights before the first update, the initial ones."""
    if step:
        return golden.expected.get(f"step{step - 1}/{short}")
    return golden.inputs.get(short)


def reduction_context(golden: Golden, name: str) -> Context:
    """Return what the causes of a wrong sum may be made of."""
    short = name.partition("/")[2]
    ranks = len(golden.ledger)
    shares = [golden.inputs[f"rank{rank}/{short}"] for rank in range(ranks)]
    return Context(unit_of(golden.dtype), {"ranks": float(ranks)}, shares, part="rank")


# -------------------------------------------------------------------------------------------------- small things


def aliases(dump: Dump, expected: Mapping[str, Any]) -> dict[str, str]:
    """Return, of each value, the dump's name for it: its own, or with ``grad`` and ``param`` for the long words."""
    result = {}
    for own in dump.values:
        name = "/".join(SHORT.get(word, word) if i < 3 else word for i, word in enumerate(own.split("/")))
        if own in expected or name in expected:
            result[own if own in expected else name] = own
    return result


def split_step(name: str) -> tuple[int, str]:
    """Return step and rest of a name; 0 and all of it where it names no step."""
    head, _, rest = name.partition("/")
    return (int(head[4:]), rest) if re.fullmatch(r"step\d{1,9}", head) else (0, name)


def full_name(walk: Walk, found: Divergence) -> str:
    """Return the full name of what was found."""
    name = f"step{found.step}/{found.name}"
    return name if name in walk.expected else found.name


def narrower(dtype: str, least: str) -> bool:
    """Return whether a type keeps less than another. Whole numbers keep all of themselves."""
    if dtype.startswith(("int", "uint", "bool")):
        return False
    return WIDTH.get(dtype, 0) < WIDTH[least]
