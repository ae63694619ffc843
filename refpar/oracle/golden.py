"""Goldens: a case and its answer in files that a program in any language can use without refpar.

A golden is a folder::

    case.json              what is to be computed, in words that need no refpar
    inputs.safetensors     initial parameters, batches, masks: the same bits for everybody
    expected.safetensors   what comes out, in float64
    bound.safetensors      what an honest implementation may differ by, element by element
    schedule.json          for each pipeline stage, what it does in which order
    ledger.json            for each rank, messages, elements and bytes sent, by group and operation
    SHA256SUMS             of the files above; check with ``sha256sum -c``
    made_by.json           versions of refpar, NumPy and Python that wrote it; not part of the checksums

**case.json.** ``format`` (1), ``name``, ``what``; ``kind``, "training" or "reduction"; ``dtype``, what candidates
compute in; ``tier``, the ground of the bounds (exact, reduction, running, statistical). For training: ``case`` with
``model``, ``optimizer``, ``precision``, ``clip``, ``divide``, ``seed``, ``frozen``, as the classes of refpar name
them; ``layout``; ``parameters``, each with ``name``, ``shape``, ``axis`` (which tensor parallelism splits), ``decay``
(whether weight decay applies) and ``frozen``; ``units``, the names of the parts of the model in order, and ``stages``,
how many of them each pipeline stage has; ``loss``, ``rows``, ``seeds``: what they mean, in a sentence; ``events``,
every name of ``expected.safetensors`` in causal order.

**Names.** ``step0/`` and so on, then

========================================  =============================================================
``count``                                 tokens (MLP: rows) that count, of all ranks
``dp1/micro2/count``, ``…/loss``          tokens of one micro-batch of one replica; the *sum* of their losses
``dp1/micro2/activation/UNIT``            what the stage that ends with UNIT sends on (rows of the micro-batch)
``loss``                                  the mean over ``count``
``dp1/gradient/NAME``                     replica 1's share of the gradient, divided like it: they add up to it
``gradient/NAME``                         of the mean loss; unscaled, not clipped
``norm``                                  global, before clipping
``outcome``                               0 updated, 1 overflow, 2 no tokens: of these two, nothing is updated
``scale``, ``good``, ``t``                loss scale, its growth counter and number of updates, *after* the step
``state/NAME/momentum`` (``m``, ``v``)    of the optimizer; ``master``, float32 weights where weights are float16
``parameter/NAME``                        weights after the step
========================================  =============================================================

Clipping multiplies all gradients by min(1, clip / norm). torch's ``clip_grad_norm_`` divides by norm + 1e-6 instead,
which makes them smaller by the share 1e-6 / norm: in float32 that is within what roundings may do, so the two cannot be
told apart, and both match. In float64 they can: scale the gradients yourself there.

Inputs: ``parameter/NAME`` before step 0; ``step0/inputs``, ``step0/targets``, ``step0/mask``, all rows of all ranks;
``step0/dropout/LAYER``, where the layer keeps an element (rows first). Replica d of dp takes the rows of
``numpy.array_split(rows, dp)[d]``, cut into micro-batches in the same way. A reduction has ``rank0/NAME``,
``rank1/NAME``, … as inputs, and ``sum/NAME`` as the answer.

A value that has no entry in ``bound.safetensors`` is exact, and so is one whose bound is 0. Of a step that overflows,
gradients and norm are not among the expected values: which of them are infinite depends on the order of additions.

**Promise.** A reader of format 1 reads every golden of format 1. Within it, entries and cases may be added, and nothing
that is there changes its name, meaning or bits: inputs, schedule and ledger of every case, and everything of the exact
ones, are the same bytes on every machine and with every version of NumPy, and the checksums of those are pinned in
refpar's tests. Truth and bounds of the other cases come out of floating-point arithmetic and may differ in their last
digits from machine to machine: pin the folder, not the recipe. Anything else gets a new format number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

import refpar
from refpar import rng, split
from refpar.arrays import accumulator
from refpar.case import Batch, Case, Layout, Trace
from refpar.checks import meant, short, whole
from refpar.comm.communicator import Communicator
from refpar.comm.ledger import Ledger
from refpar.comm.processes import MOST_RANKS, World
from refpar.nn.layers import Attention, Dropout
from refpar.nn.models import GPT, MLP, initial_value
from refpar.optim import SGD, Adam, AdamW
from refpar.oracle import bounds
from refpar.oracle.cases import CASES, mask
from refpar.oracle.dumps import BadDump, Opened, read_json
from refpar.parallel import assembly, hybrid, schedule, tensor
from refpar.parallel.mesh import check
from refpar.precision import LossScale, Precision

HostArray = npt.NDArray[Any]

FORMAT = 1
FILES = (
    "case.json", "inputs.safetensors", "expected.safetensors", "bound.safetensors", "schedule.json", "ledger.json",
)  # fmt: skip
OUTCOMES = ("updated", "overflow", "no tokens")
TIERS = ("exact", "reduction", "running", "statistical")
REDUCTION = "all-reduce"
MOST_PARAMETERS, MOST_ROWS, MOST_STEPS = 1 << 28, 1 << 16, 1000
WORDS = {
    "loss": {
        "MLP": "squared error, summed over columns and over the rows of the mask, divided by the number of those rows",
        "GPT": "cross-entropy of the next token, summed over the tokens of the mask, divided by their number",
    },
    "rows": "replica d takes numpy.array_split(rows, dp)[d], and cuts it into micro_batches parts in the same way",
    "seeds": "numbers are raw Philox 4x64 words, key blake2b-128 of repr(address), counter (0, 0, row, 0), top 53 bits "
    "times 2^-53: nothing to reproduce, because all that is drawn is among the inputs",
}


class BadGolden(Exception):
    """A folder that is no golden, or has been changed; the text is one line."""


@dataclass
class Golden:
    """A case and its answer.

    Attributes
    ----------
    name, what : of the case
    dtype : that candidates compute in
    tier : the ground of the bounds, see :mod:`refpar.oracle.bounds`
    inputs, expected, bound : arrays by name; ``expected`` in causal order
    case, layout : what was run; None for a reduction
    schedule, ledger : as written
    path : where it was read from
    """

    name: str
    what: str
    dtype: str
    tier: str
    inputs: dict[str, HostArray]
    expected: dict[str, HostArray]
    bound: dict[str, HostArray]
    case: Case | None = None
    layout: Layout | None = None
    schedule: Any = None
    ledger: Any = None
    path: Path | None = field(default=None, compare=False)

    @property
    def events(self) -> list[str]:
        """Names of the expected values in causal order."""
        return list(self.expected)

    @property
    def steps(self) -> int:
        """Number of steps; 1 for a reduction."""
        return len(self.case.batches) if self.case else 1

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The files of the folder, by name."""
        contents = {
            "case.json": text(self.description()),
            "inputs.safetensors": save(_sorted(self.inputs)),
            "expected.safetensors": save(_sorted(self.expected)),
            "bound.safetensors": save(_sorted(self.bound)),
            "schedule.json": text(self.schedule),
            "ledger.json": text(self.ledger),
        }
        sums = "".join(f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in FILES)
        return {**contents, "SHA256SUMS": sums.encode()}

    @property
    def digest(self) -> str:
        """SHA-256 of ``SHA256SUMS``: stands for the whole folder."""
        return hashlib.sha256(self.files["SHA256SUMS"]).hexdigest()

    def description(self) -> dict[str, Any]:
        """Return what ``case.json`` says."""
        head = {
            "format": FORMAT,
            "name": self.name,
            "what": self.what,
            "kind": "training" if self.case else "reduction",
            "dtype": self.dtype,
            "tier": self.tier,
        }
        if self.case is None or self.layout is None:
            return {**head, "ranks": len(self.ledger), "events": self.events}
        model = self.case.model.build()
        stages = schedule.stages_of(len(model.units), self.layout.stages or self.layout.pp)
        return {
            **head,
            "case": encode_case(self.case),
            "layout": dataclasses.asdict(self.layout),
            "parameters": [
                {
                    "name": name,
                    "shape": list(spec.shape),
                    "axis": spec.axis,
                    "decay": spec.decay,
                    "frozen": name in self.case.frozen_names,
                }
                for name, spec in model.specs.items()
            ],
            "units": [name for name, _ in model.units],
            "stages": [len(units) for units in stages],
            "loss": WORDS["loss"][type(self.case.model).__name__],  # type: ignore[index]
            "rows": WORDS["rows"],
            "seeds": WORDS["seeds"],
            "events": self.events,
        }

    def write(self, folder: Path) -> None:
        """Write the folder whole or not at all; it must not exist yet, or be empty, and the one above it must."""
        check_folder(folder)
        versions = {"refpar": refpar.__version__, "numpy": np.__version__, "python": platform.python_version(),
                    "machine": platform.machine()}  # fmt: skip
        room = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name[:50]}."))
        try:
            for name, content in {**self.files, "made_by.json": text(versions)}.items():
                (room / name).write_bytes(content)
            room.chmod(0o755)
            if folder.exists():
                folder.rmdir()
            os.replace(room, folder)
        finally:
            shutil.rmtree(room, ignore_errors=True)


