"""What an honest result may be off by: never less than honest results are, never so much that a mistake fits in."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from strategies import batch, narrow_cases, overflowing

from refpar import optim, rng, single
from refpar.case import Batch, Case, Layout, State, Trace
from refpar.nn.models import MLP
from refpar.optim import SGD, Adam
from refpar.oracle import bounds, running, stochastic
from refpar.oracle import compare as compare_module
from refpar.oracle.cases import CASES, integers, mlp
from refpar.oracle.compare import compare
from refpar.oracle.running import TYPES, Carried, NotCarried
from refpar.oracle.stochastic import Constant, Library, Shaken, bare, shake
from refpar.precision import LossScale, Precision

EXACT = [name for name in CASES if name.startswith("integers")]
SINGLE = TYPES["float32"]


def orders(case: Case, runs: int) -> list[Trace]:
    """The single device in other orders and other micro-batches."""
    return [single.train(case, split=bounds.shuffled(case, run)) for run in range(runs)]


# --------------------------------------------------------------------------------------------- exact and running


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", EXACT)
def test_what_is_proved_exact_is_exact(name: str, dtype: str) -> None:
    """The integer cases are proved exact in both types, and every order of rows gives the bits of the truth."""
    case = CASES[name].make(dtype)
    allowed = bounds.allowed(case, CASES[name].layout)
    assert allowed.tier == "exact"
    truth = bounds.truth(case)
    for trace in orders(case, 3):
        for got, true in zip(trace.steps, truth.steps, strict=True):
            for key, x in true.items():
                if key != "norm":
                    assert np.array_equal(dict(got.items())[key], x), key


def test_overflow_is_proved_exact_in_float16() -> None:
    """The float16 case is proved exact; its overflow is seen in every order, and only where it was put."""
    case = CASES["overflow"].make("float16")
    assert bounds.allowed(case, CASES["overflow"].layout).tier == "exact"
    with np.errstate(all="ignore"):
        for trace in orders(case, 3):
            assert [step.outcome for step in trace.steps] == ["overflow", "updated", "updated"]
            assert [step.scale for step in trace.steps] == [512, 512, 1024]
        rows = [bounds.everything(case, Layout(dp=11), single.train(case))[0][f"dp{d}/micro0/loss"] for d in range(11)]
    assert sum(loss > 100 for loss in rows) == 1


@pytest.mark.parametrize(
    "case",
    [
        integers((5, 15, 7), 35, 3, 4.0, 1, "float32", steps=3),
        replace(integers((5, 15, 7), 35, 3, 4.0, 1, "float32"), optimizer=SGD(lr=1 / 3)),
        integers((5, 15, 7), 35, 2, 4.0, 1, "float32"),
    ],
    ids=["too many steps", "a rate that is no power of two", "a count that is no power of two"],
)
def test_what_rounds_is_not_proved_exact(case: Case) -> None:
    """One step too many, a learning rate or a count that is not dyadic: the proof fails, and a bound takes over."""
    allowed = bounds.allowed(case, Layout())
    assert allowed.tier in ("running", "statistical")
    assert any(e.any() for step in allowed.steps for name, e in step.items() if name != "norm")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_running_bound_holds_and_is_sharp(dtype: str) -> None:
    """No honest run leaves the bound; and the bound is at most 1e-3 of a gradient, so that no mistake fits in."""
    case = mlp(dtype)
    truth = bounds.truth(case)
    allowed = bounds.allowed(case, Layout())
    assert allowed.tier == "running"
    for trace in orders(case, 5):
        verdict = compare(trace, truth, bounds=allowed.steps)
        assert verdict.ok, verdict
    for name, g in truth.steps[0].gradients.items():
        assert allowed.steps[0][f"gradient/{name}"].max() < 1e-3 * np.abs(g).max()


@given(narrow_cases(), st.integers(0, 2**16))
@settings(max_examples=100)
def test_honest_runs_stay_inside(case: Case, run: int) -> None:
    """Whatever is frozen, clipped or cancelled by integers: one device in another order is within what is allowed."""
    try:
        allowed = bounds.allowed(case, Layout()).steps
    except bounds.Unbounded:
        reject()
    verdict = compare(single.train(case, split=bounds.shuffled(case, run)), bounds.truth(case), bounds=allowed)
    assert verdict.ok, verdict


def test_a_running_bound_that_has_grown_gives_way() -> None:
    """Two hidden layers of 64 and six steps: the worst case would pass a step of zeros, and another bound is taken."""
    model = MLP((16, 64, 64, 8))
    batches = tuple(batch(model, 32, 1.0, seed=0, step=step) for step in range(6))
    case = Case(model, SGD(lr=0.125 / 4, momentum=0.5), batches, Precision("float32"))
    truth = bounds.truth(case)
    true = bounds.everything(case, Layout(), truth)
    assert not bounds.useful(bounds.carried(case, Layout(), "float32", true), true, 0.0)
    allowed = bounds.allowed(case, Layout(), true)
    assert allowed.tier == "statistical"
    assert bounds.useful(allowed.steps, true, 0.0)
    assert compare(single.train(case, split=bounds.shuffled(case, 1)), truth, bounds=allowed.steps).ok
    wrong = single.train(case)
    wrong.steps[5].gradients["layers.1.weight"] *= np.float32(1 + 2.0**-12)
    first = compare(wrong, truth, bounds=allowed.steps).first
    assert first is not None
    assert first.name == "gradient/layers.1.weight"
    few = replace(case, batches=batches[:1])
    assert bounds.allowed(few, Layout()).tier == "running"


terms = st.lists(st.integers(-(2**15), 2**15), min_size=1, max_size=24)


@given(terms, st.integers(-20, 20), st.integers(-20, 20), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_sum_of_products_is_exact_or_within_its_bound(x: list[int], p: int, q: int, random: "object") -> None:
    """In float32 and in any order, a sum of products is its exact value where that was proved, and else within it."""
    w = [random.randint(-(2**15), 2**15) for _ in x]  # type: ignore[attr-defined]
    a = np.array([x], np.float64) * 2.0**p
    b = np.array([w], np.float64).T * 2.0**q
    carried = running.product(running.given(a), running.given(b), SINGLE)
    exact = sum((Fraction(float(u)) * Fraction(float(v)) for u, v in zip(a[0], b[:, 0], strict=True)), Fraction(0))
    for _ in range(3):
        order = list(range(len(x)))
        random.shuffle(order)  # type: ignore[attr-defined]
        total = np.float32(0)
        for i in order:
            total = total + np.float32(a[0, i]) * np.float32(b[i, 0])
        assert abs(Fraction(float(total)) - exact) <= Fraction(float(carried.error[0, 0]))
    assert carried.error[0, 0] <= 1e-5 * (np.abs(a) @ np.abs(b))[0, 0] + 2e-42


def test_uncertain_sign_allows_both_slopes() -> None:
    """Where the input of a ReLU is within its error of zero, its gradient may be there or not; elsewhere it may not."""
    y = Carried(np.array([1.0, 1e-9, -1e-9, -1.0, 0.0]), np.array([1e-8, 1e-8, 1e-8, 1e-8, 0.0]), None)
    dx = running.slope(running.given(np.full(5, 3.0)), y)
    assert dx.value.tolist() == [3, 3, 0, 0, 0]
    assert dx.error.tolist() == [0, 3, 3, 0, 0]


def test_clipping_allows_for_the_largest_factor() -> None:
    """A factor of at most 3/4 may be used and the product is rounded: both are allowed for, to the last digit."""
    carried = running.clipped(running.given(np.array([1 / 3])), 0.5, 0.25, SINGLE)
    assert carried.error[0] >= 0.25 / 3 + 2.0**-24 * 0.75 / 3


@pytest.mark.parametrize(("residual", "exact"), [(1, True), (4, False)])
def test_parts_of_a_sum_must_fit_in_halves(residual: int, exact: bool) -> None:
    """Where a gradient fits in a half and parts of its sum do not, an overflow depends on the order: no proof."""
    model = MLP((1, 1), init="integers")
    y = bounds.State.initial(Case(model, SGD(lr=1.0), ())).parameters["layers.0.bias"]
    targets = y + residual * np.array([[1.0], [1.0], [-1.0], [-1.0]])
    batch = Batch(np.zeros((4, 1)), targets, np.ones(4, bool))
    types = Precision("float16", loss_scale=LossScale(initial=2.0**12))
    case = Case(model, SGD(lr=1.0), (batch,), types, divide="after")
    if exact:
        assert not running.carry(case, "float16")[0].errors["gradient/layers.0.bias"].any()
    else:
        with pytest.raises(NotCarried, match="order of additions"):
            running.carry(case, "float16")


def test_grain_is_the_coarsest_power_of_two() -> None:
    """All values are multiples of the grain, and not all of twice it."""
    assert running.grain_of(np.array([0.75, 6.0, 0.0])) == -2
    assert running.grain_of(np.array([0.0])) == running.COARSEST
    assert running.grain_of(np.array([2.0**-1074, 1.0])) == -1074
    assert running.grain_of(np.array([np.inf])) is None


def test_transformers_and_adam_are_not_carried() -> None:
    """A bound that is not made for a case says so, and the statistical one takes its place."""
    case = CASES["ragged"].make("float32")
    with pytest.raises(NotCarried, match="MLP with ReLU"):
        running.carry(case, "float32")
    with pytest.raises(ValueError, match="only exact networks"):
        bounds.allowed(CASES["ragged"].make("float16"), Layout())


# -------------------------------------------------------------------------------------------------------- reduction


@given(
    st.integers(1, 7),
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
@settings(max_examples=100)
def test_reduction_bound_holds_in_any_order(ranks: int, values: list[float], seed: int) -> None:
    """(W-1) u sum|x| covers every order of additions in float32, as a chain and as a tree."""
    random = np.random.default_rng(seed)
    stack = [np.array(random.permuted(values) * random.choice([1, -1, 1 / 3]), np.float32) for _ in range(ranks)]
    exact, allowed = bounds.reduction(stack, "float32")
    with np.errstate(over="ignore", invalid="ignore"):
        random.shuffle(stack)
        chain = stack[0]
        for x in stack[1:]:
            chain = chain + x
        tree = list(stack)
        while len(tree) > 1:
            tree = [tree[i] + tree[i + 1] if i + 1 < len(tree) else tree[i] for i in range(0, len(tree), 2)]
    for result in (chain, tree[0]):
        assert (np.abs(result.astype(np.float64) - exact) <= allowed).all()


def test_integers_reduce_exactly() -> None:
    """Integers whose magnitudes sum below 2^24 are held to equality; one unit more, and they are not."""
    half = np.array([2.0**23], np.float32)
    assert bounds.reduction([half, half - 1], "float32")[1].max() == 0
    assert bounds.reduction([half, half + 1, half], "float32")[1].max() > 0
    assert bounds.reduction([np.array([2.0**-30], np.float32), half], "float32")[1].max() > 0


# ------------------------------------------------------------------------------------------------------ statistical


def test_student_quantile() -> None:
    """|t| with as many degrees of freedom as there are runs exceeds the quantile less than once in 10^10 numbers."""
    n = bounds.SHAKEN_RUNS
    constant = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
    t = np.linspace(bounds.QUANTILE, 40 * bounds.QUANTILE, 200_001)
    density = constant * (1 + t**2 / n) ** (-(n + 1) / 2)
    assert 1e-12 < 2 * np.trapezoid(density, t) < 1e-10


@pytest.mark.parametrize("name", ["ragged", "adamw-groups"])
def test_statistical_bound_holds_and_is_sharp(name: str) -> None:
    """Honest float32 runs stay inside; a gradient off by a thousandth, or one element of a weight by 1e-4, does not."""
    case = CASES[name].make("float32")
    truth = bounds.truth(case)
    allowed = bounds.allowed(case, Layout())
    assert allowed.tier == "statistical"
    for trace in orders(case, 3):
        verdict = compare(trace, truth, bounds=allowed.steps)
        assert verdict.ok, verdict
    for key in truth.steps[0].gradients:
        wrong = single.train(case)
        wrong.steps[0].gradients[key] = wrong.steps[0].gradients[key] * np.float32(1.001)
        verdict = compare(wrong, truth, bounds=allowed.steps)
        quiet = np.abs(truth.steps[0].gradients[key]).max() < 1e-6  # zero in theory, such as a key bias
        assert quiet or (verdict.first is not None and verdict.first.name == f"gradient/{key}"), key
    wrong.steps[1].parameters["head.norm.weight"][3] += 1e-4
    assert any(d.name == "parameter/head.norm.weight" for d in compare(wrong, truth, bounds=allowed.steps).divergences)


def test_unused_rows_must_be_exact() -> None:
    """The gradient of an embedding row that no token uses is zero, and no rounding excuses anything else."""
    case = CASES["ragged"].make("float32")
    first = case.batches[0]
    case = replace(case, batches=(replace(first, inputs=first.inputs % 29),))
    allowed = bounds.allowed(case, Layout()).steps[0]["gradient/embedding.token.weight"]
    assert not allowed[29:].any()
    assert allowed[:29].any()


def test_shaking_is_as_large_as_rounding() -> None:
    """A result is off by up to u beside its roundings, a sum of n by u sqrt(n) of its magnitudes; by 0 on average."""
    a = np.linspace(1, 2, 10_001, dtype=np.float32)
    library = Library(0)
    off = bare(library.asarray(a) * np.float32(1.25)).astype(np.float64) / (a.astype(np.float64) * 1.25) - 1
    assert 2.0**-26 < np.abs(off).mean() < np.abs(off).max() <= 3 * 2.0**-24
    assert abs(off.mean()) < 2.0**-26 / 10
    sums = np.array([float(library.asarray(a).sum()) for _ in range(200)]) - math.fsum(a)
    assert 0.1 < sums.std() / (2.0**-24 * math.sqrt(a.size) * math.fsum(a)) < 1


def test_what_does_not_round_is_not_shaken() -> None:
    """Maximum, comparison, sign, indexing, whole numbers and infinities stay as they are."""
    x = shake(np.array([[1.0, -2.0, 3.0], [0.5, 0.25, -0.125]], np.float32), np.random.default_rng(0))
    plain = bare(x)
    assert np.array_equal(bare(np.maximum(x, 0)), np.maximum(plain, 0))
    assert np.array_equal(bare(-x), -plain)
    assert np.array_equal(bare(abs(x)), abs(plain))
    assert np.array_equal(bare(x.max(axis=1)), plain.max(axis=1))
    assert np.array_equal(x > 0, plain > 0)
    assert np.array_equal(bare(x[:, ::2].T), plain[:, ::2].T)
    assert np.isposinf(bare(x + np.inf)).all()
    assert not np.array_equal(bare(x * np.float32(1.1)), plain * np.float32(1.1))


def test_shaking_goes_all_the_way_to_the_loss() -> None:
    """No two shaken runs have a number in common that was computed by rounding: not the loss, not one gradient."""
    case = CASES["ragged"].make("float64")
    runs = [dict(single.train(case, xp=Library(seed)).steps[0].items()) for seed in range(6)]  # type: ignore[arg-type]
    assert len({run["loss"] for run in runs}) > 3
    assert len({run["norm"] for run in runs}) > 3
    for name in runs[0]:
        if name.startswith("gradient/"):
            assert len({float(np.ravel(run[name])[np.argmax(np.abs(runs[0][name]))]) for run in runs}) > 3, name


def test_shaking_stays_in_its_type() -> None:
    """Results keep their type; what was float32 and is widened is shaken as float32, and a summed half too."""
    random = np.random.default_rng(0)
    x = shake(np.full((40, 40), np.float32(1 / 3) * 3), random) + np.float32(1 / 3)
    assert (x @ x).dtype == np.float32
    assert isinstance(x @ x, Shaken)
    wide = x.astype(np.float64)
    assert 1e-10 < np.abs(bare(wide * 3.0) / 3.0 / bare(wide) - 1).max() < 1e-6
    y = x.copy()
    y += 1
    assert isinstance(y, Shaken)
    half = shake(np.ones(4000, np.float16), random)
    assert (half + half).dtype == np.float16
    assert abs(float(half.astype(np.float32).sum()) - 4000) < 1
    assert np.unique(bare((half.astype(np.float32) * np.float32(0.1)).astype(np.float16))).size > 1


def adam(kind: str) -> Callable[..., None]:
    """Adam in float32 as others write it: its corrections from powers in float32, or all of its constants so."""
    f = np.float32

    def update(o: Any, p: Any, g: Any, state: Any, t: int, decay: bool) -> None:
        b1, b2 = (f(b) for b in o.betas)
        rest = (f(1 - b) for b in o.betas) if kind == "powers" else (f(1) - b1, f(1) - b2)
        c1, c2 = (f(1) - b ** f(t) for b in (b1, b2))
        m, v = state["m"], state["v"]
        r1, r2 = rest
        m *= b1
        m += r1 * g
        v *= b2
        v += r2 * (g * g)
        p -= f(o.lr) * ((m / c1) / (np.sqrt(v / c2) + f(o.eps)))

    return update


@pytest.mark.parametrize("kind", ["powers", "all"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.8, 0.9999)])
def test_constants_may_be_kept_in_float32(
    monkeypatch: pytest.MonkeyPatch, kind: str, betas: tuple[float, float]
) -> None:
    """1 - 0.999 in float32 is off by up to a thousand roundings, and whoever computes it there is no less right."""
    case = replace(small(3, Precision("float32")), optimizer=Adam(lr=0.01, betas=betas, eps=1e-8))
    truth, allowed = bounds.truth(case), bounds.allowed(case, Layout())
    monkeypatch.setattr(optim, "update", adam(kind))
    trace = single.train(case)
    verdict = compare(trace, truth, bounds=allowed.steps)
    assert verdict.ok, verdict
    for name, own in trace.steps[0].state.items():  # and no more than that is allowed
        rest = 2.0**-24 / (1 - betas[1])
        assert allowed.steps[0][f"state/{name}/v"].max() <= 2 * bounds.QUANTILE * (rest + 2.0**-20) * own["v"].max()


@given(st.floats(0.125, 1, exclude_max=True), st.integers(1, 200), st.sampled_from([2.0**-24, 2.0**-53]))
@settings(max_examples=100)
def test_a_constant_is_off_as_whoever_keeps_it_is(beta: float, t: int, unit: float) -> None:
    """1 - beta^t moves by t roundings of beta and the roundings of a power; and not at all where nothing rounds."""
    draws = [float(1 - Constant(beta, np.random.default_rng(seed), unit) ** t) for seed in range(20)]
    held = 0 if stochastic.digits_of(beta) <= -math.log2(unit) else t
    power = 0 if t == 1 else math.sqrt(t)
    room = 1.01 * unit * ((held + power) * beta**t + 1) + 2.0**-52  # computed in float64 by this test, too
    assert max(abs(x - (1 - beta**t)) for x in draws) <= room
    if beta**t > 0.01 and unit > 2.0**-53 and held:
        assert len(set(draws)) > 10
    if t >= 4 and stochastic.digits_of(beta) * t > 53:
        assert len({float(Constant(beta, np.random.default_rng(seed), unit) ** t) for seed in range(20)}) > 1
    assert float(1 - Constant(0.875, np.random.default_rng(0), unit) ** 3) == 1 - 0.875**3


# --------------------------------------------------------------------------------------- what is exact, and zeros


@given(st.lists(st.integers(-(2**6), 2**6), min_size=1, max_size=12), st.integers(0, 2**16), st.integers(-9, 9))
@settings(max_examples=100)
def test_what_is_exact_is_not_shaken(x: list[int], seed: int, power: int) -> None:
    """Sums and products of short numbers are themselves, as everybody's are; a number of all digits is shaken."""
    random = np.random.default_rng(seed)
    a = np.array(x, np.float32) * np.float32(2.0**power)
    w = random.integers(-64, 65, (len(x), 3)).astype(np.float32)
    shaken = shake(a, random)
    assert np.array_equal(bare(shaken[None] @ w), a[None] @ w)
    assert float(shaken.sum()) == a.sum()
    assert np.array_equal(bare(shaken - a[::-1]), a - a[::-1])
    assert np.array_equal(bare(shaken * np.float32(0.25) / 8), a / 32)
    y = shaken.copy()
    y += a
    assert np.array_equal(bare(y), 2 * a)
    long = random.uniform(1, 2, (40, len(x))).astype(np.float32)
    assert not np.array_equal(bare(shake(long, random) @ w[:, :1]), long @ w[:, :1]) or not w[:, 0].any()
    assert not np.array_equal(bare(shake(long, random) * np.float32(3)), long * np.float32(3))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x @ np.array([[1.0], [1.0]], np.float32),
        lambda x: x.sum(axis=1),
        lambda x: x[:, 0] + x[:, 1],
        lambda x: x[:, 0] / np.float32([3]),
        lambda x: x[:, 0] * 0.1,
    ],
    ids=["product", "sum of rows", "sum", "quotient", "constant"],
)
def test_short_numbers_whose_result_is_not_exact_are_shaken(operation: Callable[[Any], Any]) -> None:
    """7 2^30 + 1 does not fit in float32, 7/3 and 0.1 in no binary type: some order, or some program, rounds them."""
    x = np.tile(np.array([[7 * 2.0**30, 1.0]], np.float32), (200, 1))
    assert len(set(bare(operation(shake(x, np.random.default_rng(0)))).ravel().tolist())) > 1


