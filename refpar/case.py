"""What to compute, how it is split, and what came out.

A :class:`Case` is a complete problem: whoever has it can compute the answer without asking anything
more. A :class:`Layout` says how the work is spread over ranks and changes nothing in the answer but roundings, and in
float16 whether a step overflows: see :class:`Layout`. A :class:`Trace` is the answer, step by step, in the order in
which one thing causes the next. A :class:`State` is what is carried from one step to the next: whoever has it can go
on, in the same layout or in another.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from refpar import rng
from refpar.checks import fix, meant, real, short, whole
from refpar.nn.checkpoint import segment_length
from refpar.nn.models import GPT, MLP, initial_value
from refpar.optim import SGD, Adam, AdamW, new_state
from refpar.precision import LossScaler, Outcome, Precision, to_compute

HostArray = npt.NDArray[Any]
SCHEDULES = ("1f1b", "gpipe")
MOST_MICRO_BATCHES = 1 << 16
"""Each is some instructions of a schedule that is made as a whole, whether it has rows or not."""


@dataclass(frozen=True)
class Batch:
    """The rows of one step: arrays, or what ``numpy.asarray`` makes some of.

    Attributes
    ----------
    inputs : ``(rows, sequence)`` token numbers, or ``(rows, width)`` numbers
    targets : ``(rows, sequence)`` token numbers, or ``(rows, width)`` numbers
    mask : bool, ``(rows, sequence)`` or ``(rows,)``: which targets count

    Raises
    ------
    ValueError
        Where they are no numbers, or not of equally many rows. A masked array is refused: its mask would be lost.
    """

    inputs: HostArray
    targets: HostArray
    mask: HostArray

    def __post_init__(self) -> None:
        for name in ("inputs", "targets", "mask"):
            object.__setattr__(self, name, array(f"Batch {name}", getattr(self, name)))
        if not len(self.inputs) == len(self.targets) == len(self.mask):
            lengths = len(self.inputs), len(self.targets), len(self.mask)
            raise ValueError(f"a Batch has inputs, targets and mask of {lengths} rows: they must be equally many")
        if self.mask.dtype != bool:
            raise ValueError(f"a Batch has a mask of {self.mask.dtype}: it must be bool, True where a target counts")

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, rows: Sequence[int] | HostArray) -> Batch:
        """Return the named rows."""
        index = np.asarray(rows, dtype=np.intp)
        return Batch(self.inputs[index], self.targets[index], self.mask[index])

    def on(self, xp: ModuleType, dtype: str) -> Batch:
        """Return the batch as arrays of ``xp``, numbers that are not token numbers in ``dtype``."""
        inputs, targets = (x if x.dtype.kind in "iu" else x.astype(dtype) for x in (self.inputs, self.targets))
        return Batch(xp.asarray(inputs), xp.asarray(targets), xp.asarray(self.mask))


def array(name: str, x: Any) -> Any:
    """Return an array of numbers: ``x`` itself, on whatever device, or what ``numpy.asarray`` makes of a list."""
    if not isinstance(getattr(x, "dtype", None), np.dtype):
        try:
            x = np.asarray(x)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{name} is {short(x)}: NumPy makes no array of it: {error}") from None
    if not x.ndim or x.dtype.kind not in "biuf":
        raise ValueError(f"{name} is of {x.dtype} and of shape {x.shape}: it must be an array of numbers, a row each")
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError(
            f"{name} is a masked array: say by the Batch's mask which targets count, and give plain arrays"
        )
    return x


@dataclass(frozen=True)
class Case:
    """A complete problem.

    Attributes
    ----------
    model : what is trained
    optimizer : how it is updated
    batches : one a step, all rows of all ranks; kept as a tuple, unless they are :class:`TextBatches`. Whole numbers
        become float64 where the model is an MLP, for which they are numbers like others
    precision : the types
    clip : largest allowed global norm of the gradients, None for no clipping
    divide : where the token count divides: ``"before"`` the backward pass starts, or ``"after"`` the
        gradients are summed, which keeps integers exact. See :func:`refpar.nn.loss.seed_and_divisor`.
    seed : of initial values and dropout
    frozen : parameters that are not trained: names, or prefixes such as ``"blocks.0"`` for all that is below
    """

    model: GPT | MLP
    optimizer: SGD | Adam | AdamW
    batches: Sequence[Batch]
    precision: Precision = field(default_factory=Precision)
    clip: float | None = None
    divide: Literal["before", "after"] = "before"
    seed: int = 0
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kinds in (("model", (GPT, MLP)), ("optimizer", (SGD, Adam)), ("precision", (Precision,))):
            if not isinstance(getattr(self, name), kinds):
                words = " or ".join(f"a refpar.{kind.__name__}" for kind in kinds)
                raise ValueError(f"Case {name} is {short(getattr(self, name))}: it must be {words}")
        if self.divide not in ("before", "after"):
            raise ValueError(f"Case divide is {self.divide!r}: it must be 'before' or 'after'")
        fix(self, whole, "seed")
        if self.clip is not None:
            fix(self, real, "clip", positive=True)
        cut_later = isinstance(self.batches, TextBatches)  # and then one is like all
        if not cut_later:
            batches = (in_numbers(self.model, batch) for batch in tuple_of(self, "batches", Batch))
            object.__setattr__(self, "batches", tuple(batches))
        for number, batch in enumerate(self.batches[:1] if cut_later else self.batches):
            check_batch(self.model, batch, f"batch {number}")
        object.__setattr__(self, "frozen", tuple_of(self, "frozen", str))
        for name in self.frozen:
            if not any(below(known, name) for known in self.model.build().specs):
                raise ValueError(
                    f"Case frozen names {name!r}: it must be a tuple of names of parameters, or of what they are below"
                )

    @property
    def frozen_names(self) -> frozenset[str]:
        """The parameters that get no gradient, no update and no optimizer state."""
        return frozen_names(self.model.build().specs, self.frozen) if self.frozen else frozenset()


def tuple_of(case: Case, name: str, kind: type) -> tuple[Any, ...]:
    """Return a sequence of a case as a tuple."""
    given = getattr(case, name)
    if isinstance(given, str | Batch) or not isinstance(given, Iterable):
        raise ValueError(f"Case {name} is {short(given)}: it must be a sequence, each a {kind.__name__}")
    values = tuple(given)
    for value in values:
        if not isinstance(value, kind):
            raise ValueError(f"Case {name} has {short(value)}: each must be a {kind.__name__}")
    return values


def in_numbers(model: GPT | MLP, batch: Batch) -> Batch:
    """Return the batch as ``model`` computes with it: an MLP in floating point, whatever its rows were written in."""
    whole = {n: x.astype(np.float64) for n in ("inputs", "targets") if (x := getattr(batch, n)).dtype.kind in "biu"}
    return dataclasses.replace(batch, **whole) if isinstance(model, MLP) and whole else batch


def check_batch(model: GPT | MLP, batch: Batch, what: str) -> None:
    """Refuse a batch that ``model`` cannot take. An index out of range would wrap silently, on some devices.

    Raises
    ------
    ValueError
        That says which array has which shape, type or value, and what it must be.
    """
    rows = len(batch)
    if isinstance(model, MLP):
        shapes = {"inputs": (rows, model.widths[0]), "targets": (rows, model.widths[-1]), "mask": (rows,)}
    else:
        sequence = min(batch.inputs.shape[1], model.context) if batch.inputs.ndim == 2 else model.context
        shapes = dict.fromkeys(("inputs", "targets", "mask"), (rows, max(sequence, 1)))
    for name, shape in shapes.items():
        found = getattr(batch, name).shape
        if found != shape:
            raise ValueError(f"{what} has {name} of shape {found}: the model takes {shape}")
    if isinstance(model, MLP):
        return
    for name, tokens in (("inputs", batch.inputs), ("targets", batch.targets[batch.mask])):
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"{what} has {name} of {tokens.dtype}: tokens are integers")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < model.vocabulary:
            raise ValueError(
                f"{what} has {name} from {tokens.min()} to {tokens.max()}: tokens are 0 to {model.vocabulary - 1}"
            )


def frozen_names(names: Iterable[str], frozen: Sequence[str]) -> frozenset[str]:
    """Return those of ``names`` that ``frozen`` names, or that are below one it names."""
    return frozenset(name for name in names if any(below(name, prefix) for prefix in frozen))


def below(name: str, prefix: str) -> bool:
    """Return whether ``name`` is ``prefix``, or in what that names: ``blocks.10`` is not below ``blocks.1``."""
    return name == prefix or name.startswith(prefix + ".")


@dataclass(frozen=True)
class Layout:
    """How a case is split. ``dp * tp * pp`` ranks.

    A layout decides in which order gradients are added up and so how the sum is rounded. In float16 it may decide more.
    One device that takes all rows at once adds them in float32 and rounds the sum, and that is what a step means.
    Where rows are taken in micro-batches, what is stored between them is of type :attr:`Precision.gradients`, and what
    goes round the ring is of type :attr:`Precision.reduce`, of which one device has none. Where either is float16, a
    part of the sum beyond 65504 is an overflow, and the step is skipped, even if the whole sum would have been finite:
    40000 + 40000 - 40000. With float32 for both no layout skips a step that one device makes.

    Attributes
    ----------
    dp : replicas of the model, each with its own rows (data parallel)
    tp : slices of each layer (tensor parallel)
    pp : stages of the list of units (pipeline)
    zero : what replicas do not keep twice: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too
    micro_batches : parts in which a replica takes its rows, one after the other
    schedule : order of forward and backward passes, ``"1f1b"`` or ``"gpipe"``
    recompute : activation checkpointing: ``"none"``, ``"block"``, ``"sqrt"``, or a number of blocks, kept as text
    bucket : elements that are gathered up before gradients are reduced together
    stages : units of each pipeline stage, as numbers or as ``"3+2+1"``; none given, they are split near-evenly
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    bucket: int = 1 << 18
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", counts(self.stages))
        fix(self, whole, "dp", "tp", "pp", "bucket", least=1)
        fix(self, whole, "micro_batches", least=1, most=MOST_MICRO_BATCHES)
        fix(self, whole, "zero", least=0, most=3)
        if self.schedule not in SCHEDULES:
            raise ValueError(f"Layout schedule is {self.schedule!r}: it must be one of {', '.join(SCHEDULES)}")
        if self.stages and len(self.stages) != self.pp:
            raise ValueError(f"Layout stages is {self.stages}: it must give the units of each of pp={self.pp} stages")
        object.__setattr__(self, "recompute", str(self.recompute))
        segment_length(self.recompute, 1)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.tp * self.pp

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``"dp=2,micro_batches=3"``; hyphens and underscores are the same."""
        known = [f.name for f in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = (word.strip() for word in part.partition("="))
            key = key.replace("-", "_")
            if key not in known:
                raise ValueError(f"layout key {key!r} is unknown: {meant(key, known)}")
            if not equals or not value:
                raise ValueError(f"layout {part!r} has no value: write {key}=VALUE")
            if key in values:
                raise ValueError(f"layout {key} is given twice, as {values[key]} and as {value}")
            try:
                values[key] = value if key in ("schedule", "recompute", "stages") else int(value)
            except ValueError:
                raise ValueError(f"layout {key} is {short(value)}: it must be a whole number") from None
        if not values:
            raise ValueError(f"layout {text!r} says nothing: write KEY=VALUE, such as dp=2, of {', '.join(known)}")
        return cls(**values)

    def __str__(self) -> str:
        """``dp``, and what else differs from one device, such as ``dp=2,micro_batches=3``."""
        changed = [f for f in dataclasses.fields(self) if f.name == "dp" or getattr(self, f.name) != f.default]
        values = {f.name: getattr(self, f.name) for f in changed}
        return ",".join(f"{k}={'+'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in values.items())


def counts(stages: Any) -> tuple[int, ...]:
    """Read the ``stages`` of a layout: numbers, or text such as ``"3+2+1"``.

    Raises
    ------
    ValueError
        Where a stage has no units, or no number of them.
    """
    try:
        given = [int(part) for part in stages.split("+") if stages] if isinstance(stages, str) else stages
        return tuple(whole("stage", count, least=1) for count in given)
    except (ValueError, TypeError):
        must = "it must be whole numbers of at least 1, such as 3+2+1"
        raise ValueError(f"Layout stages is {short(stages)}: {must}") from None


@dataclass
class Step:
    """What one step computed. Arrays are whole, on the host, in the order given here.

    Attributes
    ----------
    count : tokens (or rows) that count, over all ranks
    loss : their mean loss; 0 where there are none
    gradients : by parameter, last layer first: divided by count and scale, not clipped
    norm : global norm of ``gradients``, before clipping
    outcome : ``"updated"``, or why nothing was updated
    scale, good : loss scale and its growth counter *after* the step
    t : updates made so far
    parameters : the weights that the next forward pass sees
    state : by parameter, then by buffer: the optimizer's, and ``master`` where weights are float16

    Frozen parameters are among ``parameters`` alone.
    """

    count: int
    loss: float
    gradients: dict[str, HostArray]
    norm: float
    outcome: Outcome
    scale: float
    good: int
    t: int
    parameters: dict[str, HostArray]
    state: dict[str, dict[str, HostArray]]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield ``(name, value)`` in causal order, names such as ``gradient/blocks.0.mlp.up.weight``."""
        yield "count", self.count
        yield "loss", self.loss
        yield from ((f"gradient/{name}", value) for name, value in self.gradients.items())
        yield "norm", self.norm
        yield "outcome", self.outcome
        yield "scale", self.scale
        yield "good", self.good
        yield "t", self.t
        for name, buffers in self.state.items():
            yield from ((f"state/{name}/{buffer}", value) for buffer, value in buffers.items())
        yield from ((f"parameter/{name}", value) for name, value in self.parameters.items())