def check_folder(folder: Path) -> None:
    """Find out, before it takes time to make a golden, whether there can be a folder of this name.

    Raises
    ------
    BadGolden
        There is something in it.
    OSError
        It cannot be made. The folders above it are not made either: a name mistyped there would hide it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadGolden(f"{folder} exists already: give the name of a new or an empty folder")
    with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name[:50]}."):
        pass


# ------------------------------------------------------------------------------------------------- making


def make(name: str, dtype: str | None = None, *, world: Any = None) -> Golden:
    """Return the golden of a named case.

    Parameters
    ----------
    dtype : what candidates compute in; by default float32, or what the case is about
    world : a standing pool of as many ranks as the layout has, for the ledger; started for the purpose by default

    Raises
    ------
    ValueError
        Where there is no such case, or it has no bounds in that type.
    """
    if name == REDUCTION:
        return reduction(dtype or "float32")
    if name not in CASES:
        raise ValueError(f"no case is called {name!r}: {meant(name, listing())}")
    named = CASES[name]
    if named.dtype == "float16" and dtype not in (None, "float16"):
        raise ValueError(f"{name} is about float16: in {dtype} there is nothing to overflow")
    return build(name, named.what, named.make(dtype or named.dtype), named.layout, world=world)


def build(name: str, what: str, case: Case, layout: Layout, *, world: Any = None) -> Golden:
    """Return the golden of any case: its truth, its bounds, and the ledger of refpar's own run."""
    check(layout, case.model.build())
    truth = bounds.truth(case)
    values = bounds.everything(case, layout, truth)
    allowed = bounds.allowed(case, layout, values)
    trace = run(case, layout, world)
    expected = {f"step{n}/{key}": encoded(key, x) for n, step in enumerate(values) for key, x in step.items()}
    bound = {
        f"step{n}/{key}": np.asarray(x, np.float64) for n, step in enumerate(allowed.steps) for key, x in step.items()
    }
    each = hybrid.SCHEDULES[layout.schedule](layout.pp, layout.micro_batches)
    stages = [[instruction(i) for i in stage] for stage in each]
    ledger = [account(of_rank) for of_rank in trace.ledgers]
    dtype, inputs = case.precision.compute, inputs_of(case)
    return Golden(name, what, dtype, allowed.tier, inputs, expected, bound, case, layout, stages, ledger)