def ties(dtype: str, optimizer: SGD | Adam, steps: int = 1) -> Case:
    """Integers, in which the input of a third of the ReLUs is 0; only the division by 17 rows rounds."""
    batches = tuple(
        Batch(
            rng.integers((0, "x", step), (17, 5), -1, 2).astype(float),
            rng.integers((0, "y", step), (17, 7), -1, 2).astype(float),
            np.ones(17, bool),
        )
        for step in range(steps)
    )
    return Case(MLP((5, 15, 7), init="integers"), optimizer, batches, Precision(dtype))


@pytest.mark.parametrize("shaken", [True, False])
def test_a_relu_at_0_is_not_up_to_roundings(shaken: bool) -> None:
    """Where integers cancel everybody has 0, and a gradient lost behind it is seen to its last digits by a spread."""
    truth = single.train(ties("float64", SGD(lr=0.25)))
    for step, allowed in zip(truth.steps, bounds.spread(truth, shaken=shaken), strict=True):
        for name, g in step.gradients.items():
            assert allowed[f"gradient/{name}"] <= 1e-12 * np.abs(g).max()


def test_a_relu_at_0_is_not_up_to_roundings_of_others() -> None:
    """And by the statistical bound."""
    case = ties("float32", Adam(lr=0.25, eps=2.0**-10))
    truth, allowed = bounds.truth(case), bounds.allowed(case, Layout())
    assert allowed.tier == "statistical"
    for name, g in truth.steps[0].gradients.items():
        assert allowed.steps[0][f"gradient/{name}"].max() <= 1e-5 * np.abs(g).max()


