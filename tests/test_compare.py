"""Comparing: honest dumps pass, the first wrong number is named with rank and cause, hostile files give one line."""

import io
import json
import math
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import load, save, save_file

from refpar import single
from refpar.case import Layout, Trace
from refpar.cli import main
from refpar.comm import World
from refpar.optim import Adam
from refpar.oracle import bounds, candidate, control, golden, local, reports
from refpar.oracle.cases import BETAS, EPS, silent_replica
from refpar.oracle.compare import Comparison, judge
from refpar.oracle.dumps import BadDump, Dump, open_dump
from refpar.oracle.golden import Golden

Worlds = Callable[[int], World]
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def ragged(worlds: Worlds) -> Golden:
    return golden.make("ragged", world=worlds(3))


@pytest.fixture(scope="module")
def integers(worlds: Worlds) -> Golden:
    return golden.make("integers-zero", world=worlds(3))


@pytest.fixture(scope="module")
def honest(ragged: Golden) -> Arrays:
    """What an honest implementation in float32 dumps: here one device, its rows in another order."""
    return dumped(single.train(ragged.case, split=bounds.shuffled(ragged.case, 3)))


def dumped(trace: Trace) -> Arrays:
    """All values of a trace, arrays in the type they were computed in."""
    values: Arrays = {}
    for number, step in enumerate(trace.steps):
        for name, x in step.items():
            values[f"step{number}/{name}"] = x if isinstance(x, np.ndarray) else golden.encoded(name, x)
    return values


def check(made: Golden, values: Arrays, tmp_path: Path) -> Comparison:
    save_file({name: np.ascontiguousarray(x) for name, x in values.items()}, tmp_path / "dump.safetensors")
    return candidate.check(made, open_dump([tmp_path / "dump.safetensors"]))


# ------------------------------------------------------------------------------------------------- one file


def test_honest_dump_matches(ragged: Golden, honest: Arrays, tmp_path: Path) -> None:
    """An honest float32 run matches; what it has none of is listed, not held against it."""
    verdict = check(ragged, honest, tmp_path)
    assert verdict.ok, verdict
    assert verdict.bound_kind == "statistical"
    assert verdict.compared == len(honest)
    assert verdict.not_compared == {"micro count": 30, "micro loss": 30, "dp gradient": 102}


def test_golden_matches_itself(ragged: Golden, integers: Golden, tmp_path: Path) -> None:
    """The expected values themselves match, in float64: a wider type than asked is welcome."""
    for made in (ragged, integers):
        verdict = check(made, made.expected, tmp_path)
        assert verdict.ok
        assert verdict.max_error == 0
        assert not verdict.not_compared


def test_gradients_alone_are_enough_but_are_needed(ragged: Golden, honest: Arrays, tmp_path: Path) -> None:
    """Gradients must be there, every one; other kinds may be missing altogether, but not in part."""
    gradients = {name: x for name, x in honest.items() if "/gradient/" in name}
    assert check(ragged, gradients, tmp_path).ok
    losses = {name: x for name, x in honest.items() if name.endswith("/loss")}
    assert check(ragged, losses, tmp_path).first.problem == "missing"
    lost = {name: x for name, x in gradients.items() if name != "step1/gradient/head.norm.bias"}
    verdict = check(ragged, lost, tmp_path)
    assert str(verdict.first) == "step 1: gradient/head.norm.bias: missing"
    part = {**gradients, "step0/parameter/head.norm.bias": honest["step0/parameter/head.norm.bias"]}
    assert check(ragged, part, tmp_path).first.problem == "missing"
    misspelt = {
        name.replace("step1/gradient/head.norm.bias", "step1/gradient/head.norm.Bias"): x
        for name, x in gradients.items()
    }
    assert "there is a value called step1/gradient/head.norm.Bias" in check(ragged, misspelt, tmp_path).first.problem


def test_shape_and_type_are_checked(ragged: Golden, honest: Arrays, tmp_path: Path) -> None:
    """Another shape, or a narrower type than the golden is for, is said instead of a number."""
    name = "step0/gradient/head.norm.bias"
    assert (
        "shape (5, 3), expected (15,)"
        in check(ragged, {**honest, name: honest[name].reshape(5, 3)}, tmp_path).first.problem
    )
    name = "step0/gradient/embedding.token.weight"
    assert "as torch keeps" in check(ragged, {**honest, name: honest[name].T.copy()}, tmp_path).first.problem
    half = check(ragged, {**honest, name: honest[name].astype(np.float16)}, tmp_path)
    assert "float16, which is narrower than float32" in half.first.problem