def reduction(dtype: str, ranks: int = 5) -> Golden:
    """Return the golden of an all-reduce alone: exact integers, and reals under the bound of any order."""
    sizes = {"integers": 1009, "reals": 1009, "short": 3, "one": 1, "empty": 0}
    inputs, expected, bound = {}, {}, {}
    for name, size in sizes.items():
        terms = []
        for rank in range(ranks):
            drawn: Any = rng.integers(("all-reduce", name, rank), (size,), -(2**7), 2**7)
            if name == "reals":  # no two of one exponent, and no sum without a rounding
                drawn = drawn * 2.0 ** -rng.integers(("all-reduce", "powers", rank), (size,), 0, 13) + 1 / 3
            else:
                drawn = drawn + 100 * rank
            terms.append(drawn.astype(dtype))
            inputs[f"rank{rank}/{name}"] = terms[-1]
        expected[f"sum/{name}"], bound[f"sum/{name}"] = bounds.reduction(terms, dtype)
    what = listing()[REDUCTION]
    ledger = [ring_account(list(sizes.values()), dtype, ranks, rank) for rank in range(ranks)]
    return Golden(REDUCTION, what, dtype, "reduction", inputs, expected, bound, schedule=[], ledger=ledger)


def ring_account(sizes: Sequence[int], dtype: str, ranks: int, rank: int) -> list[dict[str, Any]]:
    """Return what one rank sends in ring all-reduces of those sizes."""
    halves = [split.ring_elements(size, ranks, rank) for size in sizes]
    wide, narrow = accumulator(dtype).itemsize, np.dtype(dtype).itemsize
    sent = {
        "messages": 2 * (ranks - 1) * len(sizes),
        "elements": sum(reduce + gather for reduce, gather in halves),
        "bytes": sum(reduce * wide + gather * narrow for reduce, gather in halves),
    }
    return [{"group": "world", "operation": "all_reduce", **sent}]


