"""The planner's verdicts: the ladder, why a rung does not fit, the smallest change that makes it fit; and the verbs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar import cli as command_line
from refpar.plan import cautions, choose, models, plans, repairs
from refpar.plan.models import PRESETS, Bare, Model, gpt2
from refpar.plan.plans import Plan
from refpar.plan.recipes import RECIPES
from refpar.plan.repairs import NOTHING
from refpar.plan.setups import Setup
from refpar.plan.speed import Hardware
from refpar.plan.units import GB


def hardware(gigabytes: float = 80, **more: object) -> Hardware:
    """Return devices of so many GB."""
    return Hardware(int(gigabytes * GB), **more)  # type: ignore[arg-type]


def plan(model: Model, gigabytes: float = 80, recipe: str = "mixed-adam", **setup: object) -> Plan:
    """Return one setup on devices of so many GB."""
    return Plan(model, Setup(**setup), RECIPES[recipe], hardware(gigabytes))  # type: ignore[arg-type]


def recommended(
    model: Model, gigabytes: float, devices: int, recipe: str = "mixed-adam", rows: int = 8
) -> choose.Rung | None:
    """Return what the ladder recommends for so many devices."""
    base = Setup(batch=rows * devices)
    return choose.recommend(choose.ladder(model, RECIPES[recipe], hardware(gigabytes), devices, base, 1))[0]


# The ladder


@pytest.mark.parametrize(
    ("model", "gigabytes", "devices", "recipe", "rung"),
    [
        (PRESETS["gpt2"], 24, 1, "mixed-adam", "one device"),
        (PRESETS["gpt2"], 24, 8, "mixed-adam", "data parallel"),
        (Bare(7_500_000_000), 32, 64, "mixed-adam", "ZeRO 2"),  # 16.6 GB; ZeRO 1 takes 31.4 and leaves 0.6
        (PRESETS["llama3-8b"], 80, 8, "bf16-adam", "ZeRO 3, recomputation"),
        (PRESETS["llama3-70b"], 80, 64, "bf16-fp32-grads", "ZeRO 3, recomputation"),
        (PRESETS["llama3-405b"], 80, 1024, "bf16-fp32-grads", "ZeRO 3, recomputation"),
    ],
)
def test_recommendations(model: Model, gigabytes: int, devices: int, recipe: str, rung: str) -> None:
    """The simplest rung that fits; those below it do not."""
    found = recommended(model, gigabytes, devices, recipe)
    assert found is not None
    assert found.name == rung
    assert found.plan.memory.peak <= (gigabytes - 1) * GB


def test_zero_1_where_nothing_is_kept_free() -> None:
    """7.5 B on 64 x 32 GB: ZeRO 1, with 31.4 GB, would do if 0.6 GB were room enough for a process."""
    rungs = choose.ladder(Bare(7_500_000_000), RECIPES["mixed-adam"], hardware(32, reserve=0), 64, Setup(batch=64), 1)
    chosen, _ = choose.recommend(rungs)
    assert chosen is not None
    assert chosen.name == "ZeRO 1"


@pytest.mark.parametrize(("dp", "fits"), [(560, False), (640, True)])
def test_530b(dp: int, fits: bool) -> None:
    """Narayanan et al. 2021, table 2: ZeRO-3 with b = 4 did not fit 560 devices of 80 GB, and fitted 640."""
    chosen = plan(PRESETS["megatron-530b"], dp=dp, zero=3, recompute="full", batch=4 * dp, bucket=500_000_000)
    assert chosen.micro_batch == 4
    assert chosen.fits is fits


@pytest.mark.parametrize(
    ("name", "grid", "recompute"),
    [("llama3-70b", (2, 4, 4, 2), "none"), ("llama3-405b", (8, 8, 8, 2), "full")],  # dp, tp, pp, cp
)
def test_published_layouts_fit(name: str, grid: tuple[int, int, int, int], recompute: str) -> None:
    """Megatron's guide: 70B on 64 x 80 GB, 405B on 1024 x 80 GB, with flash attention and sequence parallelism."""
    dp, tp, pp, cp = grid
    setup = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "zero": 1, "batch": dp * 4 * pp, "micro_batches": 4 * pp}
    assert plan(
        PRESETS[name], recipe="bf16-fp32-grads", **setup, recompute=recompute, flash=True, sequence_parallel=True
    ).fits