def test_short_words_are_understood(ragged: Golden, honest: Arrays, tmp_path: Path) -> None:
    """``grad`` and ``param`` stand for ``gradient`` and ``parameter``; a number may be an array of one."""
    short = {name.replace("/gradient/", "/grad/").replace("/parameter/", "/param/"): x for name, x in honest.items()}
    short["step0/loss"] = short["step0/loss"].reshape(1)
    verdict = check(ragged, short, tmp_path)
    assert verdict.ok
    assert verdict.compared == len(honest)


def test_first_wrong_value_is_named(ragged: Golden, honest: Arrays, tmp_path: Path) -> None:
    """Of two wrong tensors the first in causal order is reported, with index, values, error and share."""
    early, late = "step0/gradient/blocks.0.mlp.up.weight", "step0/parameter/embedding.token.weight"
    wrong = {**honest, early: honest[early].copy(), late: honest[late] + 1}
    wrong[early][2, 5] += np.float32(0.25)
    verdict = check(ragged, wrong, tmp_path)
    first = verdict.first
    assert first.name == "gradient/blocks.0.mlp.up.weight"
    assert first.index == (2, 5)
    assert first.error == pytest.approx(0.25, rel=1e-3)
    assert first.share == 1 / honest[early].size
    assert first.got - first.expected == pytest.approx(0.25, rel=1e-3)
    assert first.ratio > 1e3


def test_nan_is_wrong(ragged: Golden, honest: Arrays, tmp_path: Path) -> None:
    """A NaN is never within a bound."""
    name = "step0/gradient/head.norm.bias"
    wrong = {**honest, name: np.where(np.arange(15) == 4, np.nan, honest[name]).astype(np.float32)}
    first = check(ragged, wrong, tmp_path).first
    assert first.index == (4,)
    assert first.causes == ("1 of 15 entries are infinite or NaN",)


# --------------------------------------------------------------------------------------------- causes and roles


def shares(made: Golden, name: str) -> list[np.ndarray]:
    step, _, short = name.partition("/")
    return [made.expected[f"{step}/dp{d}/{short}"] for d in range(3)]


NAME = "step1/gradient/blocks.0.attention.proj.weight"
CAUSES: dict[str, Callable[[Golden, np.ndarray], np.ndarray]] = {
    "1/dp = 0.333333": lambda made, x: x / 3,
    "dp = 3": lambda made, x: x * 3,
    "micro-batches = 5": lambda made, x: x * 5,
    "1/count": lambda made, x: x / int(made.expected["step1/count"]),
    "1/dp = 0.333333, and 1/micro-batches = 0.2": lambda made, x: x / 15,
    "with the wrong sign": lambda made, x: -x,
    "the share of replica 1 alone": lambda made, x: shares(made, NAME)[1],
    "the share of replica 2 is missing": lambda made, x: x - shares(made, NAME)[2],
    "are counted 2, 1, 1 times": lambda made, x: x + shares(made, NAME)[0],
    "the value of the step before: not": lambda made, x: made.expected[NAME.replace("step1", "step0")],
    "is added to it: not cleared": lambda made, x: x + made.expected[NAME.replace("step1", "step0")],
    "all entries are zero": lambda made, x: np.zeros_like(x),
    "in the order of the transposed array": lambda made, x: np.ascontiguousarray(x.T).reshape(x.shape),
    "shifted by 2 along axis 1": lambda made, x: np.roll(x, 2, 1),
    "the right numbers in another order": lambda made, x: np.random.default_rng(0).permuted(x, axis=None),
    "the last 100 of 225 elements are zero": lambda made, x: x * (np.arange(225) < 125).reshape(x.shape),
    "the last 75 of 225 elements are the share of replica 0 alone": lambda made, x: np.where(
        np.arange(225) < 150, x.ravel(), shares(made, NAME)[0].ravel()
    ).reshape(x.shape),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_is_read_off_the_numbers(ragged: Golden, honest: Arrays, tmp_path: Path, cause: str) -> None:
    """Each kind of mark that a mistake leaves is recognised, in the candidate's float32."""
    x = ragged.expected[NAME]
    wrong = {**honest, NAME: CAUSES[cause](ragged, x).astype(np.float32)}
    seen = check(ragged, wrong, tmp_path).first.causes
    assert any(cause in text for text in seen), seen


def test_value_of_another_tensor_is_recognised(ragged: Golden, honest: Arrays, tmp_path: Path) -> None:
    """A tensor that was written in another's place is named."""
    one, other = (f"step0/gradient/blocks.0.norm{i}.weight" for i in (1, 2))
    assert check(ragged, {**honest, one: honest[other]}, tmp_path).first.causes == (f"the value of {other}",)


def test_no_cause_is_made_up(ragged: Golden, honest: Arrays, tmp_path: Path) -> None:
    """Numbers that look like nothing in particular are given no cause."""
    noise = np.random.default_rng(0).normal(size=honest[NAME].shape).astype(np.float32)
    assert check(ragged, {**honest, NAME: noise}, tmp_path).first.causes == ()


def test_lost_micro_batches_are_seen_in_all_gradients(ragged: Golden, tmp_path: Path) -> None:
    """Where every tensor is wrong alike, they are judged together: the last micro-batch alone, or a fading sum."""
    case, step = ragged.case, 0
    start = {n.removeprefix("parameter/"): x for n, x in ragged.inputs.items() if n.startswith("parameter/")}
    parts = candidate.micro_gradients(case, ragged.layout, step, start, 1.0)
    for weights, text in (
        ([0, 0, 0, 0, 1], "micro-batch 4 alone"),
        ([0.0625, 0.125, 0.25, 0.5, 1], "0.0625, 0.125, 0.25"),
    ):
        wrong = dict(ragged.expected)
        for name in parts[0]:
            wrong[f"step0/gradient/{name}"] = sum(w * part[name] for w, part in zip(weights, parts, strict=True))
        first = check(ragged, wrong, tmp_path).first
        assert any(text in cause for cause in first.causes), first.causes


def test_consequences_are_told_from_new_mistakes(ragged: Golden, tmp_path: Path) -> None:
    """What follows from one wrong gradient is a consequence; an update that was wrong by itself is not."""
    case = ragged.case
    trace = single.train(case)
    one = trace.steps[0]
    name = "blocks.0.mlp.up.bias"
    one.gradients[name] = one.gradients[name] * 2
    one.norm = float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in one.gradients.values())))
    start = ragged.inputs[f"parameter/{name}"]
    one.parameters[name] = start - np.float32(0.25) * one.gradients[name]
    state = replace(
        bounds.State.after(single.train(replace(case, batches=case.batches[:1]))), parameters=one.parameters
    )
    trace.steps[1] = single.train(case, start=state).steps[0]
    verdict = check(ragged, dumped(trace), tmp_path)
    assert verdict.first.name == f"gradient/{name}"
    assert {found.role for found in verdict.divergences[1:]} == {"consequence"}
    trace.steps[1].parameters["head.norm.weight"] = trace.steps[0].parameters["head.norm.weight"]
    roles = {(f.step, f.name): f.role for f in check(ragged, dumped(trace), tmp_path).divergences}
    assert roles.pop((1, "parameter/head.norm.weight")) == "again"
    assert set(roles.values()) == {"first", "consequence"}


