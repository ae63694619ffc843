"""Save, load, go on: as if the run had never stopped, in the same layout or in another."""

import dataclasses
import errno
import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from strategies import batch, cases, exact_cases, gpts, layouts, mlps
from truth import Worlds

import refpar
from refpar import single, state
from refpar.case import Batch, Case, Layout, State, Trace
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD, Adam, AdamW
from refpar.oracle import compare
from refpar.parallel import hybrid
from refpar.precision import LossScale, Precision
from refpar.state import StateError

HALVES = Precision("float16", loss_scale=LossScale(2.0**10, interval=3))
MODEL = GPT(vocabulary=11, context=4, width=6, layers=2, heads=3, dropout=0.25)


def a_case(**options: Any) -> Case:
    """Return four ragged steps."""
    batches = tuple(batch(MODEL, 7, 0.7, seed=3, step=step) for step in range(4))
    given_options: dict[str, Any] = {"clip": 0.05, **options}
    return Case(MODEL, AdamW(lr=0.01, weight_decay=0.1, warmup=3), batches, **given_options)


def until(case: Case, step: int) -> Case:
    """Return the first steps of a case."""
    return dataclasses.replace(case, batches=case.batches[:step])


def after(trace: Trace, step: int) -> Trace:
    """Return what came after the first steps of a run."""
    return dataclasses.replace(trace, steps=trace.steps[step:], begun=trace.begun + step)


def same(got: Trace, expected: Trace) -> None:
    """Assert that two traces are the same bits."""
    assert got.begun == expected.begun
    if not expected.steps:
        assert not got.steps
        return
    comparison = compare.compare(got, expected, bounds=[])
    assert comparison.ok, comparison


def through_a_file(trace: Trace, folder: Path) -> State:
    """Return the state after a run as it comes out of a file."""
    refpar.save(folder / "state", trace)
    return refpar.load(folder / "state")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases(models=gpts() | mlps(), max_steps=3, precisions=st.sampled_from([Precision(), Precision("float32"), HALVES])),
    st.data(),
)
def test_same_layout_goes_on_bit_for_bit(worlds: Worlds, tmp_path: Path, case: Case, data: st.DataObject) -> None:
    """Weights, masters, moments, t, scale, growth counter, dropout and place in the data are all there."""
    stop, layout = data.draw(st.integers(1, len(case.batches))), data.draw(layouts(case, most=6))
    world = worlds(layout.ranks)
    whole = hybrid.run(case, layout, world=world)
    first = hybrid.run(until(case, stop), layout, world=world)
    same(hybrid.run(case, layout, world=world, start=through_a_file(first, tmp_path)), after(whole, stop))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(models=gpts() | mlps(), max_steps=3), st.data())
def test_another_layout_goes_on_as_one_device(worlds: Worlds, tmp_path: Path, case: Case, data: st.DataObject) -> None:
    """Saved by one layout and resumed in another, of any dp, tp, pp and ZeRO stage: the trace is that of one device."""
    stop = data.draw(st.integers(1, len(case.batches)))
    one, other = data.draw(layouts(case, most=6)), data.draw(layouts(case, most=6))
    first = hybrid.run(until(case, stop), one, world=worlds(one.ranks))
    second = hybrid.run(case, other, world=worlds(other.ranks), start=through_a_file(first, tmp_path))
    if stop == len(case.batches):
        assert not second.steps
        return
    comparison = compare.compare(second, after(single.train(case), stop))
    assert comparison.ok, f"{one} to {other}: {comparison}"


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exact_cases(), st.data())
def test_integers_are_bit_equal(worlds: Worlds, tmp_path: Path, case: Case, data: st.DataObject) -> None:
    """Where no sum rounds, a change of layout in the middle changes no bit."""
    case = dataclasses.replace(case, optimizer=SGD(lr=0.0, momentum=0.5), batches=case.batches * 2)
    one, other = data.draw(layouts(case, most=6)), data.draw(layouts(case, most=6))
    first = hybrid.run(until(case, 1), one, world=worlds(one.ranks))
    second = hybrid.run(case, other, world=worlds(other.ranks), start=through_a_file(first, tmp_path))
    same(second, after(single.train(case), 1))


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_one_device_goes_on(tmp_path: Path, stop: int) -> None:
    """With the dropout of the step that comes, and not of the first; after the last step nothing is left to do."""
    whole = single.train(a_case())
    start = through_a_file(single.train(until(a_case(), stop)), tmp_path)
    same(single.train(a_case(), start=start), after(whole, stop))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_five_elements_over_any_number_of_ranks(worlds: Worlds, tmp_path: Path, ranks: int) -> None:
    """Shards of 3 and 2 saved, and loaded as one, two or three: moments stay where they are (DeepSpeed#5105)."""
    model = MLP((5, 1), init="integers")
    rows = Batch(np.diag([1.0, 2, 3, 4, 5]), np.full((5, 1), 64.0), np.ones(5, bool))
    case = Case(model, SGD(lr=0.0, momentum=0.5), (rows, rows), divide="after")
    first = hybrid.run(until(case, 1), Layout(dp=2, zero=1), world=worlds(2))
    saved = through_a_file(first, tmp_path)
    moments = saved.state["layers.0.weight"]["momentum"].ravel()
    assert len(set(moments.tolist())) == 5
    second = hybrid.run(case, Layout(dp=ranks, zero=2), world=worlds(ranks), start=saved)
    assert_array_equal(second.steps[0].state["layers.0.weight"]["momentum"].ravel(), 1.5 * moments)