def test_ladder_ends_with_a_pipeline() -> None:
    """A trillion parameters on 512 devices: every rung below has a reason, a place and a moment."""
    model = gpt2(128, 25600, 160, 51_200, 2048)
    rungs = choose.ladder(model, RECIPES["bf16-fp32-grads"], hardware(), 512, Setup(batch=4096), 1)
    assert [rung.name for rung in rungs][:4] == ["data parallel", "ZeRO 1", "ZeRO 2", "ZeRO 3"]
    assert rungs[-1].name == "pipeline"
    assert rungs[-1].plan.setup.tp <= 8
    for rung in rungs:
        if not rung.plan.fits:
            assert re.match(r"short by [\d.,]+ GB on (every rank|rank \d+ \(stage \d+\)), .* GB$", rung.plan.why())


# Why not, and what to change


def test_smallest_change_of_each_kind() -> None:
    """7.5 B on 64 x 32 GB without ZeRO: the lowest stage that is enough, and the fewest slices."""
    found = {change.what: change for change in repairs.repairs(plan(Bare(7_500_000_000), 32, dp=64))}
    assert "ZeRO 2" in found
    assert not {"ZeRO 1", "ZeRO 3"} & set(found)
    assert found["ZeRO 2"].saved == 7_500_000_000 * 14 * 63 // 64 + 0
    assert "tp 4, dp 16" in found  # two slices hold 60 GB