# ------------------------------------------------------------------------------------------------- several files


def test_what_the_candidate_does_not_tell_is_taken_to_be_right(tmp_path: Path, worlds: Worlds) -> None:
    """After a step without tokens an update more has not been made: what follows is a consequence all the same."""
    case = replace(silent_replica("float32"), optimizer=Adam(2.0**-6, BETAS, EPS, warmup=3))
    made = golden.build("silent", "", case, Layout(dp=3), world=worlds(3))
    first = single.train(replace(case, batches=case.batches[:1]))
    first.steps[0].parameters["head.norm.weight"] *= np.float32(1.01)
    rest = single.train(case, start=bounds.State.after(first))
    trace = replace(first, case=case, steps=first.steps + rest.steps)
    told = {name: x for name, x in dumped(trace).items() if x.ndim}  # no counts, flags, numbers of updates
    verdict = check(made, told, tmp_path)
    assert str(verdict.first).startswith("step 0: parameter/head.norm.weight[")
    assert {found.step for found in verdict.divergences} == {0, 1, 2}
    untold = {found.name for found in verdict.divergences[1:] if found.role != "consequence"}
    assert untold <= {"parameter/head.norm.weight"}  # of step 1, where nothing is updated


def test_an_update_may_round_its_constants(ragged: Golden) -> None:
    """Adam in float32 throughout, its bias corrections too, as a library writes it: right for its own gradients."""
    case = replace(ragged.case, optimizer=Adam(0.01, (0.9, 0.999)))
    step = single.train(replace(case, batches=case.batches[:1])).steps[0]
    values: Arrays = {f"step0/gradient/{name}": g for name, g in step.gradients.items()}
    one, (b1, b2), lr, eps = np.float32(1), np.float32((0.9, 0.999)), np.float32(0.01), np.float32(1e-8)
    start = bounds.State.initial(case).parameters
    for name, g in step.gradients.items():
        m, v = np.float32(1 - 0.9) * g, np.float32(1 - 0.999) * g * g
        values[f"step0/parameter/{name}"] = start[name] - lr * (m / (one - b1)) / (np.sqrt(v / (one - b2)) + eps)
    own = local.recomputed(case, 0, values.get, {})
    for name in step.gradients:
        true, room = own[f"parameter/{name}"]
        assert judge(0, name, values[f"step0/parameter/{name}"], true, room)[0] is None, name