def test_moments_of_what_is_not_sliced_are_kept(worlds: Worlds, tmp_path: Path) -> None:
    """A norm's moments are in the file, too, and come back (AReaL#1468)."""
    first = hybrid.run(until(a_case(), 2), Layout(tp=2), world=worlds(2))
    saved = through_a_file(first, tmp_path)
    for name, own in first.steps[-1].state.items():
        for buffer, x in own.items():
            assert_array_equal(saved.state[name][buffer], x)
    assert (saved.state["head.norm.weight"]["m"] != 0).all()


def test_update_number_goes_on(tmp_path: Path) -> None:
    """After ten updates comes the eleventh (DeepSpeed#4396), and none for a step that was skipped."""
    rows = batch(MLP((2, 2)), 3, 1.0, seed=1, step=0)
    case = Case(MLP((2, 2)), Adam(lr=0.1), (rows,) * 11)
    saved = through_a_file(single.train(until(case, 10)), tmp_path)
    assert (saved.step, saved.t) == (10, 10)
    assert single.train(case, start=saved).steps[0].t == 11


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=3"])
def test_scale_grows_when_it_would_have(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    """Saved in the middle of a growth interval, the scale doubles at the same step (apex@327b2446)."""
    case = a_case(precision=HALVES)
    split = Layout.parse(layout)
    whole = hybrid.run(case, split, world=worlds(split.ranks))
    assert [(step.scale, step.good) for step in whole.steps] == [(1024, 1), (1024, 2), (2048, 0), (2048, 1)]
    first = hybrid.run(until(case, 2), split, world=worlds(split.ranks))
    same(hybrid.run(case, split, world=worlds(split.ranks), start=through_a_file(first, tmp_path)), after(whole, 2))


def test_every_row_is_taken_once(worlds: Worlds, tmp_path: Path) -> None:
    """Twelve rows on four ranks, stopped after one step: what was seen does not come again (SimpleTuner#2986)."""
    numbers = np.arange(24.0).reshape(12, 2)
    batches = tuple(Batch(numbers[i : i + 4], numbers[i : i + 4], np.ones(4, bool)) for i in (0, 4, 8))
    case = Case(MLP((2, 2)), SGD(lr=0.0), batches)
    whole = hybrid.run(case, Layout(dp=4), world=worlds(4))
    first = hybrid.run(until(case, 1), Layout(dp=4), world=worlds(4))
    second = hybrid.run(case, Layout(dp=4), world=worlds(4), start=through_a_file(first, tmp_path))
    losses = [step.loss for step in (*first.steps, *second.steps)]
    assert losses == [step.loss for step in whole.steps]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=3", "tp=3,pp=2"])
def test_what_was_loaded_is_left_as_it_is(worlds: Worlds, layout: str) -> None:
    """Going on updates copies: a state can be gone on from twice."""
    case, split = a_case(), Layout.parse(layout)
    start = State.after(single.train(until(case, 2)))
    copies = pickle.loads(pickle.dumps(start))
    one = single.train(case, start=start)
    same(single.train(case, start=start), one)
    hybrid.run(case, split, world=worlds(split.ranks), start=start)
    for kept, copy in (
        (start.parameters, copies.parameters),
        *((start.state[n], copies.state[n]) for n in start.state),
    ):
        for name, x in kept.items():
            assert_array_equal(x, copy[name])


def test_same_bits_come_out_as_went_in(tmp_path: Path) -> None:
    """Every number of the state, in its type; arrays of no elements and a scale that no decimal has, too."""
    begin = State.initial(a_case(precision=HALVES))
    odd = dataclasses.replace(begin, scale=2.0**-30 / 3, good=7, step=0, t=5)
    refpar.save(tmp_path / "state", odd)
    got = refpar.load(tmp_path / "state")
    assert (got.scale, got.good, got.step, got.t) == (odd.scale, 7, 0, 5)
    assert (got.identity, got.data) == (odd.identity, odd.data)
    assert {n: (x.dtype, x.tobytes()) for n, x in got.parameters.items()} == {
        n: (x.dtype, x.tobytes()) for n, x in odd.parameters.items()
    }
    assert {*got.state["head.norm.bias"]} == {"m", "v", "master"}


def test_initial_state_is_where_every_run_starts() -> None:
    """Going on from it is starting."""
    case = a_case()
    same(single.train(case, start=State.initial(case)), single.train(case))


# Files that are not what they should be


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state after two steps of a case."""
    path = tmp_path_factory.mktemp("state") / "state"
    refpar.save(path, single.train(until(a_case(), 2)))
    return path


def one_line(error: BaseException) -> str:
    """Return the message of an error that is one line."""
    assert "\n" not in str(error)
    return str(error)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_is_refused(saved: Path, tmp_path: Path, share: float) -> None:
    """Wherever it ends: one clear line, and no half of a state."""
    blob = saved.read_bytes()
    (tmp_path / "cut").write_bytes(blob[: int(share * len(blob))])
    with pytest.raises(StateError, match="cut") as caught:
        refpar.load(tmp_path / "cut")
    one_line(caught.value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_was_altered_is_refused(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Whichever byte, whatever bit."""
    blob = bytearray(saved.read_bytes())
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "altered").write_bytes(blob)
    with pytest.raises(StateError) as caught:
        refpar.load(tmp_path / "altered")
    one_line(caught.value)