@st.composite
def troubled(draw: st.DrawFn) -> Plan:
    """Plans on devices a little too small for them."""
    model = draw(st.sampled_from([PRESETS["gpt2-xl"], PRESETS["llama3-8b"], gpt2(12, 1024, 16)]))
    setup = Setup(
        dp=draw(st.sampled_from([1, 4, 16])),
        tp=draw(st.sampled_from([1, 2])),
        pp=draw(st.sampled_from([1, 2])),
        zero=draw(st.integers(0, 2)),
        batch=256,
        recompute=draw(st.sampled_from(["none", "selective"])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
    )
    setup = plans.with_micro_batch(setup, draw(st.sampled_from([1, 4])))
    made = Plan(model, setup, RECIPES["mixed-adam"], Hardware(10**18))
    percent = draw(st.integers(20, 99))
    return replace(made, hardware=Hardware(2**30 + made.memory.peak * percent // 100))


@settings(max_examples=30, deadline=None)
@given(troubled())
def test_changes_are_enough_and_no_larger_than_needed(made: Plan) -> None:
    """Each makes it fit; one degree less of the same change would not; cheap ones come before dear ones."""
    assert not made.fits
    assert made.short > 0
    fixes = repairs.repairs(made)
    assert fixes  # a larger device, if nothing else
    by_name = {option[0]: (group, i) for group in repairs.options(made) for i, option in enumerate(group)}
    for change in fixes:
        assert change.fits
        assert change.plan.memory.peak == made.memory.peak - change.saved
        if change.what in by_name:
            group, i = by_name[change.what]
            less = [repairs.apply(made, [option]) for option in group[:i]]
            assert not any(smaller is not None and smaller.fits for smaller in less)
    cost = [(repairs.ORDER.index(c.alters), c.slower or 0.0) for c in fixes]
    assert cost == sorted(cost)


def test_pairs_where_no_single_change_is_enough() -> None:
    """Llama-3 70B on 64 devices without anything: neither ZeRO-3 nor recomputation alone; together they do."""
    made = plan(PRESETS["llama3-70b"], recipe="bf16-fp32-grads", dp=64, batch=512, micro_batches=8)
    assert not any(
        change and change.fits and option[2] == NOTHING
        for group in repairs.options(made)
        for option in group
        for change in [repairs.apply(made, [option])]
    )
    best = repairs.repairs(made)[0]
    assert best.what == "ZeRO 3 and full recomputation"
    assert best.slower == pytest.approx(4 / 3, abs=0.05)


def test_more_devices_are_charged() -> None:
    """Twice the devices for half the time is no gain: what a step costs is counted in device seconds."""
    made = plan(PRESETS["llama2-7b"], 40, dp=4, zero=3, recompute="full", batch=64, micro_batches=16)
    [change] = [c for c in repairs.repairs(made) if c.what == "8 devices"]
    assert change.plan.step is not None
    assert made.step is not None
    assert change.plan.step.total < 0.6 * made.step.total
    assert change.slower == pytest.approx(2 * change.plan.step.total / made.step.total)


@settings(max_examples=15, deadline=None)
@given(troubled())
def test_room_is_room(made: Plan) -> None:
    """What is said to fit still, fits; a sixteenth more does not."""
    spacious = replace(made, hardware=Hardware(2 * made.memory.peak + 2**31))
    found = repairs.room(spacious)
    assert isinstance(spacious.model, models.Transformer)
    for tokens, fits in ((found["sequence"], True), (found["sequence"] * 17 // 16, False)):
        assert replace(spacious, setup=replace(spacious.setup, tokens=tokens)).fits is fits
    for layers, fits in ((found["layers"], True), (found["layers"] * 17 // 16 + 1, False)):
        assert replace(spacious, model=replace(spacious.model, layers=layers)).fits is fits


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (plan(PRESETS["gpt2-xl"], 24), "the weights are 3.12 GB and would fit"),
        (plan(Bare(7 * 10**9), 80, dp=64), "data parallel does not save memory"),
        (plan(PRESETS["gpt2"], zero=2), "there is one: it saves nothing"),
        (plan(PRESETS["llama2-70b"], tp=16), "reaches across servers of 8"),
        (plan(PRESETS["gpt2"], dp=2, pp=2, zero=3, batch=64, micro_batches=32), "in every micro-batch"),
        (plan(PRESETS["gpt2"], pp=4, batch=8, micro_batches=8), "at least 16 are advised"),
        (plan(PRESETS["gpt2"]), "keep a dynamic loss scale"),
        (replace(plan(PRESETS["gpt2"]), hardware=hardware(peak=1979e12)), "sparsity"),
        (plan(PRESETS["gpt2"], dp=3, batch=7, micro_batches=2), "some micro-batches are smaller"),
        (plan(PRESETS["gpt2"], tp=5), "does not divide 12 heads"),
        (plan(PRESETS["llama3-8b"], tp=16), "hold copies of them"),
        (plan(PRESETS["gpt2"], pp=5, batch=20, micro_batches=20), "the first 2 have one more"),
        (plan(PRESETS["gpt2"], tp=2), "faster padded, to 50,432"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_classic_mistakes_are_named(made: Plan, said: str) -> None:
    """One line each, where the plan makes the mistake; and none where it does not."""
    assert any(said in text for text in cautions.warnings(made))
    sound = plan(PRESETS["llama2-7b"], recipe="bf16-adam", dp=8, zero=3, batch=8, flash=True)
    assert not any(said in text for text in cautions.warnings(sound))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 0}, "dp is 0: it must be a whole number of at least 1"),
        ({"zero": 4}, "zero is 4: it must be 0, 1, 2 or 3"),
        ({"schedule": "zb"}, "schedule is 'zb'"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"chunks": 2, "pp": 4, "micro_batches": 6}, "to be a multiple of pp, 4"),
        ({"accounting": "mine"}, "accounting is 'mine'"),
    ],
)
def test_bad_setups(fields: dict[str, object], message: str) -> None:
    """The field, its value, and what would be right."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Setup(**fields)  # type: ignore[arg-type]


# The verbs


def run(text: str) -> int:
    """Return the exit status of `refpar` with these arguments."""
    return command_line.main(text.split())


def test_memory_of_a_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """`refpar memory --params 7.5e9 --gpus 64`: 120, 31.41, 16.64 and 1.88 GB, what is not counted, and status 0."""
    assert run("memory --params 7.5e9 --gpus 64") == 0
    out = capsys.readouterr().out
    assert [line.split()[-2] for line in out.splitlines() if line.startswith(("data", "ZeRO"))] == [
        "120.00", "31.41", "16.64", "1.88",
    ]  # fmt: skip
    assert "16 bytes a parameter" in out
    assert "Activations are not counted" in out


def test_memory_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, the reason and changes; every line fits 100 columns."""
    status = run("memory --model llama3-8b --gpus 8 --zero 1 --device-memory 80GB --lines")
    out = capsys.readouterr().out
    assert status == 1
    assert "does not fit" in out
    assert "smallest changes that make it fit" in out
    assert "blocks.*.mlp.gate_up.weight" in out
    assert max(map(len, out.splitlines())) <= 100


def test_memory_by_stage_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """JSON has every line in bytes; they add up to the peak."""
    path = tmp_path / "memory.json"
    arguments = "memory --model gpt3-175b --gpus 64 --tp 8 --pp 8 --recompute full --recipe bf16-fp32-grads --json"
    assert run(f"{arguments} {path}") == 0
    assert "<- most loaded" in capsys.readouterr().out
    report = json.loads(path.read_text())
    [setup] = report["setups"]
    assert setup["peak_bytes"] == sum(line["bytes"] for line in setup["lines"] if setup["moment"] in line["alive"])
    assert report["model"]["parameters"] == 174_604_259_328
    assert report["fits"] is None


def test_plan_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    """`refpar plan` prints the ladder, reasons and a recommendation in 100 columns, and the same as JSON."""
    arguments = "plan --model llama3-8b --gpus 8 --device-memory 80GB --recipe bf16-adam"
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert "recommended: dp 8 ZeRO 3 selective, the simplest that fits" in out
    assert "dp 8 is short by" in out
    assert max(len(line) for line in out.splitlines()[3:]) <= 100
    assert run(f"{arguments} --json -") == 0
    streams = capsys.readouterr()
    report = json.loads(streams.out)
    assert report["rungs"][report["recommended"]]["setup"]["zero"] == 3
    assert report["rungs"][0]["changes"]
    assert "recommended" in streams.err


def test_plan_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1."""
    assert run("plan --model gpt3-175b --gpus 2 --device-memory 24GB") == 1
    assert "nothing on the ladder fits" in capsys.readouterr().out


def test_inference(capsys: pytest.CaptureFixture[str]) -> None:
    """70 B in 4 bits is 35 GB; it does not fit 24, and fits 48."""
    assert run("memory --params 70e9 --inference 4 --device-memory 24GB") == 1
    assert "35.00" in capsys.readouterr().out
    assert run("memory --model llama2-70b --inference 4 --device-memory 48GB") == 0
    assert "327,680 bytes a token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("memory", "which model?"),
        ("memory --model gpt5", "no model is called 'gpt5': did you mean gpt2"),
        ("memory --model gpt2 --params 7B", "give one of"),
        ("memory --layers 12 --width 768", "--heads is missing"),
        ("memory --params -3", "is no number of parameters"),
        ("memory --params 7B --pp 2", "cannot be cut into stages"),
        ("memory --model gpt2 --gpus 6 --tp 4", "--gpus 6 is not a multiple"),
        ("memory --model gpt2 --gpus 8 --dp 3", "--gpus is 8"),
        ("memory --model gpt2 --tp 16", "there are 12 heads"),
        ("memory --model gpt2 --pp 20", "the model has 12 blocks"),
        ("memory --model gpt2 --pp 2 --stages 1+x", "write units of each stage"),
        ("memory --model gpt2 --pp 2 --stages 1+2", "adds up to 3 units"),
        ("memory --model gpt2 --recipe adam", "no recipe is called 'adam'"),
        ("memory --model gpt2 --device-memory 80XB", "'80XB' is no size"),
        ("memory --model gpt2 --device-memory 1GB", "the device has 1000000000"),
        ("memory --model llama3-8b --accounting refpar", "this package's own layers"),
        ("plan --model gpt2 --device-memory 80GB", "--gpus is missing"),
        ("plan --model gpt2 --gpus 8", "--device-memory is missing"),
        ("plan --model gpt2 --gpus 8 --device-memory 80GB --efficiency 3", "efficiency is 3.0"),
        ("plan --model gpt2 --gpus 1.5 --device-memory 80GB", "'1.5' is no whole number"),
    ],
)
def test_bad_input_is_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, and what would be right."""
    assert run(arguments) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert streams.err.count("\n") == 1
    assert not streams.out
