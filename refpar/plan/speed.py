"""How long a step takes, on paper, and how much of the devices' peak that is.

::

    step  =  pipeline  +  what data parallel cannot hide
    pipeline  =  sum of a micro-batch's time over the stages  +  (M - 1) of the slowest stage
    a micro-batch on a stage  =  multiply-adds / (peak x efficiency)  +  tensor-parallel sums  +  messages

That is what GPipe takes, however unequal the stages; where they are unequal, 1F1B takes a little less.
For equal stages the pipeline is (M + K - 1) turns: the bubble is (K-1)/M of the ideal step (Narayanan et al. 2021,
section 2.2), or (K-1)/(M+K-1) of the real one (GPipe, section 2.3). These are one bubble under two names; v
chunks a stage divide it by v. GPipe calls it negligible from M = 4K on; the formula has 18 % there for K = 8.

Floating-point operations are twice the multiply-adds of the matrix products, which the ledger of products counts one
by one: forward once, backward twice, and what is recomputed once more. *Model* FLOPs leave the recomputation out
(MFU), *executed* FLOPs do not (HFU). With ``causal`` only half of the attention matrix counts as model work; without
it long sequences report more than they can (121 % at 16k tokens, torchtitan#341). The peak is the dense one.

The formulas of the papers follow: 72 B L s h^2 (1 + s/6h + V/12Lh) for a GPT, 96 (...) with full recomputation
(Korthikanti et al. 2022, equation 7; Narayanan et al. 2021, equation 3). For selective recomputation Korthikanti's
equation 8 has s/3h, which charges 12 B s^2 h a layer for what runs again; two products of 2 B s^2 h each do, so its
2.7 % more FLOPs for GPT-3 are 0.9 %.
The bigscience README says its TFLOPs use 8 psi T; the log agrees with the formula above (149.8) and not with
8 psi T (147.1). The Megatron-LM abstract has 76 %, its table 74 %, its text 77 % of linear scaling: 15.1 PFLOP/s
over 512 times 39 TFLOP/s is 75.6 %. Gradients hide behind the backward pass where
``bytes/2 (N-1)/N peak / (tokens x bandwidth)`` is below 1: psi cancels, but not in the Ultra-Scale playbook.

**How far to trust it.** ``EFFICIENCY`` is the share of peak that matrix products reach; it is the only fitted number
(see ``benchmarks/plan.py``), and real kernels vary more than layouts do. Rankings are worth more than seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from refpar.plan import costs, traffic
from refpar.plan.activations import Weigher
from refpar.plan.costs import Link
from refpar.plan.models import Bare, Model
from refpar.plan.recipes import Recipe
from refpar.plan.segments import segments
from refpar.plan.setups import Place, Setup, check, distinct, network_of, units_of
from refpar.plan.tensors import Grid, Network, Tensor, Unit

EFFICIENCY = 0.55
BACKWARD = 2  # two products in the backward pass for each of the forward pass


@dataclass(frozen=True)
class Hardware:
    """The devices and what is between them.

    Attributes
    ----------
    memory : bytes of a device
    per_server : devices in a server
    intra : bytes a second from a device to another one of its server
    inter : bytes a second from a server to another, shared by all its devices
    peak : dense floating-point operations a second of a device
    efficiency : share of it that matrix products reach
    reserve : bytes that are not for tensors: the process itself, fragmentation
    """

    memory: int
    per_server: int = 8
    intra: float = 300e9
    inter: float = 100e9
    peak: float = 312e12
    efficiency: float = EFFICIENCY
    reserve: int = 2**30

    def __post_init__(self) -> None:
        if self.per_server < 1:
            raise ValueError(f"per_server is {self.per_server}: it must be at least 1")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency}: it must be above 0, and at most 1")
        if self.reserve >= self.memory:
            raise ValueError(f"reserve is {self.reserve} bytes: the device has {self.memory}")

    @property
    def usable(self) -> int:
        """Bytes for tensors."""
        return self.memory - self.reserve


@dataclass(frozen=True)
class Step:
    """An estimate, in seconds.

    Attributes
    ----------
    total : of a step
    compute : of matrix products, on the slowest stage
    tensor_parallel : of its sums
    data_parallel : of its reduction and gathers, as far as they cannot be hidden behind the backward pass
    bubble : idle, and the same as a share of the ideal step and of the real one
    model_flops, executed_flops : of a step, over all devices
    algorithm : of the all-reduce of gradients
    """

    total: float
    compute: float
    tensor_parallel: float
    data_parallel: float
    bubble: float
    model_flops: int
    executed_flops: int
    capacity: float
    algorithm: str = field(default="")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation."""
        return self.model_flops / (self.total * self.capacity)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation."""
        return self.executed_flops / (self.total * self.capacity)


def bubble(K: int, M: int, v: int = 1) -> tuple[Fraction, Fraction]:
    """Return the bubble of K equal stages: as a share of the ideal step, and of the real one."""
    of_ideal = Fraction(K - 1, v * M)
    return of_ideal, of_ideal / (1 + of_ideal)


# Counting


def multiply_adds(units: Iterable[Unit], grid: Grid, core: bool | None = None) -> int:
    """Return the multiply-adds of the forward pass of one micro-batch: all, or those (not) of the attention core."""
    known: dict[Tensor, int] = {}
    total = 0
    for unit in units:
        for product in unit.kind.products:
            if core is None or product.core == core:
                if product not in known:
                    known[product] = product.elements(grid)
                total += known[product]
    return total


def recomputed(units: Iterable[Unit], net: Network, setup: Setup, grid: Grid) -> int:
    """Return the multiply-adds that a stage does once more for one micro-batch."""
    units = tuple(units)
    if setup.recompute == "selective":
        return multiply_adds(units, grid, core=True)
    again = [unit for segment in segments(units, net, setup) if segment.wrapped for unit in segment.units]
    return multiply_adds(again, grid)


def of_rank(model: Model, setup: Setup, recipe: Recipe, rank: int) -> int:
    """Return the multiply-adds of matrix products that one rank does in a step."""
    check(model, setup)
    place, net = setup.place(rank), network_of(model, setup)
    units, weigher = units_of(net, setup, place.p), Weigher(model, setup, recipe, place)
    return sum(
        number * ((1 + BACKWARD) * multiply_adds(units, grid) + recomputed(units, net, setup, grid))
        for grid, number in traffic.grids(weigher, place)
    )


def flops(model: Model, setup: Setup, *, causal: bool = False) -> tuple[int, int]:
    """Return the model FLOPs of a step, and those executed, over all devices; 6 psi a token where only psi is known."""
    net = network_of(model, setup)
    tokens = setup.tokens or getattr(model, "context", 1)
    if isinstance(model, Bare):
        once = 2 * model.size * setup.batch * tokens
        return (1 + BACKWARD) * once, (1 + BACKWARD + (setup.recompute not in ("none", "selective"))) * once
    grid = Grid(setup.batch, tokens)
    products, core = multiply_adds(net.units, grid), multiply_adds(net.units, grid, core=True)
    again = recomputed(net.units, net, setup, grid)
    useful = products - core // 2 if causal else products
    return 2 * (1 + BACKWARD) * useful, 2 * ((1 + BACKWARD) * products + again)


# Seconds


def step(model: Model, setup: Setup, recipe: Recipe, hardware: Hardware, *, causal: bool = False) -> Step:
    """Return the estimate for a step."""
    check(model, setup)
    kinds = distinct(network_of(model, setup), setup)
    stages = [stage_time(model, setup, recipe, hardware, p) for p in kinds]
    each = [(forward + backward, sums) for forward, backward, sums in stages]
    slowest, tp = max(each, key=sum)
    M, v = setup.micro_batches, setup.chunks
    turn = slowest + tp
    through = sum((compute + sums) * count for (compute, sums), count in zip(each, kinds.values(), strict=True))
    idle = (through - turn) / v
    exposed, algorithm = replicas(model, setup, recipe, hardware, stages[0])
    total = M * turn + idle + exposed
    useful, executed = flops(model, setup, causal=causal)
    return Step(total, M * slowest, M * tp, exposed, idle, useful, executed, setup.ranks * hardware.peak, algorithm)


def stage_time(model: Model, setup: Setup, recipe: Recipe, hardware: Hardware, p: int) -> tuple[float, float, float]:
    """Return the seconds of a micro-batch on a stage: forward, backward, and in tensor-parallel sums and messages."""
    net, place = network_of(model, setup), Place(p, 0, 0)
    units, grid = units_of(net, setup, p), Weigher(model, setup, recipe, place).grid(setup.largest_micro_batch)
    rate = hardware.peak * hardware.efficiency / 2
    if isinstance(model, Bare):
        forward, again = model.size * grid.rows * grid.tokens / setup.tp, 0
    else:
        forward, again = multiply_adds(units, grid), recomputed(units, net, setup, grid)
    sent = traffic.by_group(traffic.activations(net, model, setup, recipe, place))
    link = within(hardware, setup.tp)
    messages = sum(e.messages for e in traffic.activations(net, model, setup, recipe, place)) / setup.micro_batches
    tp = messages * link.alpha + sent.get("tp", 0) / setup.micro_batches * link.beta
    tensors = traffic.by_group(traffic.boundaries(net, model, setup, recipe, place)).get("pp", 0)
    across = hardware.inter / min(hardware.per_server, setup.ranks)
    return forward / rate, (BACKWARD * forward + again) / rate, tp + tensors / setup.micro_batches / across


def within(hardware: Hardware, neighbours: int) -> Link:
    """Return the link of a group of ranks with consecutive numbers."""
    inside = neighbours <= hardware.per_server
    return Link.of(hardware.intra if inside else hardware.inter / hardware.per_server)


def replicas(
    model: Model, setup: Setup, recipe: Recipe, hardware: Hardware, stage: tuple[float, float, float]
) -> tuple[float, str]:
    """Return the seconds of data parallel that are not hidden, and the algorithm.

    With ZeRO 0 and 1 only the last micro-batch has gradients that are final, so only its backward pass hides their
    reduction; the all-gather of weights at the end of ZeRO 1 and 2 hides behind nothing. ZeRO 2 and 3 communicate in
    every micro-batch, and are as fast as the slower of computing and communicating.
    """
    N = setup.sharing
    if N == 1:
        return 0.0, ""
    net = network_of(model, setup)
    forward, backward, _ = stage
    sent = {
        entry.what: entry.bytes
        for entry in traffic.gradients_and_weights(net, setup, recipe, Place(0, 0, 0))
    }  # fmt: skip
    M, share = setup.micro_batches, N / (N - 1)
    reduce, algorithm = halves(sent.get("gradients", 0) * share, N, setup.tp, hardware, whole=setup.zero == 0)
    gather, _ = halves(sent.get("weights", 0) * share, N, setup.tp, hardware, whole=False)
    if setup.zero <= 1:
        return max(0.0, reduce - backward) + gather, algorithm
    if setup.zero == 2:
        return M * max(0.0, reduce / M - backward) + gather, algorithm
    return M * max(0.0, (reduce + gather) / M - forward - backward), algorithm


def halves(sent: float, N: int, tp: int, hardware: Hardware, *, whole: bool) -> tuple[float, str]:
    """Return the seconds of an all-reduce (``whole``), or of one half of it, over N replicas ``tp`` ranks apart.

    Parameters
    ----------
    sent : N/(N-1) of the bytes a rank sends: S for a half, 2 S for the whole
    """
    inside = max(1, min(N, hardware.per_server // tp))  # replicas in one server
    servers = -(-N // inside)
    rings = max(1, min(hardware.per_server, N * tp) // inside)  # that leave a server side by side
    intra = Link.of(hardware.intra)
    if servers == 1:
        link = intra
        if whole:
            return costs.all_reduce(sent / 2, N, link)
        return costs.all_gather(sent, N, link), "ring"
    flat = Link.of(min(hardware.intra, hardware.inter / rings))
    across = Link.of(hardware.inter / rings / inside)
    if whole:
        times = [
            (costs.hierarchical(sent / 2, inside, servers, intra, across), "hierarchical"),
            costs.all_reduce(sent / 2, N, flat),
        ]
        return min(times)
    return min(
        (costs.all_gather(sent, N, flat), "ring"),
        (costs.all_gather(sent, inside, intra) + costs.all_gather(sent / inside, servers, across), "hierarchical"),
    )