def listing() -> dict[str, str]:
    """Return what each named case is, an exact-integer one first."""
    names = {name: named.what for name, named in CASES.items()}
    first = next(iter(names))
    what = "one all-reduce (sum) over 5 ranks, without a model: exact integers, reals, odd and empty lengths"
    return {first: names.pop(first), REDUCTION: what, **names}


def inputs_of(case: Case) -> dict[str, HostArray]:
    """Return all that a run starts from."""
    model, types = case.model.build(), case.precision
    inputs: dict[str, HostArray] = {
        f"parameter/{name}": initial_value(case.seed, name, spec, types.master) for name, spec in model.specs.items()
    }
    for number, batch in enumerate(case.batches):
        for name in ("inputs", "targets", "mask"):
            x = getattr(batch, name)
            inputs[f"step{number}/{name}"] = x.astype(types.compute) if x.dtype.kind == "f" else x
        for _, unit in model.units:
            for layer in tensor.leaves(unit):
                if isinstance(layer, Attention | Dropout) and layer.rate:
                    shape = dropped_shape(layer, case, batch)
                    drawn = rng.uniform((case.seed, "dropout", layer.name, number), shape, range(len(batch)))
                    inputs[f"step{number}/dropout/{layer.name}"] = drawn >= layer.rate
    return inputs


def dropped_shape(layer: Attention | Dropout, case: Case, batch: Batch) -> tuple[int, ...]:
    """Return the shape of a dropout mask, without the rows."""
    assert isinstance(case.model, GPT)
    sequence = batch.inputs.shape[1]
    return (layer.heads[2], sequence, sequence) if isinstance(layer, Attention) else (sequence, case.model.width)


def encoded(name: str, value: Any) -> HostArray:
    """Return a value as an array: numbers 0-d, the outcome as a number, floats in float64."""
    if name == "outcome":
        return np.array(OUTCOMES.index(value), np.int64)
    x = np.asarray(value)
    return x.astype(np.int64 if x.dtype.kind in "iu" else np.float64)