def several(values: list[Arrays], folder: Path, told: list[dict[str, object]] | None = None) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for rank, own in enumerate(values):
        metadata = {"refpar": json.dumps({"version": 1, **told[rank]})} if told else None
        arrays = {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in own.items()}
        save_file(arrays, folder / f"rank{rank}.safetensors", metadata)
    return [folder]


def test_pieces_along_an_axis_and_flat(integers: Golden, tmp_path: Path) -> None:
    """Columns on tensor-parallel ranks, flat shards of unequal size on data-parallel ones, the rest whole on each."""
    values = dict(integers.expected)
    ranks: list[Arrays] = []
    for d in range(2):
        for t in range(3):
            own = {n: x for n, x in values.items() if "layers.0" not in n and "state" not in n}
            own |= {
                n: np.array_split(x, 3, axis=-1)[t] for n, x in values.items() if "layers.0" in n and "state" not in n
            }
            own |= {n: np.array_split(x.ravel(), 6)[3 * d + t] for n, x in values.items() if "state" in n}
            ranks.append(own)
    rules = [
        {"names": "*/state/*.weight/*", "flat": True, "shape": [5, 15]},
        {"names": "*/layers.0.*", "axis": -1, "groups": [[0, 1, 2], [3, 4, 5]]},
    ]
    for name in ("layers.1.weight", "layers.1.bias", "layers.0.bias"):
        shape = list(integers.expected[f"step0/gradient/{name}"].shape)
        rules.insert(0, {"names": f"*/state/{name}/*", "flat": True, "shape": shape})
    (tmp_path / "shards.json").write_text(json.dumps({"version": 1, "rules": rules}))
    paths = several(ranks, tmp_path / "dump")
    assert candidate.check(integers, open_dump(paths, tmp_path / "shards.json")).ok
    ranks[4]["step1/gradient/layers.0.weight"] = ranks[4]["step1/gradient/layers.0.weight"].copy()
    ranks[4]["step1/gradient/layers.0.weight"][3, 2] += 1
    ranks[2]["step0/gradient/layers.0.weight"] = ranks[2]["step0/gradient/layers.0.weight"] * 2
    ranks[5]["step0/gradient/layers.0.weight"] = ranks[5]["step0/gradient/layers.0.weight"] * 2
    verdict = candidate.check(integers, open_dump(several(ranks, tmp_path / "dump"), tmp_path / "shards.json"))
    assert (verdict.first.name, verdict.first.rank) == ("gradient/layers.0.weight", 2)
    replicas = next(found for found in verdict.divergences if found.problem)
    assert replicas.step == 1
    assert "element [3, 7]" in replicas.problem
    assert "on rank 1 and" in replicas.problem
    assert "on rank 4" in replicas.problem


def test_files_that_say_themselves_where_they_belong(integers: Golden, tmp_path: Path) -> None:
    """Pieces named by their first index, or by their flat position, with replicas and empty pieces among them."""
    name, other = "step0/gradient/layers.0.weight", "step0/gradient/layers.1.weight"
    whole, flat = integers.expected[name], integers.expected[other]
    rest = {n: x for n, x in integers.expected.items() if n not in (name, other)}
    blocks = [
        (slice(0, 2), slice(0, 9)),
        (slice(2, 5), slice(0, 9)),
        (slice(0, 5), slice(9, 15)),
        (slice(0, 2), slice(0, 9)),
    ]
    cuts = [(0, 40), (40, 105), (0, 0), (0, 40)]
    values, told = [], []
    for (rows, columns), (start, stop) in zip(blocks, cuts, strict=True):
        values.append({**rest, name: whole[rows, columns], other: flat.ravel()[start:stop]})
        piece = {"shape": list(whole.shape), "start": [rows.start, columns.start]}
        told.append({"pieces": {name: piece, other: {"shape": list(flat.shape), "flat": start}}})
    assert candidate.check(integers, open_dump(several(values, tmp_path / "dump", told))).ok
    values[3][name] = values[3][name] + 1
    verdict = candidate.check(integers, open_dump(several(values, tmp_path / "dump", told)))
    assert "on rank 0 and" in verdict.first.problem
    assert "on rank 3" in verdict.first.problem
    told[1]["pieces"][name]["start"] = [1, 0]
    with pytest.raises(BadDump, match=r"overlap|beyond|elements"):
        open_dump(several(values, tmp_path / "dump", told))


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"version": 2, "rules": []}, "version"),
        ({"version": 1, "rules": [{"axis": 0}]}, "which names"),
        ({"version": 1, "rules": [{"names": "*"}]}, "needs an axis"),
        ({"version": 1, "rules": [{"names": "*", "axis": 0.5}]}, "no whole number"),
        ({"version": 1, "rules": [{"names": "*", "axis": 0, "groups": [[0, 7]]}]}, "ranks from 0 to 1"),
        ({"version": 1, "rules": [{"names": "*", "axis": 9}]}, "along axis 9"),
        ({"version": 1, "rules": [{"names": "*", "axis": 0, "dim": 1}]}, "'dim' is no part of a rule"),
        ([], "version"),
    ],
)
def test_a_sharding_that_makes_no_sense_is_refused(tmp_path: Path, rules: object, text: str) -> None:
    """Each in one line that says what is wrong with it."""
    (tmp_path / "shards.json").write_text(json.dumps(rules))
    x = {"step0/gradient/w": np.zeros((2, 3), np.float32)}
    with pytest.raises(BadDump, match=text):
        open_dump(several([x, x], tmp_path / "dump"), tmp_path / "shards.json")


