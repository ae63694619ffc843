"""What is shown is what has happened: stories, schedules, recordings, and mistakes beside the truth."""

import copy
import itertools
import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar import cli, single
from refpar.case import Layout
from refpar.comm import World
from refpar.oracle.compare import compare
from refpar.oracle.mistakes import CATALOGUE, resolve
from refpar.parallel import hybrid, pipeline, schedule
from refpar.parallel.schedule import ScheduleError
from refpar.parallel.simulator import Deadlock, minimal_capacity, render, simulate
from refpar.teach import mistaken, perfetto, recorder, schedules, show, toy
from refpar.teach.recorder import Event, RecordedWorld, Run

Captured = pytest.CaptureFixture[str]


# --------------------------------------------------------------------------------------------- stories

# What a reader works out by hand from the problem, or from the picture in the technique's docstring.
BY_HAND = {
    "ring": [
        "1   rank 0   chunk 1: 404 505       rank 1   chunk 0: 110 220 330   rank 2   111 222 333   complete",
        "Elements: rank 0 9, rank 1 10, rank 2 9; 28 in all, which is 2 (N-1) n = 2 * 2 * 7.",
    ],
    "dp": [
        "rank 0   -4 0 2 -2 -6 -2   -2 -2   8 -2    2",
        "in all 2 + 1 + 1 = 4, known to everybody before anything runs forward",
        "new w   3 -1 0 2 2 0      0.5 1.5     -3 1.5   -1.5",
        "rank 2 holds   11        11          11         33",
        "44 in all = 2 (N-1) psi = 2 * 2 * 11; as predicted",
    ],
    "zero1": ["rank 1   2 3   1    1    -    4", "rank 2 holds   11        11          2          24"],
    "zero2": [
        "rank 0 holds   11        5           5          21",
        "rank 2 holds   11        2           2          15",
    ],
    "zero3": [
        "rank 0 gives 1 0 0, rank 1 gives 1 1 1, rank 2 gives 1 -1",
        "rank 2 holds   2         2           2          6",
        "66 in all = 3 (N-1) psi = 3 * 2 * 11; as predicted",
    ],
    "tp": [
        "h[1] W1[1], rank 1 gives   0       1       2       1       2",
        "+ b1, once: y              -4      -2      -2",
    ],
    "pp": [
        "stage 0 F0 F1 .  B0 F2 B1 .  B2",
        "send activation to stage 1      3 0 / 2 1",
        "receive gradient from stage 1   -4 4 / 2 -2",
    ],
    "checkpoint": ["at most 656 bytes alive; 8 layers run forward", "forward again 5 6", "at most 432 bytes alive"],
    "fp16": [
        "w[0] should get 2^-25, and rank 0 stores 0",
        "0      2^15    2^-10                    inf                      rank 1             yes, yes     skipped",
        "master, float32   0.9999998807907104 = 1 - 2^-23",
    ],
    "hybrid": [
        "rank 5   d=0       t=1     p=1     0 1 2                 1    -1",
        "W1: rank 5 gives 2, rank 7 gives -4; both get -2",
    ],
}


@pytest.mark.parametrize("name", cli.STORIES)
def test_story_is_right(name: str, capsys: Captured) -> None:
    """Real ranks run it, it is equal to one device, and the numbers are those that a reader works out."""
    assert cli.main(["show", name]) == cli.MATCHED
    out, _ = capsys.readouterr()
    last = out.splitlines()[-1]
    assert last.startswith("Equal to one device, bit for bit" if name != "ring" else "Every rank has 111 222 333")
    missing = [line for line in BY_HAND[name] if line not in out]
    assert not missing
    assert max(map(len, out.splitlines())) <= 120


def test_stories_are_all_told() -> None:
    """Those the command line offers are those there are."""
    assert tuple(show.stories()) == cli.STORIES == tuple(BY_HAND)