def instruction(i: Any) -> dict[str, Any]:
    """Return an instruction of a schedule as JSON."""
    return {"do": type(i).__name__, **({"micro_batch": i.m, "stage": i.v} if hasattr(i, "m") else {})}


def account(ledger: Ledger) -> list[dict[str, Any]]:
    """Return what one rank sent as JSON."""
    return [
        {"group": group, "operation": operation, "messages": s.messages, "elements": s.elements, "bytes": s.bytes}
        for (group, operation), s in sorted(ledger.sent.items())
    ]


def run(case: Case, layout: Layout, world: Any = None) -> Trace:
    """Return the trace of refpar's own ranks; an overflow that a case is about needs no warning."""
    if world is None:
        with World(layout.ranks) as own:
            return run(case, layout, own)
    return assembly.collect(case, layout, world.run(quietly, case, layout))


def quietly(comm: Communicator, case: Case, layout: Layout) -> Any:
    """Run this rank's part of a case."""
    with np.errstate(over="ignore", invalid="ignore"):
        return hybrid.train(comm, case, layout)


# ------------------------------------------------------------------------------------------------ reading


def load(folder: Path | str) -> Golden:
    """Read a golden, after checking that no file of it has changed.

    Raises
    ------
    BadGolden
        With one line that says what is wrong.
    """
    folder = Path(folder)
    check_sums(folder)
    try:
        head = read_json(folder / "case.json")
        if not isinstance(head, dict) or type(head.get("format")) is not int:
            raise BadGolden(f"{folder}: case.json does not say its format")
        if head["format"] != FORMAT:
            raise BadGolden(f"{folder} is of format {head['format']}: this refpar reads format {FORMAT}")
        arrays = {name: read_all(folder / f"{name}.safetensors") for name in ("inputs", "expected", "bound")}
        events = head.get("events")
        if not isinstance(events, list) or sorted(map(str, events)) != sorted(arrays["expected"]):
            raise BadGolden(f"{folder}: the events of case.json are not those of expected.safetensors")
        for name, bound in arrays["bound"].items():
            if (
                name not in arrays["expected"]
                or arrays["expected"][name].shape != bound.shape
                or not (bound >= 0).all()
            ):
                raise BadGolden(f"{folder}: the bound of {name} does not fit its value")
        case = layout = None
        if head.get("kind") == "training":
            case, layout = decode_case(head.get("case"), arrays["inputs"]), decode(Layout, head.get("layout"))
        name, what, dtype, tier = (str(head.get(key)) for key in ("name", "what", "dtype", "tier"))
        if dtype not in ("float16", "float32", "float64") or tier not in TIERS:
            raise BadGolden(f"{folder}: case.json names dtype {dtype!r} and tier {tier!r}")
        expected = {event: arrays["expected"][event] for event in events}
        stages, ledger = read_json(folder / "schedule.json"), read_json(folder / "ledger.json")
        inputs, allowed = arrays["inputs"], arrays["bound"]
        return Golden(name, what, dtype, tier, inputs, expected, allowed, case, layout, stages, ledger, folder)
    except (BadDump, ValueError, TypeError, KeyError) as error:
        raise BadGolden(f"{folder} cannot be used: {' '.join(str(error).split())}") from None


