"""``refpar train``: real runs on real text, stopped, saved and resumed as a user does it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import refpar
from refpar import longrun, single
from refpar.case import Case, Layout, State, Trace, text_batches
from refpar.cli import BAD_INPUT, INTERRUPTED, MATCHED
from refpar.comm import World
from refpar.nn.models import GPT
from refpar.optim import AdamW
from refpar.oracle import bounds

TRAIN = [sys.executable, "-m", "refpar", "train"]
SMALL = ["--layers", "1", "--width", "12", "--heads", "3", "--context", "8", "--rows", "6"]
TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom. " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of text."""
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    return path


def train(*arguments: str | Path, status: int = MATCHED, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``refpar train`` of a small model."""
    done = subprocess.run(
        [*TRAIN, *SMALL, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False, **options
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_everything_at_once_learns(text: Path) -> None:
    """Replicas, slices, stages, ZeRO, micro-batches, recomputation, half precision: the loss goes down, and is shown
    with tokens a second, scale, and bytes sent by axis."""
    done = train(
        "--data", text, "--steps", "30", "--lr", "0.01", "--warmup", "2", "--dp", "2", "--tp", "2", "--pp", "2",
        "--zero", "1", "--micro-batches", "3", "--schedule", "1f1b", "--recompute", "block", "--precision", "fp16",
        "--dropout", "0.1",
    )  # fmt: skip
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", done.stdout).groups())  # type: ignore[union-attr]
    assert first == pytest.approx(np.log(256), abs=0.5)
    assert last < first - 1
    assert re.search(
        r"step 30/30: loss [\d.]+, [\d,]+ tokens/s, scale \d+, sent dp .*B, tp .*B, pp .*B, tied", done.stdout
    )
    assert "sent a step, by all ranks: dp" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("precision", ["float64", "fp16"])
def test_steps_are_the_total(text: Path, tmp_path: Path, precision: str) -> None:
    """Eight steps are eight steps: at once, or four and then four more in the same layout, bit for bit."""
    layout = "--dp", "2", "--zero", "2", "--precision", precision, "--data", text
    train(*layout, "--steps", "8", "--save", tmp_path / "whole")
    train(*layout, "--steps", "4", "--save", tmp_path / "half")
    done = train(*layout, "--steps", "8", "--resume", tmp_path / "half", "--save", tmp_path / "two halves")
    assert "step 5/8" in done.stdout
    assert "step 4/8" not in done.stdout
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "two halves").read_bytes()


def test_resumed_in_another_layout(text: Path, tmp_path: Path) -> None:
    """Three replicas go on as two slices by two stages, and end where one device ends."""
    train(
        "--data", text, "--precision", "float64", "--steps", "3", "--dp", "3", "--zero", "3", "--save", tmp_path / "a"
    )
    train(
        "--data", text, "--precision", "float64", "--steps", "6", "--tp", "2", "--pp", "2", "--stages", "1+2",
        "--resume", tmp_path / "a", "--save", tmp_path / "b",
    )  # fmt: skip
    model = GPT(256, 8, 12, 1, 3)
    case = Case(
        model, AdamW(3e-3, weight_decay=0.1, warmup=20), text_batches(TEXT, steps=6, rows=6, context=8), clip=1.0
    )
    truth, state = single.train(case), refpar.load(tmp_path / "b")
    state.check(case)
    assert state.step == 6
    allowed = bounds.spread(truth)[-1]
    for name, value in truth.steps[-1].parameters.items():
        assert np.abs(state.parameters[name] - value).max() <= allowed[f"parameter/{name}"], name


@pytest.mark.parametrize("layout", [[], ["--dp", "2", "--pp", "2"]])
@pytest.mark.parametrize("kill", [lambda pid: os.killpg(pid, signal.SIGINT), lambda pid: os.kill(pid, signal.SIGTERM)],
                         ids=["as a terminal does, to every process", "as a container does, to the first"])  # fmt: skip
def test_a_signal_stops_between_steps_and_saves(text: Path, tmp_path: Path, layout: list[str], kill: Any) -> None:
    """One signal: the step at hand is finished, all ranks stop at the same one, the state is saved; it says where."""
    process = start(tmp_path, "--data", text, "--steps", "100000", "--save", tmp_path / "saved", *layout)
    until_it_runs(tmp_path)
    kill(process.pid)
    out, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, err
    assert err == ""
    stopped = int(re.search(r"stopped after step (\d+) of 100000", out).group(1))  # type: ignore[union-attr]
    assert f"saved to {tmp_path / 'saved'}" in out
    assert refpar.load(tmp_path / "saved").step == stopped > 0


def test_ctrl_c_without_a_place_to_save(text: Path, tmp_path: Path) -> None:
    """It stops as cleanly, and leaves nothing."""
    process = start(tmp_path, "--data", text, "--steps", "100000")
    until_it_runs(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (INTERRUPTED, "")
    assert "stopped after step" in out
    assert "saved" not in out
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


def start(folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start a run in a process group of its own, its temporary files in ``folder``."""
    return subprocess.Popen(
        [*TRAIN, *SMALL, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def until_it_runs(folder: Path) -> None:
    """Wait until a run has said a line: its file is among the temporary ones."""
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in folder.glob("refpar-*/steps")):
        assert time.monotonic() < deadline, "no step in a minute"
        time.sleep(0.05)


BAD = {
    "more slices than heads": (["--tp", "4"], "tp is 4: blocks.0 has 3 heads, and every rank needs at least one"),
    "more stages than units": (["--pp", "4"], "pp is 4: the model has 3 units"),
    "stages that do not add up": (["--pp", "2", "--stages", "1+1"], "adds up to 2 units, and the model has 3"),
    "no such schedule": (["--schedule", "2f2b"], "schedule is '2f2b': it must be one of 1f1b, gpipe"),
    "no such stage of ZeRO": (["--zero", "7"], "zero is 7: it must be a whole number from 0 to 3"),
    "no such recomputation": (["--recompute", "some"], "recompute is 'some'"),
    "too many ranks": (["--dp", "1000"], "needs 1000 ranks: at most 512"),
    "no such precision": (["--precision", "fp8"], "invalid choice: 'fp8'"),
    "heads that do not divide": (["--heads", "5"], "heads must divide width"),
    "dropout of all": (["--dropout", "1"], "dropout is 1.0: it must be a number of at least 0, and below 1"),
    "text that is too short": (["--context", "5000"], "the text has 1580 bytes"),
    "nothing to resume": (["--resume", "missing"], "--resume missing: No such file"),
    "no place to save": (["--save", "no/such/place"], "--save no/such/place: No such file"),
    "option that does not exist": (["--lion"], "unrecognized arguments: --lion"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_clear_line(what: str, text: Path) -> None:
    """Exit status 2, and one line that says what is wrong, before anything starts."""
    arguments, words = BAD[what]
    where = {"cwd": text.parent, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}}
    done = train("--data", text, "--steps", "2", *arguments, status=BAD_INPUT, **where)
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_cannot_be_resumed_is_refused(text: Path, tmp_path: Path) -> None:
    """Another model, other data, no steps left to make, a foreign file: one line each, and nothing is changed."""
    saved = tmp_path / "saved"
    train("--data", text, "--steps", "2", "--save", saved)
    before = saved.read_bytes()
    other = tmp_path / "other"
    other.write_bytes(TEXT[::-1])
    for arguments, words in (
        (["--data", text, "--seed", "1"], "saved with seed=0, and this run has seed=1"),
        (["--data", text, "--dropout", "0.1"], "saved with model.dropout=0.0, and this run has model.dropout=0.1"),
        (["--data", other], "saved after 2 batches of other data"),
        (["--data", text, "--steps", "2"], "is after step 2, and --steps counts all"),
        (["--data", text, "--steps", "1"], "the state is after step 2, and this run has 1 steps in all"),
        (["--data", text, "--resume", text], "cut off, or no safetensors file"),
    ):
        done = train("--steps", "4", "--resume", saved, "--save", saved, *arguments, status=BAD_INPUT)
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert saved.read_bytes() == before


def test_every_step_is_heard_once(worlds: Any) -> None:
    """In order, with the numbers of one device, and bytes that add up."""
    batches = text_batches(TEXT, steps=5, rows=4, context=6)
    case = Case(GPT(128, 6, 6, 1, 2), AdamW(0.01), batches)
    lines: list[longrun.Line] = []
    trace, stopped = longrun.train(case, Layout(dp=2), world=worlds(2), hear=lines.append)
    truth = single.train(case)
    allowed = bounds.spread(truth, shaken=False)
    assert not stopped
    assert [line.step for line in lines] == [1, 2, 3, 4, 5]
    assert [line.tokens for line in lines] == [step.count for step in truth.steps]
    for line, step, bound in zip(lines, truth.steps, allowed, strict=True):
        assert abs(line.loss - step.loss) <= bound["loss"]
    assert lines[-1].sent["dp"] == sum(ledger.total("dp").bytes for ledger in trace.ledgers)
    start = State.after(trace)
    assert start.step == 5
    for name, value in truth.steps[-1].parameters.items():
        assert np.abs(start.parameters[name] - value).max() <= allowed[-1][f"parameter/{name}"], name


def test_a_run_that_fails_is_heard_to_its_end() -> None:
    """What was said before is not lost, and no thread is left."""
    case = Case(GPT(128, 6, 6, 1, 2), AdamW(0.01), text_batches(TEXT, steps=3, rows=4, context=6))
    lines: list[longrun.Line] = []

    class Failing:
        ranks, pids = 1, [0]

        def run(self, fn: Any, case: Any, layout: Any, start: Any, path: str) -> list[Any]:
            with World(1) as world:
                world.run(fn, case, layout, start, path)
            raise RuntimeError("after three steps")

    with pytest.raises(RuntimeError, match="after three steps"):
        longrun.train(case, Layout(), world=Failing(), hear=lines.append)
    assert_array_equal([line.step for line in lines], [1, 2, 3])


def test_one_ctrl_c_too_many_does_not_lose_a_run(worlds: Any) -> None:
    """Once the last step is made, its state is saved, however often somebody asks; afterwards Ctrl-C is as before."""
    case = Case(GPT(128, 6, 6, 1, 2), AdamW(0.01), text_batches(TEXT, steps=2, rows=4, context=6))
    kept: list[int] = []

    def keep(trace: Trace) -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        kept.append(len(trace.steps))

    before = signal.getsignal(signal.SIGINT)
    _, stopped = longrun.train(case, Layout(dp=2), world=worlds(2), hear=lambda line: None, keep=keep)
    assert (kept, stopped) == ([2], False)
    assert signal.getsignal(signal.SIGINT) is before


WITHIN_EXEC = """
import sys
from refpar import cli
from refpar.oracle import verify
verify.package_text = lambda: exec("raise KeyboardInterrupt")
sys.exit(cli.main(["train"]))
"""


def test_ctrl_c_while_something_is_imported(tmp_path: Path) -> None:
    """Making a dataclass is an exec, and CPython remembers that one was interrupted: it would end by the signal."""
    (tmp_path / "within_exec.py").write_text(WITHIN_EXEC)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "within_exec"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "refpar: interrupted\n")