def test_story_that_is_wrong_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Were the ranks to compute something else than one device, the story would end with that, and with status 1."""
    truth = single.train(toy.case())
    truth.steps[0].parameters["layers.1.bias"][0] += 1
    monkeypatch.setattr(show.single, "train", lambda case: truth)
    assert cli.main(["show", "dp"]) == cli.MISMATCH
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("NOT what one device gives: differs first at step 0: parameter/layers.1.bias[0] is -1.5")


def test_toy_is_what_it_says() -> None:
    """Eleven parameters, four rows that count, one ReLU off, and every gradient entry a small integer over 4."""
    trace = single.train(toy.case())
    step = trace.steps[0]
    gradients = np.concatenate([g.ravel() for g in step.gradients.values()])
    assert (step.count, step.loss, gradients.size) == (4, 1.75, 11)
    assert np.array_equal(gradients * 4, np.round(gradients * 4))
    assert (gradients != 0).all()
    assert list(toy.weights()) == list(toy.SHORT)


# ------------------------------------------------------------------------------------------- schedules

stages, micro_batches = st.integers(1, 8), st.integers(1, 16)
built_in = st.sampled_from(["gpipe", "1f1b"])


@given(built_in, stages, micro_batches)
@settings(max_examples=60)
def test_timeline_can_be_read_back(name: str, K: int, M: int) -> None:
    """What is printed for a schedule is a schedule of one's own, and the same one."""
    lists = schedules.BUILT_IN[name](K, M)
    assert schedules.parse(render(simulate(lists))) == lists


@given(built_in, stages, micro_batches, st.integers(1, 3), st.integers(40, 200))
@settings(max_examples=40)
def test_report_says_what_follows(name: str, K: int, M: int, backward: int, width: int) -> None:
    """Both bubbles by the formulas, what is alive, how much room is needed; and no line is too wide."""
    report = schedules.report(name, stages=K, micro_batches=M, backward=Fraction(backward))
    lines = schedules.lines(report, width)
    text = "\n".join(lines)
    assert f"bubble    {Fraction(K - 1, M + K - 1)} = " in text
    assert f"; {Fraction(K - 1, M)} = " in text
    alive = [M if name == "gpipe" else min(M, K - stage) for stage in range(K)]
    assert f"at most {', '.join(map(str, alive))} micro-batches" in text
    assert f"sent      {(K - 1) * M} activations and {(K - 1) * M} gradients" in text
    assert ("needs none" in text) == (minimal_capacity(report.schedule) == 0)
    timeline = lines[2 : lines.index(next(line for line in lines if line.startswith("time "))) - 1]
    assert max(map(len, timeline)) <= width


def test_interleaved_schedule_of_ones_own() -> None:
    """A stage may hold several slices, named after the micro-batch; messages are put where they belong."""
    text = "stage 0: F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0\nF0.1 F1.1 F0.3 F1.3 B0.3 B1.3 B0.1 B1.1  # two each\n"
    report = schedules.report("own", text)
    assert report.finished
    assert schedule.holders(report.schedule) == (0, 1, 0, 1)
    assert Counter(type(i).__name__ for i in report.schedule[0])["SendActivation"] == 4


BAD_SCHEDULES = {
    "": "names no pass",
    "F0 X0\n": "line 1: 'X0' is no pass",
    "F0 B0\nF0": "Backward(m=0, v=1) is missing",
    "F0 F0 B0\n": "a second time",
    "B0 F0\n": "Forward(m=0, v=0) must precede it",
    "F0.1 B0.1\n": "slices are numbered from 0",
    "F0 F2 B0 B2\n": "Forward(m=1, v=0) is missing",
}


@pytest.mark.parametrize("text", BAD_SCHEDULES)
def test_schedule_that_cannot_be_right_is_refused(text: str, tmp_path: Path, capsys: Captured) -> None:
    """In one line that says what and where, with exit status 2."""
    with pytest.raises(ScheduleError, match=re.escape(BAD_SCHEDULES[text])):
        schedules.report("own", text)
    file = tmp_path / "own.txt"
    file.write_text(text)
    assert cli.main(["schedule", str(file)]) == cli.BAD_INPUT
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_deadlock_is_shown(tmp_path: Path, capsys: Captured) -> None:
    """1F1B on rendezvous sends: who waits for whom, and exit status 1. So is one that no amount of room helps."""
    assert cli.main(["schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--capacity", "0"]) == cli.MISMATCH
    out = capsys.readouterr().out
    assert "DEADLOCK with the room that was asked for: stage 0 -> stage 1 -> stage 0" in out
    assert "stage 1, position 3, SendGradient(m=0, v=1): waits for stage 0 to take a message" in out
    assert cli.main(["schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--capacity", "1"]) == cli.MATCHED
    hopeless = "F0 B0 F1 B1\nF0 F1 B0 B1\n"
    with pytest.raises(Deadlock):
        minimal_capacity(schedules.parse(hopeless))
    file = tmp_path / "own.txt"
    file.write_text(hopeless)
    assert cli.main(["schedule", str(file)]) == cli.MISMATCH
    assert "DEADLOCK, however much room messages have" in capsys.readouterr().out