def forged(saved: Path, path: Path, changes: dict[str, Any]) -> Path:
    """Write a state with other numbers and a checksum that fits."""
    with safetensors.safe_open(saved, framework="np") as file:
        numbers = {**json.loads(file.metadata()[state.KEY]), **changes}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del numbers["checksum"]
    numbers["checksum"] = state.checksum(arrays, numbers)
    path.write_bytes(safetensors.numpy.save(arrays, {state.KEY: json.dumps(numbers)}))
    return path


class Trap:
    """Fails the test if anything unpickles it."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a file was unpickled",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "cut off, or no safetensors file"),
        (b"hello, world", "cut off, or no safetensors file"),
        (pickle.dumps(Trap()), "cut off, or no safetensors file"),
        (safetensors.numpy.save({"parameter/a": np.ones(3)}), "not a state that refpar saved"),
        (safetensors.numpy.save({"a": np.ones(3)}, {"format": "pt"}), "not a state that refpar saved"),
        ({"version": 9}, "in format version 9; this refpar reads version 1"),
        (safetensors.numpy.save({"a": np.ones(3)}, {state.KEY: "[1, 2"}), "metadata"),
        (safetensors.numpy.save({"a": np.ones(3)}, {state.KEY: "[1, 2]"}), "metadata"),
        (safetensors.numpy.save({"a": np.ones(3)}, {state.KEY: "{}"}), "metadata"),
        ({"step": "three"}, "metadata"),
        ({"case": [1, 2]}, "metadata"),
        ({"scale": 3}, "metadata"),
    ],
)
def test_a_foreign_file_is_refused(saved: Path, tmp_path: Path, content: Any, words: str) -> None:
    """In one line that says what is wrong with it; nothing is ever unpickled."""
    path = tmp_path / "file"
    if isinstance(content, dict):
        forged(saved, path, content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(StateError, match=words) as caught:
        refpar.load(path)
    assert str(path) in one_line(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """Neither to read nor to write."""
    with pytest.raises(StateError, match=str(tmp_path)):
        refpar.load(tmp_path)
    with pytest.raises(StateError, match="directory"):
        refpar.save(tmp_path, State.initial(a_case()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 5}, "saved with seed=0, and this run has seed=5"),
        ({"optimizer": AdamW(lr=0.02, weight_decay=0.1, warmup=3)}, r"saved with optimizer\.lr=0\.01"),
        ({"optimizer": SGD(lr=0.01)}, "saved with optimizer=AdamW, and this run has optimizer=SGD"),
        ({"model": dataclasses.replace(MODEL, width=9)}, r"saved with model\.width=6, and this run has model\.width=9"),
        ({"precision": HALVES}, r"saved with precision\.compute='float64'"),
        ({"clip": None}, r"saved with clip=0\.05, and this run has clip=None"),
        ({"frozen": ("head",)}, "saved with frozen="),
    ],
)
def test_the_state_of_another_case_is_refused(saved: Path, worlds: Worlds, change: dict[str, Any], words: str) -> None:
    """With the first option that differs, before anything starts, on one device and on many."""
    other, start = dataclasses.replace(a_case(), **change), refpar.load(saved)
    for go_on in (
        lambda: single.train(other, start=start),
        lambda: hybrid.run(other, Layout(dp=2), world=worlds(2), start=start),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            go_on()
        one_line(caught.value)


def test_other_data_is_refused(saved: Path) -> None:
    """What was trained on before the stop must be what this run has; what comes after it may be anything."""
    case, start = a_case(), refpar.load(saved)
    masked = dataclasses.replace(case.batches[1], mask=np.zeros_like(case.batches[1].mask))
    with pytest.raises(ValueError, match="after 2 batches of other data"):
        start.check(dataclasses.replace(case, batches=(case.batches[0], masked, *case.batches[2:])))
    with pytest.raises(ValueError, match="after step 2, and this run has 1 steps in all"):
        start.check(until(case, 1))
    start.check(dataclasses.replace(case, batches=(*case.batches[:2], masked)))


@pytest.mark.parametrize("what", ["lost", "shape", "type", "buffer"])
def test_parameters_that_do_not_fit_are_refused(saved: Path, what: str) -> None:
    """A name too few, another shape, another type, another buffer."""
    start, name = refpar.load(saved), "head.norm.bias"
    parameters, buffers = dict(start.parameters), {n: dict(own) for n, own in start.state.items()}
    if what == "lost":
        del parameters[name]
    elif what == "shape":
        parameters[name] = parameters[name][1:]
    elif what == "type":
        parameters[name] = parameters[name].astype(np.float32)
    else:
        buffers[name]["momentum"] = buffers[name]["m"]
    words = {"lost": "is missing", "shape": r"\(5,\)", "type": "float32", "buffer": "momentum of head.norm.bias"}[what]
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(start, parameters=parameters, state=buffers).check(a_case())


# Writing


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_failed_write_changes_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The disk is full: one clear line, the old file as it was, and nothing beside it."""
    path = tmp_path / "state"
    path.write_bytes(saved.read_bytes())

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "write":
        limited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limited[1]))
    else:
        monkeypatch.setattr(os, where, full)
    try:
        with pytest.raises(StateError, match=r"No space left|File too large") as caught:
            refpar.save(path, State.initial(a_case()))
    finally:
        if where == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, limited)
    assert str(path) in one_line(caught.value)
    assert path.read_bytes() == saved.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    """In one line."""
    with pytest.raises(StateError, match="No such file"):
        refpar.save(tmp_path / "no" / "state", State.initial(a_case()))


def test_killed_while_writing_leaves_the_old_file(saved: Path, tmp_path: Path) -> None:
    """A process that dies before the file has its name has not touched the one that had it."""
    path = tmp_path / "state"
    path.write_bytes(saved.read_bytes())
    program = (
        "import os, sys, refpar; start = refpar.load(sys.argv[1]);"
        "os.fsync = lambda fd: os.kill(os.getpid(), 9); refpar.save(sys.argv[1], start)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=60)
    assert done.returncode == -9
    assert path.read_bytes() == saved.read_bytes()


def test_nothing_to_save() -> None:
    """A run that has made no step has no state after it."""
    with pytest.raises(ValueError, match="no step"):
        State.after(single.train(dataclasses.replace(a_case(), batches=())))