def check_sums(folder: Path) -> str:
    """Return the digest of a folder; raise where a file is missing or has changed."""
    try:
        sums = (folder / "SHA256SUMS").read_bytes()
    except OSError as error:
        what = "it is a file, and a golden is a folder" if folder.is_file() else f"SHA256SUMS: {error.strerror}"
        raise BadGolden(f"{folder} is no golden: {what}") from None
    lines = {name: digest for digest, _, name in (line.partition("  ") for line in sums.decode("latin-1").splitlines())}
    for name in FILES:
        try:
            with open(folder / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise BadGolden(f"{folder / name}: {error.strerror}") from None
        if lines.get(name) != digest:
            raise BadGolden(f"{folder / name} has been changed: its SHA-256 is not that of SHA256SUMS")
    return hashlib.sha256(sums).hexdigest()


def read_all(path: Path) -> dict[str, HostArray]:
    """Read every array of a file."""
    opened = Opened(path)
    return {name: opened.read(name) for name in opened.entries}


def encode_case(case: Case) -> dict[str, Any]:
    """Return a case as JSON, but for its batches."""
    plain = {f.name: getattr(case, f.name) for f in dataclasses.fields(case) if f.name != "batches"}
    for name in ("model", "optimizer"):
        plain[name] = {"kind": type(plain[name]).__name__, **dataclasses.asdict(plain[name])}
    plain["precision"] = dataclasses.asdict(case.precision)
    return plain


def decode_case(given: Any, inputs: Mapping[str, HostArray]) -> Case:
    """Return the case that :func:`encode_case` wrote, with its batches from ``inputs``."""
    if not isinstance(given, dict):
        raise ValueError("case is no JSON object")
    fields = {key: value for key, value in given.items() if key not in ("model", "optimizer", "precision")}
    model = decode_kind("model", given.get("model"), (MLP, GPT))
    if count_parameters(model) > MOST_PARAMETERS:
        raise ValueError(f"the model has more than {MOST_PARAMETERS} parameters")
    optimizer = decode_kind("optimizer", given.get("optimizer"), (SGD, Adam, AdamW))
    batches: list[Batch] = []
    while f"step{len(batches)}/inputs" in inputs:
        x, targets, kept = (inputs[f"step{len(batches)}/{name}"] for name in ("inputs", "targets", "mask"))
        x, targets = (a.astype(np.float64 if a.dtype.kind == "f" else np.int64) for a in (x, targets))
        batches.append(Batch(x, targets, kept))
    types = given.get("precision") or {}
    if not isinstance(types, dict):
        raise ValueError(f'precision is {short(types)}: it must be an object such as {{"compute": "float32"}}')
    types = dict(types)
    if types.get("loss_scale") is not None:
        types["loss_scale"] = decode(LossScale, types["loss_scale"])
    parts = {"model": model, "optimizer": optimizer, "batches": batches, "precision": decode(Precision, types)}
    case: Case = decode(Case, {**fields, **parts})
    return case


def decode_kind(what: str, given: Any, kinds: Sequence[type]) -> Any:
    """Return the dataclass that ``given["kind"]`` names."""
    known = {kind.__name__: kind for kind in kinds}
    if not isinstance(given, dict) or given.get("kind") not in known:
        raise ValueError(f"{what} must say its kind: one of {', '.join(known)}")
    return decode(known[given["kind"]], {key: value for key, value in given.items() if key != "kind"})


def decode(kind: Any, given: Any) -> Any:
    """Return a dataclass from a JSON object; lists become tuples."""
    if not isinstance(given, dict):
        raise ValueError(f"{kind.__name__} is no JSON object")
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := set(given) - known:
        raise ValueError(f"{kind.__name__} has no {sorted(unknown)[0]!r}: it has {', '.join(sorted(known))}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None


def count_parameters(model: MLP | GPT) -> int:
    """Return about how many parameters a model has, without building it."""
    if isinstance(model, MLP):
        return sum((a + 1) * b for a, b in zip(model.widths, model.widths[1:], strict=False))
    hidden = model.mlp_width or 4 * model.width
    block = 4 * model.width * model.width + 2 * model.width * hidden + 16 * model.width
    return (2 * model.vocabulary + model.context) * model.width + model.layers * block


def read_case(path: Path) -> tuple[str, str, Case, Layout]:
    """Read a case of the user's own from a JSON file.

    It holds ``model``, ``optimizer`` and what else a ``case`` of ``case.json`` may hold, ``layout``, ``name`` and
    ``what``; and ``batches``, either ``{"steps": 2, "rows": 17, "masked": 3}``, drawn from the seed, or ``{"file":
    "inputs.safetensors"}`` with ``step0/inputs``, ``step0/targets`` and ``step0/mask``.

    Raises
    ------
    BadGolden
        With one line that says what is wrong.
    """
    try:
        given = read_json(path)
        if not isinstance(given, dict):
            raise ValueError("it must be a JSON object")
        fields = dict(given)
        name, what = str(fields.pop("name", path.stem)), str(fields.pop("what", "a case of your own"))
        layout = decode(Layout, fields.pop("layout", {}))
        if layout.ranks > MOST_RANKS:
            raise ValueError(f"layout {layout} needs {layout.ranks} ranks: at most {MOST_RANKS} on one machine")
        batches = fields.pop("batches", None)
        if not isinstance(batches, dict) or ("file" in batches) == ("rows" in batches):
            raise ValueError('batches must be {"steps": …, "rows": …} or {"file": …}')
        model = decode_kind("model", fields.get("model"), (MLP, GPT))
        if "file" in batches:
            inputs = read_all(path.parent / str(batches["file"]))
        else:
            if unknown := set(batches) - {"steps", "rows", "masked"}:
                raise ValueError(f"batches has no {sorted(unknown)[0]!r}: it has steps, rows and masked")
            rows = whole("batches rows", batches["rows"], 0, MOST_ROWS)
            inputs = drawn(
                model,
                whole("seed", fields.get("seed", 0)),
                steps=whole("batches steps", batches.get("steps", 2), 1, MOST_STEPS),
                rows=rows,
                masked=whole("batches masked", batches.get("masked", 0), 0, rows),
            )
        return name, what, decode_case(fields, inputs), layout
    except (BadDump, ValueError, TypeError, KeyError) as error:
        raise BadGolden(f"{path}: {' '.join(str(error).split())}") from None


def in_dtype(case: Case, dtype: str | None) -> Case:
    """Return a case that computes in ``dtype``; None leaves it as it is. Types that it chooses itself it keeps.

    Raises
    ------
    ValueError
        Where one of those, of gradients or of their partial sums, is narrower than ``dtype``.
    """
    own = case.precision
    if dtype is None or dtype == own.compute:
        return case
    usual = Precision(own.compute), Precision(own.compute, own.gradients)
    chosen = {n: getattr(own, n) for n, p in zip(("gradients", "reduce"), usual, strict=True)
              if getattr(own, n) != getattr(p, n)}  # fmt: skip
    return dataclasses.replace(case, precision=Precision(dtype, loss_scale=own.loss_scale, **chosen))


def drawn(model: MLP | GPT, seed: int, *, steps: int, rows: int, masked: int) -> dict[str, HostArray]:
    """Return batches drawn from a seed: numbers that are multiples of 2^-10, or tokens whose rows end early."""
    inputs: dict[str, HostArray] = {}
    for step in range(steps):
        if isinstance(model, MLP):
            for name, width in (("inputs", model.widths[0]), ("targets", model.widths[-1])):
                inputs[f"step{step}/{name}"] = rng.integers((seed, name, step), (rows, width), -1024, 1025) / 1024
            inputs[f"step{step}/mask"] = mask(seed, step, rows, masked)
        else:
            tokens = rng.integers((seed, "tokens", step), (rows, model.context + 1), 0, model.vocabulary)
            ends = rng.integers((seed, "ends", step), (rows, 1), 0, 2 * model.context)
            kept = (np.arange(model.context) < ends) & mask(seed, step, rows, masked)[:, None]
            inputs |= {
                f"step{step}/inputs": tokens[:, :-1],
                f"step{step}/targets": tokens[:, 1:],
                f"step{step}/mask": kept,
            }
    return inputs


def text(value: Any) -> bytes:
    """Return JSON, the same bytes for the same value."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def _sorted(arrays: Mapping[str, HostArray]) -> dict[str, HostArray]:
    return {name: np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape) for name in sorted(arrays)}