@given(narrow_cases(), st.sampled_from(["float32", "float64"]))
@settings(max_examples=60)
def test_zeros_never_pass(case: Case, dtype: str) -> None:
    """Whatever the case, a gradient of zeros is flagged, unless it is one or smaller than half of the digits."""
    case = replace(case, precision=Precision(dtype))
    try:
        truth = bounds.truth(case)
        allowed = bounds.allowed(case, Layout()).steps if dtype == "float32" else bounds.spread(truth)
    except bounds.Unbounded:
        return  # said, and not passed
    most = max((bounds.largest(g) for step in truth.steps for g in step.gradients.values()), default=0.0)
    for number, step in enumerate(truth.steps):
        for name, g in step.gradients.items():
            lost = compare_module.judge(number, name, np.zeros_like(g), g, allowed[number][f"gradient/{name}"])[0]
            assert lost or bounds.largest(g) <= 8.1 * math.sqrt(bounds.unit_of(dtype)) * most


def test_what_roundings_decide_is_refused() -> None:
    """In its second step the input of a ReLU is 0 but for roundings: honest runs have another gradient each."""
    with pytest.raises(bounds.Unbounded, match=r"step 1: gradient/layers.0.bias .* roundings decide it"):
        bounds.allowed(ties("float32", Adam(lr=0.25, eps=2.0**-10), steps=2), Layout())