@dataclass
class Trace:
    """What a run of a case computed, and what it took.

    Attributes
    ----------
    case, layout : what was run
    steps : one :class:`Step` a batch, from batch number ``begun`` on
    ledgers : by rank, what was sent; empty for one device
    bytes_held : by rank, bytes of arrays kept from step to step
    peak_bytes : by rank, largest bytes of activations kept for the backward pass
    peak_live : by rank, largest number of micro-batches alive between their forward and backward pass
    schedule : by rank, what its pipeline stage did in the last step, in the order in which it did it
    peak_gradients : by rank, largest bytes of stored gradients alive at once
    peak_gathered : by rank, largest bytes of weights gathered for one unit: ZeRO-3's
    """

    case: Case
    layout: Layout
    steps: list[Step]
    ledgers: list[Any] = field(default_factory=list)
    bytes_held: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    peak_live: list[int] = field(default_factory=list)
    schedule: list[tuple[Any, ...]] = field(default_factory=list)
    begun: int = 0
    peak_gradients: list[int] = field(default_factory=list)
    peak_gathered: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class State:
    """Between two steps: all that is needed to go on as if there had been no stop, whatever the layout before or after.

    Attributes
    ----------
    identity : what case this belongs to, see :func:`identity`
    data : digest of the batches taken
    step : how many those are: the position in the data, which dropout depends on too
    t, scale, good : as in :class:`Step`
    parameters, state : as in :class:`Step`: whole, by name and global shape. Whoever goes on copies them first
    """

    identity: Mapping[str, str]
    data: str
    step: int
    t: int
    scale: float
    good: int
    parameters: Mapping[str, HostArray]
    state: Mapping[str, Mapping[str, HostArray]]

    @classmethod
    def initial(cls, case: Case, values: Mapping[str, HostArray] | None = None) -> State:
        """Return where a run starts: from ``values``, or from those that the seed of the case draws."""
        types, specs = case.precision, case.model.build().specs
        if values is not None and (odd := sorted(values.keys() ^ specs.keys())):
            what = "has no" if odd[0] in specs else "has a parameter that the model has not:"
            raise ValueError(f"State.initial values {what} {odd[0]}")
        masters = {}
        for name, spec in specs.items():
            value = initial_value(case.seed, name, spec, types.master) if values is None else values[name]
            masters[name] = array(f"State.initial {name}", value).astype(types.master)
        frozen = case.frozen_names
        state = {name: new_state(case.optimizer, p) for name, p in masters.items() if name not in frozen}
        if types.master != types.compute:
            state = {name: {**own, "master": masters[name]} for name, own in state.items()}
        weights = {name: to_compute(p, types) for name, p in masters.items()}
        return cls(identity(case), digest(()), 0, 0, LossScaler(types.loss_scale).scale, 0, weights, state)

    @classmethod
    def after(cls, trace: Trace) -> State:
        """Return where a run has got to.

        Raises
        ------
        ValueError
            Where it has not made a step.
        """
        if not trace.steps:
            raise ValueError("the trace has no step: there is no state after it")
        last, step = trace.steps[-1], trace.begun + len(trace.steps)
        data = digest(trace.case.batches[:step])
        return cls(identity(trace.case), data, step, last.t, last.scale, last.good, last.parameters, last.state)

    def check(self, case: Case) -> None:
        """Refuse to go on with another case than the one this belongs to.

        Raises
        ------
        ValueError
            With the first thing that differs: an option, the data, or a parameter.
        """
        for key, value in identity(case).items():
            if self.identity.get(key) != value:
                raise ValueError(
                    f"the state was saved with {key}={self.identity.get(key)}, and this run has {key}={value}"
                )
        if self.step > len(case.batches):
            raise ValueError(f"the state is after step {self.step}, and this run has {len(case.batches)} steps in all")
        if self.data != digest(case.batches[: self.step]):
            raise ValueError(f"the state was saved after {self.step} batches of other data than this run has")
        types, specs = case.precision, case.model.build().specs
        kept = {*case.optimizer.state_names, *(["master"] if types.master != types.compute else [])}
        wanted = {f"parameter {n}": (s.shape, types.compute) for n, s in specs.items()}
        trained = [name for name in specs if name not in case.frozen_names]
        wanted |= {f"{buffer} of {n}": (specs[n].shape, types.master) for n in trained for buffer in kept}
        found = {f"parameter {n}": x for n, x in self.parameters.items()}
        found |= {f"{buffer} of {n}": x for n, own in self.state.items() for buffer, x in own.items()}
        for name in dict.fromkeys((*wanted, *found)):
            got = (tuple(found[name].shape), found[name].dtype.name) if name in found else "missing"
            if got != wanted.get(name):
                raise ValueError(f"the state's {name} is {got}: it must be {wanted.get(name, 'absent')}")

    def master(self, name: str) -> HostArray:
        """Return what the optimizer updates: the weights themselves unless those are float16."""
        return self.state.get(name, {}).get("master", self.parameters[name])

    def buffers(self, name: str) -> dict[str, HostArray]:
        """Return what the optimizer keeps beside the weights."""
        return {buffer: x for buffer, x in self.state.get(name, {}).items() if buffer != "master"}