def test_ranks_that_hold_other_shapes_need_a_rule(tmp_path: Path) -> None:
    """Pieces without a word about how they fit are refused, not guessed at."""
    x = [{"step0/gradient/w": np.zeros((n, 3), np.float32)} for n in (2, 1)]
    with pytest.raises(BadDump, match="say how it is sharded"):
        open_dump(several(x, tmp_path / "dump"))


# ----------------------------------------------------------------------------------------------- the command line


def test_command_reports(integers: Golden, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for a match, 1 for a mismatch with the first wrong number in text, JSON and JUnit, 2 for bad input."""
    integers.write(tmp_path / "golden")
    np.savez(tmp_path / "good.npz", **integers.expected)
    command = ["compare", str(tmp_path / "golden")]
    assert main([*command, str(tmp_path / "good.npz"), "--sha256", integers.digest]) == 0
    assert "all equal (exact)" in capsys.readouterr().out
    wrong = {n: x * 3 if n == "step0/gradient/layers.1.weight" else x for n, x in integers.expected.items()}
    np.savez_compressed(tmp_path / "wrong.npz", **wrong)
    reports = ["--json", str(tmp_path / "r.json"), "--junit", str(tmp_path / "r.xml")]
    assert main([*command, str(tmp_path / "wrong.npz"), *reports]) == 1
    out = capsys.readouterr().out
    assert "first wrong value: step 0: gradient/layers.1.weight" in out
    assert "dp = 3" in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["matches"] is False
    assert report["divergences"][0]["name"] == "gradient/layers.1.weight"
    assert report["sha256"] == integers.digest
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    failures = suite.findall("testcase/failure")
    assert suite.get("failures") == str(len(failures))
    assert any("dp = 3" in (failure.text or "") for failure in failures)
    assert main([*command, str(tmp_path / "wrong.npz"), "--junit", "-"]) == 1
    assert ElementTree.fromstring(capsys.readouterr().out.encode()).get("failures") == suite.get("failures")
    assert main([*command, str(tmp_path / "good.npz"), "--junit", "-", "--json", "-"]) == 2
    assert "cannot both" in json.loads(capsys.readouterr().out)["error"]
    assert main([*command, str(tmp_path / "missing.npz")]) == 2
    assert main([*command, str(tmp_path / "good.npz"), "--sha256", "0" * 64]) == 2
    assert main([*command]) == 2
    assert main([*command, str(tmp_path / "good.npz"), "--control", str(tmp_path / "good.npz")]) == 2
    assert capsys.readouterr().err.count("\n") == 4


def test_first_steps_alone(integers: Golden, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--steps 1`` asks for the first step only."""
    integers.write(tmp_path / "golden")
    np.savez(tmp_path / "one.npz", **{n: x for n, x in integers.expected.items() if n.startswith("step0")})
    command = ["compare", str(tmp_path / "golden"), str(tmp_path / "one.npz")]
    assert main([*command, "--steps", "1"]) == 0
    assert main(command) == 1
    told = capsys.readouterr().out
    assert "of 2 steps the dump has the first 1: --steps 1 compares those" in told
    assert "known mistakes" not in told  # which change numbers, and none of those that are there is wrong
    assert main([*command, "--steps", "3"]) == 2
    assert "has 2 steps" in capsys.readouterr().err


def saved_by_torch(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")


def a_golden(path: Path) -> None:
    path.mkdir()
    (path / "SHA256SUMS").touch()


NO_DUMPS: dict[str, tuple[Callable[[Path], object], str]] = {
    "one array": (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00" + b" " * 100), "write all of them by numpy.savez"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps({"x": np.ones(3)})), "nothing is unpickled"),
    "what torch saves": (saved_by_torch, "safetensors.torch.save_file"),
    "a golden": (a_golden, "this is a golden, which comes first"),
}


@pytest.mark.parametrize("what", NO_DUMPS)
def test_what_people_have_instead_of_a_dump(tmp_path: Path, what: str) -> None:
    """It is recognised, and the line says what to write instead."""
    write, words = NO_DUMPS[what]
    write(tmp_path / "mine")
    with pytest.raises(BadDump, match=words):
        open_dump([tmp_path / "mine"])


def test_a_header_may_begin_like_a_pickle(tmp_path: Path) -> None:
    """Its length is the first number of a safetensors file: 0x280 is no sign of anything."""
    for filler in range(1000):
        blob = save({"x": np.ones(3)}, {"filler": "x" * filler})
        if blob.startswith(b"\x80"):
            (tmp_path / "mine").write_bytes(blob)
            assert open_dump([tmp_path / "mine"]).values["x"].shape == (3,)
            return
    pytest.fail("no length of a header was of that kind")


def test_junit_is_xml_whatever_files_are_called(tmp_path: Path, integers: Golden) -> None:
    """Names may hold what XML cannot."""
    verdict = check(integers, {n: x + 1 for n, x in integers.expected.items()}, tmp_path)
    for name in ("a & b <c>.npz", "a\x01\x1b[31m", "\udcff", "\ufffe", "ä…"):
        suite = ElementTree.fromstring(reports.as_junit(verdict, name).encode())
        assert suite.get("failures") == str(len(suite.findall("testcase/failure")))


def test_first_steps_of_ones_own_reference(tmp_path: Path) -> None:
    """``--steps`` goes with ``--reference``, too: what comes later is not looked at."""
    right = {f"step{n}/gradient/w": np.arange(1.0, 4) + n for n in range(3)}
    np.savez(tmp_path / "a.npz", **right)
    np.savez(tmp_path / "b.npz", **{**right, "step2/gradient/w": np.zeros(3)})
    command = ["compare", "--reference", str(tmp_path / "a.npz"), str(tmp_path / "b.npz")]
    assert main(command) == 1
    assert main([*command, "--steps", "2"]) == 0
    assert main([*command, "--steps", "3"]) == 1


def test_nothing_to_compare_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No value passes for no reason: neither an empty reference, nor one with which nothing is shared."""
    np.savez(tmp_path / "none.npz")
    np.savez(tmp_path / "late.npz", **{"step4/gradient/w": np.ones(3)})
    np.savez(tmp_path / "norm.npz", norm=np.ones(()))
    np.savez(tmp_path / "other.npz", v=np.ones(3))
    for reference, other, *options in (
        ("none", "none"), ("none", "norm"), ("late", "late", "--steps", "2"), ("norm", "none"), ("norm", "other")
    ):  # fmt: skip
        assert main(["compare", "--reference", f"{tmp_path}/{reference}.npz", f"{tmp_path}/{other}.npz", *options]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_values_that_differ_are_counted_among_those_compared(integers: Golden, tmp_path: Path) -> None:
    """And those that are missing beside them: never more are wrong than there are."""
    gradients = [name for name in integers.expected if name.startswith("step0/gradient/")]
    lost, *kept = gradients
    verdict = check(integers, {name: integers.expected[name] * 3 for name in kept}, tmp_path)
    missing = sum(found.problem.startswith("missing") for found in verdict.divergences)
    assert missing >= 1
    said = reports.headline(verdict, "x")
    assert said.startswith(f"x differs: {len(kept)} of {len(kept)} values, {missing} missing")
    assert lost in {f"step{found.step}/{found.name}" for found in verdict.divergences}


def test_ones_own_all_reduce(tmp_path: Path) -> None:
    """A reduction golden: honest sums in any order match, a lost tail and a missing rank are named."""
    made = golden.make("all-reduce")
    names = [name.partition("/")[2] for name in made.expected]
    terms = {name: [made.inputs[f"rank{rank}/{name}"] for rank in (3, 1, 4, 0, 2)] for name in names}
    right = {f"sum/{name}": np.sum(each, axis=0, dtype=np.float32) for name, each in terms.items()}
    assert check(made, right, tmp_path).ok
    lost = right["sum/integers"].copy()
    lost[1005:] = made.inputs["rank0/integers"][1005:]
    first = check(made, {**right, "sum/integers": lost}, tmp_path).first
    assert first.causes == ("the last 4 of 1009 elements are the share of rank 0 alone",)
    ranks = [{"sum/integers": lost if rank else right["sum/integers"]} for rank in range(2)]
    ranks = [{**right, **own} for own in reversed(ranks)]
    first = candidate.check(made, open_dump(several(ranks, tmp_path / "ranks"))).first
    assert first.problem.startswith("replicas differ: element [1005] is")
    assert first.causes == ("the last 4 of 1009 elements are the share of rank 0 alone",)
    without = right["sum/reals"] - made.inputs["rank2/reals"]
    causes = check(made, {**right, "sum/reals": without}, tmp_path).first.causes
    assert causes == ("the share of rank 2 is missing from the sum",)


# ----------------------------------------------------------------------------------------------------- any model


def stored(values: Arrays, path: Path) -> Dump:
    save_file({n: np.ascontiguousarray(x) for n, x in values.items()}, path)
    return open_dump([path])


def test_any_model_by_control_runs(tmp_path: Path, honest: Arrays, ragged: Golden) -> None:
    """Without a golden, other orders of rows set the threshold: an honest run passes, one wrong gradient does not."""
    case = ragged.case
    reference = stored(dumped(single.train(case)), tmp_path / "reference")
    others = [
        stored(dumped(single.train(case, split=bounds.shuffled(case, 5 + i))), tmp_path / f"{i}") for i in range(4)
    ]
    right = stored(honest, tmp_path / "right")
    verdict = control.against(reference, right, others)
    assert verdict.ok, verdict
    assert verdict.bound_kind == "4 control runs: flags an honest run less than once in 100; float32 and float64"
    assert not verdict.notes
    name = "step1/gradient/blocks.0.mlp.up.weight"
    wrong = stored({**honest, name: honest[name] * np.float32(1.0001)}, tmp_path / "wrong")
    verdict = control.against(reference, wrong, others)
    assert verdict.first.name == "gradient/blocks.0.mlp.up.weight"
    assert verdict.first.step == 1
    [note] = control.against(reference, right, others[:1]).notes
    assert note.startswith("1 control run says little of how far another may be off, so ")


@pytest.mark.parametrize("controls", [1, 2, 4, 16])
def test_factor_keeps_the_chance_of_a_false_alarm(controls: int) -> None:
    """Student's tail beyond it, of all values together, is what is promised, and not much less."""
    for values in (1, 100, 10_000):
        limit = control.factor(controls, values) / control.MORE
        t = limit * np.exp(np.linspace(0, 30, 200_001))  # the integral in log(t)
        density = (1 + t**2 / controls) ** (-(controls + 1) / 2) * t
        g = math.gamma((controls + 1) / 2) / math.gamma(controls / 2) / math.sqrt(math.pi * controls)
        tail = 2 * g * float(np.sum(density)) * 30 / 200_000 * values
        least = 0.01 if controls == 16 else 0.3
        assert least * control.ALARM < tail < 1.001 * control.ALARM  # the integral is off by less


def test_table_of_factors() -> None:
    """The module shows what it computes."""
    [head, *rows] = [line.split() for line in (control.__doc__ or "").splitlines() if line.startswith("    ")]
    for _, _, values, _, *shown in rows:
        assert [f"{control.factor(int(k), int(values)):.0f}" for k in head[1:]] == shown


@pytest.mark.parametrize("controls", [1, 2, 4])
@pytest.mark.parametrize("size", [1e-7, 3e-5])
def test_honest_numbers_are_not_flagged(tmp_path: Path, controls: int, size: float) -> None:
    """Two hundred single numbers, off by chance like those of the controls, whether or not their type shows it."""
    random = np.random.default_rng(controls)

    def run(name: str) -> Dump:
        values = 1 + size * random.normal(size=200)
        return stored({f"step{n}/gradient/w": np.float32(x) for n, x in enumerate(values)}, tmp_path / name)

    reference, *others = (run(f"{i}") for i in range(1 + controls))
    for i in range(3):
        verdict = control.against(reference, run(f"candidate{i}"), others)
        assert verdict.ok, verdict


def test_what_has_no_bound_is_said(tmp_path: Path) -> None:
    """Where controls are so far apart that a wrong number would pass, the verdict says so."""
    reference, other = ({f"step{n}/gradient/w": np.float64(x) for n in range(3)} for x in (1.0, 1.01))
    zero = {name: np.zeros(()) for name in reference}
    a, b, c = (stored(x, tmp_path / f"{i}") for i, x in enumerate((reference, other, zero)))
    with pytest.raises(BadDump, match="which no rounding does"):
        control.against(a, c, [b])
    near = stored({name: np.float64(1 + 1e-9) if name[4] == "0" else x for name, x in other.items()}, tmp_path / "near")
    verdict = control.against(a, c, [near])
    assert not verdict.ok
    assert "2 values, such as step1/gradient/w, may be off by as much as their largest entry" in verdict.notes[-1]


def test_a_control_that_is_none_is_refused(tmp_path: Path, honest: Arrays, ragged: Golden) -> None:
    """A control run that computes something else would excuse anything."""
    save_file({n: np.ascontiguousarray(x) for n, x in honest.items()}, tmp_path / "a.safetensors")
    other = {n: x * 2 if "/gradient/" in n else x for n, x in honest.items()}
    save_file({n: np.ascontiguousarray(x) for n, x in other.items()}, tmp_path / "b.safetensors")
    a, b = (open_dump([tmp_path / f"{n}.safetensors"]) for n in "ab")
    with pytest.raises(BadDump, match="which no rounding does"):
        control.against(a, a, [b])
    alone = control.against(a, a)
    assert alone.ok
    assert "no control run" in alone.bound_kind
    assert "--control" in alone.notes[-1]


# -------------------------------------------------------------------------------------------------- hostile files


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def header(entries: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with a header of one's own."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def npy(descr: str, shape: str, data: bytes = b"", order: str = "False") -> bytes:
    """A zip with an npy file of a header of one's own."""
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) + 1) + text + b"\n" + data)
    return file.getvalue()


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "empty": b"",
    "a few bytes": b"abc",
    "text": b"loss,1.0\n" * 50,
    "a header beyond the file": header({}, length=1 << 62),
    "a header of 2^64 - 1 bytes": header({}, length=(1 << 64) - 1),
    "no JSON": header(b"{" * 40),
    "JSON nested too deep": header(b"[" * 100_000),
    "a list": header([1]),
    "an entry that is a number": header({"x": 3}),
    "a shape beyond memory": header(
        {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 8]}}, b"x" * 8
    ),
    "offsets beyond the file": header(
        {"x": {"dtype": "F32", "shape": [1 << 34], "data_offsets": [0, 1 << 36]}}, b"x" * 8
    ),
    "negative sizes": header({"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"x" * 8),
    "overlapping tensors": header({"x": F32, "y": F32}, b"x" * 8),
    "an unknown type": header({"x": {**F32, "dtype": "F33"}}, b"x" * 8),
    "cut off": save({"x": np.ones(100)})[:-20],
    "a pickle": npy("'|O'", "(2,)", b"cposix\nsystem\n(S'true'\ntR."),
    "an npy of 2^60 elements": npy("'<f4'", "(1152921504606846976,)"),
    "an npy of negative shape": npy("'<f4'", "(-1,)", b"x" * 8),
    "an npy of strings": npy("'<U1000000000'", "(1,)", b"x" * 8),
    "an npy of records": npy("[('a', '<f4')]", "(1,)", b"x" * 4),
    "code for a header": npy("__import__('os').system('true')", "(1,)", b"x" * 8),
    "a zip that is none": b"PK\x03\x04" + b"\x00" * 60,
    "a zip cut off": npz(x=np.arange(100.0))[:-40],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_gives_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is unpickled, run or allocated; the command says what is wrong in one line, and its status is 2."""
    (tmp_path / "reference.npz").write_bytes(npz(x=np.ones(2)))
    (tmp_path / "file").write_bytes(HOSTILE[name])
    assert main(["compare", "--reference", str(tmp_path / "reference.npz"), str(tmp_path / "file")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("refpar: ")
    assert err.count("\n") == 1
    assert len(err) < 500


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """A member that claims more than deflate can have packed is refused before anything is read."""
    content = bytearray(npz(x=np.zeros(10)))
    at = content.index(b"PK\x01\x02") + 24
    content[at : at + 4] = struct.pack("<I", (1 << 32) - 2)
    (tmp_path / "file").write_bytes(bytes(content))
    with pytest.raises(BadDump, match=r"cannot hold|no npz file"):
        open_dump([tmp_path / "file"])


def test_ten_thousand_broken_files(tmp_path: Path) -> None:
    """Files with bytes changed, cut out or doubled at random are read, or refused as bad: nothing else happens."""
    rng = random.Random(0)
    good = [
        save(
            {"step0/gradient/w": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float32)},
            {"refpar": '{"version": 1}'},
        ),
        npz(a=np.arange(6.0).reshape(2, 3), b=np.ones(3, np.int64)),
        npz(a=np.asfortranarray(np.ones((3, 4), np.float16))),
        npz(long=np.random.default_rng(0).integers(0, 9, 6000, np.uint8)),  # longer than what is read at once
    ]
    path, refused, lines = tmp_path / "file", 0, 0
    for _ in range(10_000):
        content = bytearray(rng.choices(good, (8, 8, 8, 1))[0])
        for _ in range(rng.choice((1, 1, 2, 8))):
            at, how = rng.randrange(len(content)), rng.randrange(4)
            if how == 0:
                content[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                content[at] = rng.choice(b'\x00\xff"{}[],:0123456789-')
            elif how == 2:
                del content[at : at + rng.choice((1, 4, 1000))]
            else:
                content[at:at] = content[at : at + rng.choice((1, 8, 100))]
            content = content or bytearray(b"x")
        path.write_bytes(content)
        try:
            dump = open_dump([path])
            for name in dump.values:
                dump.read(name)
        except BadDump as error:
            refused += 1
            lines += str(error).count("\n")
    assert 5_000 < refused < 10_000
    assert lines == 0
    assert load(good[0])["b"].sum() == 3