def test_bounds_that_are_none() -> None:
    """Zeros must not pass, nor an entry of a gradient that is off by the largest; what is all rounding is let be."""
    g, p = np.array([3.0, -1.0]), np.array([2.0, -1.0])
    true = [{"outcome": "updated", "gradient/a": g, "gradient/b": 1e-9 * g, "parameter/a": p, "state/a/m": 0 * p}]
    tight = {"gradient/a": 0.1, "gradient/b": 1e-4, "parameter/a": np.array([0.1, 9.0]), "state/a/m": 1.0}
    bounds.check([tight], true, 2.0**-12)
    for name, bound in (("gradient/a", np.array([0.1, 3.0])), ("gradient/b", 1e-3), ("parameter/a", np.array([2, 1]))):
        with pytest.raises(bounds.Unbounded, match=name):
            bounds.check([{**tight, name: bound}], true, 2.0**-12)


# --------------------------------------------------------------------------------------------- spread


@pytest.mark.parametrize("runs", range(4, 9))
def test_factor_is_what_its_chance_asks_for(runs: int) -> None:
    """An honest normal number is further off than the largest of so many, times the factor, once in a million."""
    z = np.linspace(-9, 9, 301)
    weight = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    below = np.vectorize(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))))
    near = np.abs(z) / bounds.factor(runs)
    alone = weight @ (below(near) - below(-near)) ** runs
    near = np.abs(z[:, None] - z) / bounds.factor(runs)  # the reference, z, is off as well
    together = weight @ (below(z[:, None] + near) - below(z[:, None] - near)) ** runs @ weight
    assert bounds.CHANCE / 3 < together < alone < bounds.CHANCE