BAD_ARGUMENTS = {
    "schedule nope": "SCHEDULE nope: No such file or directory; known by name are gpipe, 1f1b",
    "schedule 1f1b --stages 0": "0 must be at least 1",
    "schedule 1f1b --forward -1": "'-1' is no number such as 2, 1.5 or 3/2",
    "schedule 1f1b --backward x": "'x' is no number",
    "schedule 1f1b --trace .": "--trace .: Is a directory",
    "schedule 1f1b --trace no/such/file.json": "No such file or directory",
    "schedule 1f1b --micro-batches 2000": "4 stages of 2000 micro-batches have more passes",
    "schedule 1f1b --forward 1/999": "1f1b: the timeline would have",
    "verify --trace no/such/file.json": "--trace no/such/file.json: No such file or directory",
    "train --trace .": "--trace .: Is a directory",
    "show zero": "no story is called 'zero': did you mean zero",
    "show xyzzy": "known are ring, dp",
    "mistakes norms_aded": "no mistake is called 'norms_aded': did you mean norms_added?",
    "mistakes xyzzy": "refpar mistakes lists them",
    "figures": "the following arguments are required: -o/--output",
    "figures -o . --only xyzzy": "no picture is called 'xyzzy': known are memory",
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_ARGUMENTS)
def test_bad_input_is_one_clear_line(line: str, tmp_path: Path, monkeypatch: Any, capsys: Captured) -> None:
    """Exit status 2, one line that names what is wrong, and no file left behind."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == cli.BAD_INPUT
    errors = capsys.readouterr().err
    assert BAD_ARGUMENTS[line] in errors
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------- trace files


@given(built_in, stages, micro_batches, st.fractions(Fraction(1, 3), 3), st.fractions(Fraction(1, 3), 3))
@settings(max_examples=40)
def test_trace_of_a_schedule_is_well_formed(name: str, K: int, M: int, forward: Fraction, backward: Fraction) -> None:
    """A slice for each pass, an arrow for each message, and nothing that a viewer would drop."""
    simulation = simulate(schedules.BUILT_IN[name](K, M), forward=forward, backward=backward)
    file = perfetto.of_schedule(simulation, name)
    assert perfetto.problems(json.loads(json.dumps(file))) == []
    kinds = Counter(event["ph"] for event in file["traceEvents"])
    assert (kinds["X"], kinds["s"], kinds["f"]) == (2 * K * M, 2 * (K - 1) * M, 2 * (K - 1) * M)


def broken(change: Any) -> Any:
    """Return a good file, and what a change has made of it."""
    file = perfetto.of_schedule(simulate(schedule.one_f_one_b(2, 2)), "good")
    events = copy.deepcopy(file)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    arrows = [event for event in events if event["ph"] in "sf"]
    changed = change(events, slices, arrows)
    return {"traceEvents": events} if changed is None else changed


BROKEN = {
    "no list": (lambda e, x, a: {"events": e}, "no object with a list"),
    "phase": (lambda e, x, a: x[0].update(ph="Z"), "has no ph of"),
    "no name": (lambda e, x, a: x[0].pop("name") and None, "name is None"),
    "text for a number": (lambda e, x, a: x[0].update(ts="1"), "ts is '1'"),
    "negative": (lambda e, x, a: x[0].update(dur=-1), "a time of -1"),
    "not a number": (lambda e, x, a: x[0].update(ts=float("nan")), "a time of nan"),
    "crossing": (lambda e, x, a: x[0].update(dur=x[0]["dur"] * 1.5), "crosses"),
    "one end": (lambda e, x, a: e.remove(a[0]), "has only f"),
    "two tails": (lambda e, x, a: e.append(dict(a[0])), "has two events s"),
    "back in time": (lambda e, x, a: a[0].update(ts=x[-1]["ts"]), "goes back in time"),
    "from nowhere": (lambda e, x, a: a[0].update(tid=7), "lies in no slice"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_malformed_trace_is_noticed(what: str) -> None:
    """Each rule of the format, broken once."""
    change, words = BROKEN[what]
    assert any(words in problem for problem in perfetto.problems(broken(change)))
    assert perfetto.problems(broken(lambda *_: None)) == []


# ------------------------------------------------------------------------------------------ recordings


@pytest.fixture(scope="module")
def recorded() -> tuple[Any, Any, Run, World]:
    """The toy on four ranks, recorded and not."""
    layout = Layout(dp=2, pp=2, micro_batches=3)
    with RecordedWorld(layout.ranks) as world:
        seen = hybrid.run(toy.case(), layout, world=world)
        plain = hybrid.collect(toy.case(), layout, World.run(world, hybrid.train, toy.case(), layout))
        clean = World.run(world, leftovers)
    assert clean == [("Mailboxes", [])] * 4
    return seen, plain, world.runs[0], world


def leftovers(comm: Any) -> tuple[str, list[str]]:
    """Return what a rank talks through, and which functions are not the ones they were."""
    found = [resolve(target) for target in recorder.LABELS]
    replaced = [name for holder, name in found if hasattr(getattr(holder, name), "__wrapped__")]
    return type(comm.transport).__name__, replaced


def test_recording_changes_nothing(recorded: tuple[Any, Any, Run, World]) -> None:
    """The same bits and the same ledger with and without; and nothing of the recorder stays in the ranks."""
    seen, plain, _, _ = recorded
    assert compare(seen, plain, bounds=[]).ok
    assert seen.ledgers == plain.ledgers
    assert not hasattr(pipeline.Stage.forward, "__wrapped__")


def test_recording_has_every_message_and_pass(recorded: tuple[Any, Any, Run, World]) -> None:
    """Bytes sent are those on the ledger, what one rank sends another gets, passes ran in the schedule's order."""
    seen, _, run, _ = recorded
    for rank, events in enumerate(run.ranks):
        ledger = seen.ledgers[rank]
        assert sum(e.sent for e in events) == ledger.bytes_sent + ledger.observed.bytes_sent
        passes = [e.name for e in events if e.kind == "compute" and e.name[0] in "FB"]
        instructions = schedule.one_f_one_b(2, 3)[rank // 2]
        assert passes == [
            f"{type(i).__name__[0]}{i.m}" for i in instructions if type(i).__name__ in ("Forward", "Backward")
        ]
    for source, dest in itertools.permutations(range(4), 2):
        gone = [e.sent for e in run.ranks[source] if e.to == dest]
        come = [e.received for e in run.ranks[dest] if e.source == source and e.kind == "wait"]
        assert gone == come


def test_recording_is_a_well_formed_trace(recorded: tuple[Any, Any, Run, World]) -> None:
    """Slices lie inside one another, arrows go forward in time, ranks on too few cores are called time-shared."""
    _, _, run, _ = recorded
    file = perfetto.of_runs([run, run])
    assert perfetto.problems(json.loads(json.dumps(file, allow_nan=False))) == []
    arrows = sum(event["ph"] == "s" for event in file["traceEvents"])
    assert arrows == 2 * sum(e.kind == "wait" and e.received > 0 for events in run.ranks for e in events) > 0
    names = [e["args"]["name"] for e in file["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    shared = Run("x", run.ranks, cores=3)
    assert shared.time_shared
    assert not Run("x", run.ranks, cores=4).time_shared
    assert "4 ranks on 3 cores: time-shared" in perfetto.of_runs([shared])["traceEvents"][0]["args"]["name"]
    assert names == [names[0]] * 2
    assert names[0].startswith("train dp=2,pp=2,micro_batches=3")
    threads = [(e["pid"], e["tid"]) for e in file["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    assert len({tid for _, tid in threads}) == 8
    kinds = {e["cat"] for e in file["traceEvents"] if e["ph"] == "X"}
    assert kinds == {"compute", "call", "send", "wait", "take"}


def test_long_run_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many events no more are kept; the run goes on."""
    monkeypatch.setattr(recorder, "MOST_EVENTS", 5)

    class Nothing:
        rank, size = 0, 1

        def send(self, *_: Any) -> None: ...

    log = recorder.Recorder(Nothing())  # type: ignore[arg-type]
    for _ in range(9):
        log.send(0, "send", np.zeros(1, np.uint8))
    assert len(log.events) == 5
    assert all(isinstance(event, Event) and event.end >= event.start for event in log.events)


REAL_RUNS = {
    "verify --only ring --ranks 2,3": 2,
    "train --steps 2 --dp 2 --layers 1 --width 8 --heads 1 --context 8 --rows 4": 1,
}


@pytest.mark.parametrize("line", REAL_RUNS)
def test_real_runs_are_written_down(line: str, tmp_path: Path) -> None:
    """``--trace`` of ``verify`` and ``train`` leaves a file that a viewer can read, with a group for each run."""
    file = tmp_path / "trace.json"
    assert cli.main([*line.split(), "--trace", str(file)]) == cli.MATCHED
    trace = json.loads(file.read_text())
    assert perfetto.problems(trace) == []
    groups = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    assert len(groups) == REAL_RUNS[line]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


# -------------------------------------------------------------------------------------------- mistakes


def test_catalogue_is_listed(capsys: Captured) -> None:
    """Every mistake, in words, under the part of the catalogue it stands in."""
    assert cli.main(["mistakes"]) == cli.MATCHED
    out = capsys.readouterr().out
    names = [line.strip() for line in out.splitlines() if re.fullmatch(r"  \w+", line)]
    assert sorted(names) == sorted(CATALOGUE)
    assert all(mistake.section.upper() in out for mistake in CATALOGUE.values())


def test_loss_that_looks_fine_and_gradient_that_does_not() -> None:
    """AdamW hides what is lost: the loss is that of one device, every gradient is 0.3333 times the true one."""
    lines = mistaken.beside_the_truth("divided_by_ranks_too", steps=3)
    text = "\n".join(lines)
    losses = [line.split() for line in lines if re.match(r"  \d+ +\d", line)]
    assert len(losses) == 3
    assert all(right == wrong for _, right, wrong, _ in losses)
    assert "step 0: gradient/" in text
    assert len(re.findall(r"0\.3333 +0\.0%", text)) == 6


def test_what_goes_wrong_behind_the_gradients() -> None:
    """Of a norm that is wrong the gradients know nothing, and it says so."""
    text = "\n".join(mistaken.beside_the_truth("norms_added", steps=2))
    assert "step 0: norm is" in text
    assert "All gradients of step 0 are right" in text


def test_mistake_that_ends_the_run() -> None:
    """Ranks in different collectives: what stops the run is shown in place of a loss."""
    text = "\n".join(mistaken.beside_the_truth("reduced_in_order_of_arrival", steps=2))
    assert "The run stops" in text
    assert "ranks do not agree on what to do" in text


@pytest.mark.parametrize("name", [name for name, mistake in CATALOGUE.items() if mistake.scaled][::2])
def test_mistakes_of_the_loss_scale_show_in_small_integers(name: str) -> None:
    """Where nothing is rounded, whatever differs is the mistake: it is found, or it has ended the run."""
    text = "\n".join(mistaken.beside_the_truth(name))
    assert "a layer of small integers in fp16" in text
    assert "allowed 0" in text or "outcome is" in text or "The run stops" in text
    assert "Nothing in the first" not in text


def test_gradient_is_split_into_a_multiple_and_the_rest() -> None:
    """3t is three times the true one with nothing beside it; t + n, with n at a right angle, once, with |n|/|t|."""
    true, aside = np.array([3.0, 4.0]), np.array([-4.0, 3.0])
    three = mistaken.measured("g", 3 * true, true)
    assert (three.times, three.beside, three.off) == (3.0, 0.0, 2.0)
    beside = mistaken.measured("g", true + aside / 5, true)
    assert mistaken.measured("g", np.array([np.nan, 4.0]), true).off == np.inf
    assert mistaken.measured("g", np.zeros(2), np.zeros(2)).off == 0
    assert beside.times == pytest.approx(1)
    assert beside.beside == pytest.approx(0.2)