def identity(case: Case) -> dict[str, str]:
    """Return all options of a case but its batches, as text by name: ``model``, ``model.width``, ``optimizer.lr``."""
    options: dict[str, str] = {}

    def note(name: str, value: Any) -> None:
        if dataclasses.is_dataclass(value):
            options[name] = type(value).__name__
            for f in dataclasses.fields(value):
                note(f"{name}.{f.name}", getattr(value, f.name))
        else:
            options[name] = repr(value)

    for f in dataclasses.fields(case):
        if f.name != "batches":
            note(f.name, getattr(case, f.name))
    return options


def digest(batches: Iterable[Batch]) -> str:
    """Return a fingerprint of batches, the same for the same numbers in the same types."""
    result = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for x in (batch.inputs, batch.targets, batch.mask):
            result.update(repr((x.shape, x.dtype.str)).encode())
            result.update(np.ascontiguousarray(x).tobytes())
    return result.hexdigest()


def gradient_order(units: Sequence[tuple[str, Any]]) -> list[str]:
    """Return parameter names in the order in which the backward pass reaches them first."""
    names: Mapping[str, None] = dict.fromkeys(name for _, layer in reversed(units) for name in reversed(layer.specs))
    return list(names)


@dataclass(frozen=True)
class TextBatches(Sequence[Batch]):
    """Batches of next-byte prediction, cut out of real text when they are asked for: there may be millions.

    Row by row, a passage of ``context + 1`` bytes is chosen at random. The targets of the last part of some
    rows are masked, as the end of a document would be: ranks then have unequal numbers of tokens. What a step gets
    depends on its number and not on how many there are.

    Raises
    ------
    ValueError
        Where the text is shorter than one row.
    """

    data: bytes = field(repr=False)
    steps: range
    rows: int
    context: int
    seed: int = 0

    def __post_init__(self) -> None:
        fix(self, whole, "rows", "context", least=1)
        fix(self, whole, "seed")
        size, context = len(self.data), self.context
        if size <= context:
            raise ValueError(f"the text has {size} bytes: one row of {context} needs at least {context + 1}")

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> TextBatches: ...

    def __getitem__(self, index: int | slice) -> Batch | TextBatches:
        """Cut the batch of one step, or name those of several."""
        if isinstance(index, slice):
            return dataclasses.replace(self, steps=self.steps[index])
        step = self.steps[index]
        text = np.frombuffer(self.data, np.uint8)
        starts = rng.integers((self.seed, "text", step), (self.rows,), 0, len(text) - self.context)
        ends = rng.integers((self.seed, "ends", step), (self.rows,), 1, 2 * self.context)  # half lie behind the row
        passages = text[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)
        mask = np.arange(self.context) < ends[:, None]
        return Batch(passages[:, :-1], passages[:, 1:], mask)


def text_batches(data: bytes, *, steps: int, rows: int, context: int, seed: int = 0) -> tuple[Batch, ...]:
    """Return :class:`TextBatches` as a tuple, all of them cut."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ValueError(f"text_batches data is {short(data)}: it must be bytes, such as open(path, 'rb').read()")
    return tuple(TextBatches(data, range(whole("text_batches steps", steps, 0)), rows, context, seed))