def small(steps: int = 4, precision: Precision | None = None) -> Case:
    """A narrow MLP with momentum, whose every step has other numbers."""
    model = MLP((3, 4, 2))
    batches = tuple(batch(model, 5, 1.0, seed=2, step=step) for step in range(steps))
    return Case(model, SGD(lr=0.5, momentum=0.5), batches, precision or Precision())


def test_spread_of_a_resumed_run_is_that_of_its_own_steps() -> None:
    """Step 2 of a run that begins there is held to step 2 of the others: a last digit of the loss is seen."""
    whole = single.train(small())
    resumed = single.train(small(), start=State.after(single.train(small(2))))
    assert bounds.spread(resumed) == bounds.spread(whole)[2:]
    first, last = resumed.steps
    assert compare(resumed, replace(whole, steps=whole.steps[2:], begun=2)).ok
    assert not compare(replace(resumed, steps=[replace(first, loss=first.loss * (1 + 1e-12)), last]), resumed).ok


def test_traces_that_are_not_of_the_same_steps_are_refused() -> None:
    """Another begin, another option, other data, no step at all: that is said, instead of numbers that mean nothing."""
    whole = single.train(small())
    resumed = single.train(small(), start=State.after(single.train(small(2))))
    other = single.train(replace(small(), optimizer=SGD(lr=0.25, momentum=0.5)))
    batches = small().batches
    shuffled = single.train(replace(small(), batches=(*batches[1:], batches[0])))
    none = replace(whole, steps=[])
    for trace, reference, words in (
        (resumed, whole, "begins at step 2 and the reference at step 0"),
        (other, whole, "optimizer.lr=0.25, the reference of one with optimizer.lr=0.5"),
        (shuffled, whole, "not the same data in their first 4 steps"),
        (none, none, "neither trace has a step"),
    ):
        with pytest.raises(ValueError, match=words):
            compare(trace, reference, bounds=[])
    assert not compare(none, whole, bounds=[]).ok
    assert compare(single.train(small()), whole, bounds=[]).ok


def on_the_edge(seed: int) -> Case:
    """Three rows whose gradients sum to 44800 in float16, and to infinity where the two positive ones meet first."""
    case = overflowing(3, 0)
    inputs = np.tile([1.0, 350.0, 1.0], (3, 1))
    start = State.initial(replace(case, seed=seed, batches=())).parameters
    targets = inputs @ start["layers.0.weight"] + start["layers.0.bias"] - np.array([[1.0], [-1.0], [1.0]])
    edge = Batch(inputs, targets, np.ones(3, bool))
    return replace(case, seed=seed, batches=(edge, *case.batches[2:]), optimizer=SGD(lr=0.25))


def test_a_run_that_skips_another_step_is_left_out() -> None:
    """Where roundings decide whether a step is made, the bound is never an update: fewer runs, or none and an error."""
    refused = bounded = 0
    for seed in range(12):
        case = on_the_edge(seed)
        truth = single.train(case)
        splits = [bounds.shuffled(case, run) for run in range(bounds.RUNS)]
        outcomes = [single.train(case, split=split).steps[0].outcome for split in splits]
        assert truth.steps[0].outcome == "updated"
        if outcomes.count("updated") < bounds.RUNS / 2:
            with pytest.raises(ValueError, match="step 0 of the reference is 'updated'"):
                bounds.spread(truth, shaken=False)
            refused += 1
        elif "overflow" in outcomes:
            for step, allowed in zip(truth.steps, bounds.spread(truth, shaken=False), strict=True):
                for name, x in step.parameters.items():
                    assert allowed[f"parameter/{name}"] <= 64 * 2.0**-11 * bounds.largest(x)
            bounded += 1
    assert refused
    assert bounded


@pytest.mark.parametrize(("compute", "unit"), [("float32", 2.0**-24), ("float64", 2.0**-53)])
def test_floor_is_four_roundings(monkeypatch: pytest.MonkeyPatch, compute: str, unit: float) -> None:
    """Of the largest entry, where nothing has moved: once, not times the factor; loss and norm are kept in float64."""
    monkeypatch.setattr(bounds, "deviation", lambda got, expected: 0.0)
    truth = single.train(small(1, Precision(compute)))
    (allowed,) = bounds.spread(truth, shaken=False)
    for name, value in bounds.numbers(truth.steps[0]):
        assert allowed[name] == 4 * (2.0**-53 if name in ("loss", "norm") else unit) * bounds.largest(value)
