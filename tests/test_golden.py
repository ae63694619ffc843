"""Goldens: the same bytes everywhere, enough for a program that does not know refpar, and refused where changed."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refpar import optim, single, split
from refpar.cli import main
from refpar.comm import World
from refpar.nn.layers import GELU, Attention
from refpar.oracle import bounds, golden
from refpar.oracle.cases import CASES
from refpar.oracle.compare import judge
from refpar.oracle.golden import BadGolden, Golden
from refpar.parallel.mesh import check
from refpar.precision import Precision

Worlds = Callable[[int], World]

PINNED = {
    "integers": "84976b468d27d87e",
    "all-reduce": "817b688e7b437fe7",
    "integers-zero": "a91f86ef7a8467bd",
    "integers-pipeline": "8fe3f4481f1b1a9a",
    "overflow": "5aea0ca8ec760f75",
}

INPUTS = {
    "integers": "26c6a6e5e243dc98",
    "integers-zero": "6d63c15340eae948",
    "integers-pipeline": "d65b353950ad7e96",
    "overflow": "9c23687e36d3dbce",
    "mlp": "d7a3bed2a8ed1b55",
    "ragged": "a4fa41d2c760a27e",
    "silent-replica": "f1d51ef65eea8868",
    "tied": "61d3aa92689e42e8",
    "short-pipeline": "9ae28ab877eaf48a",
    "clipping": "d80b4d8c9460ba66",
    "adamw-groups": "bd67745dc0a3a908",
    "adam-warmup": "ee5f8daec8e9260a",
    "dropout": "3154bd9e359a43f1",
    "saturated": "ecdebbe461e58d06",
    "everything": "f3251b04249f5e3d",
}


@pytest.fixture(scope="module")
def small(worlds: Worlds) -> dict[str, Golden]:
    """Goldens that need few ranks, one of each tier."""
    names = {"integers-zero": 3, "overflow": 3, "all-reduce": 1, "ragged": 3}
    return {name: golden.make(name, world=worlds(ranks)) for name, ranks in names.items()}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# ------------------------------------------------------------------------------------------- the same everywhere


@pytest.mark.parametrize("name", PINNED)
def test_exact_goldens_are_the_same_bytes_everywhere(worlds: Worlds, name: str) -> None:
    """All files of an exact case, whatever machine and NumPy: the promise of format 1."""
    ranks = CASES[name].layout.ranks if name in CASES else 1
    assert golden.make(name, world=worlds(ranks)).digest[:16] == PINNED[name]


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_the_same_bytes_everywhere(name: str) -> None:
    """What a run starts from, of every case: parameters, batches, masks of loss and dropout."""
    case = CASES[name].make(CASES[name].dtype)
    arrays = golden.inputs_of(case)
    content = b"".join(f"{key} {x.dtype} {x.shape}".encode() + x.tobytes() for key, x in sorted(arrays.items()))
    assert digest(content) == INPUTS[name]


def test_every_case_is_listed_an_exact_one_first() -> None:
    """One name a line with a description; a dozen and more, every one of which can run in its layout."""
    names = list(golden.listing())
    assert names[0] == "integers"
    assert "all-reduce" in names
    assert len(names) >= 12
    for named in CASES.values():
        check(named.layout, named.make(named.dtype).model.build())


def wrong_tail(right: Any) -> Any:
    def backward(self: GELU, params: Any, saved: Any, dy: Any) -> Any:
        dx = yield from right(self, params, saved, dy)
        return np.where(saved < -3, 0, dx).astype(dx.dtype)  # as if it were flat there already

    return backward


def wrong_weights(right: Any) -> Any:
    def forward(self: Attention, params: Any, x: Any, at: Any) -> Any:
        y, (qkv, weights, *rest) = right(self, params, x, at)
        least = 1 - 0.01 * (np.arange(weights.shape[-1])[:, None] > 0)  # the first token has nobody else to look at
        return y, (qkv, np.minimum(weights, least).astype(weights.dtype), *rest)

    return forward


@pytest.mark.parametrize(
    ("layer", "method", "wrong"),
    [(GELU, "backward", wrong_tail), (Attention, "forward", wrong_weights)],
    ids=["GELU", "attention"],
)
def test_a_case_drives_the_ends_of_curves(
    monkeypatch: pytest.MonkeyPatch, layer: type, method: str, wrong: Callable[[Any], Any]
) -> None:
    """Where GELU is nearly flat or an attention nearly one-hot, a mistake shows in this case, and not in another."""
    assert flagged(monkeypatch, "saturated", "float32", layer, method, wrong(getattr(layer, method)))
    assert not flagged(monkeypatch, "ragged", "float32", layer, method, wrong(getattr(layer, method)))


def test_what_the_page_says_of_torchs_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 1e-6 that it adds to the norm is within the bounds of float32, and not within those of float64."""

    def torchs(norm: float, limit: float) -> float:
        return min(1.0, limit / (norm + 1e-6))

    assert not flagged(monkeypatch, "clipping", "float32", optim, "clip_factor", torchs)
    assert flagged(monkeypatch, "clipping", "float64", optim, "clip_factor", torchs)


def flagged(patch: pytest.MonkeyPatch, name: str, dtype: str, owner: Any, attribute: str, wrong: Any) -> bool:
    """Whether one device that has something ``wrong`` leaves the bounds of a case; without, it must not."""
    case, layout = CASES[name].make(dtype), CASES[name].layout
    true = bounds.everything(case, layout, bounds.truth(case))
    allowed = bounds.allowed(case, layout, true).steps

    def off() -> bool:
        steps = enumerate(single.train(case).steps)
        pairs = [(n, key, x, true[n][key], allowed[n].get(key, 0.0)) for n, s in steps for key, x in s.items()]
        return any(judge(*pair)[0] for pair in pairs)

    assert not off()
    with patch.context() as patched:
        patched.setattr(owner, attribute, wrong)
        return off()


# ---------------------------------------------------------------------------------------------- written and read


@pytest.mark.parametrize("name", ["integers-zero", "overflow", "all-reduce", "ragged"])
def test_what_is_read_is_what_was_written(small: dict[str, Golden], tmp_path: Path, name: str) -> None:
    """A golden read from its folder is the golden, case and layout included, down to the bytes of its files."""
    small[name].write(tmp_path / "golden")
    read = golden.load(tmp_path / "golden")
    assert read.files == small[name].files
    assert read.layout == small[name].layout
    assert read.events == small[name].events
    if read.case is not None:
        case = small[name].case
        assert golden.encode_case(read.case) == golden.encode_case(case)
        for a, b in zip(read.case.batches, case.batches, strict=True):
            assert np.array_equal(a.inputs, b.inputs)
            assert np.array_equal(a.targets, b.targets)
            assert np.array_equal(a.mask, b.mask)


def test_case_of_a_golden_gives_its_answer_again(small: dict[str, Golden], tmp_path: Path) -> None:
    """Whoever reads a golden can compute its expected values anew, to the last bit."""
    small["ragged"].write(tmp_path / "golden")
    read = golden.load(tmp_path / "golden")
    assert read.case is not None
    assert read.layout is not None
    values = bounds.everything(read.case, read.layout, bounds.truth(read.case))
    again = {f"step{n}/{key}": golden.encoded(key, x) for n, step in enumerate(values) for key, x in step.items()}
    assert list(again) == read.events
    assert all(np.array_equal(again[key], x) for key, x in read.expected.items())


def test_checksums_can_be_checked_by_sha256sum(small: dict[str, Golden], tmp_path: Path) -> None:
    """SHA256SUMS has the format of the tool of that name, and its own digest stands for the folder."""
    small["integers-zero"].write(tmp_path / "golden")
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=tmp_path / "golden", capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b": OK") == len(golden.FILES)
    assert golden.check_sums(tmp_path / "golden") == small["integers-zero"].digest


def test_every_change_is_noticed(small: dict[str, Golden], tmp_path: Path) -> None:
    """One changed byte in any file, a missing file, an unknown format: one line that names it."""
    small["integers-zero"].write(tmp_path / "golden")
    for name in golden.FILES:
        path = tmp_path / "golden" / name
        content = path.read_bytes()
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(BadGolden, match=f"{name} has been changed"):
            golden.load(tmp_path / "golden")
        path.unlink()
        with pytest.raises(BadGolden, match=f"{name}: No such file"):
            golden.load(tmp_path / "golden")
        path.write_bytes(content)
    golden.load(tmp_path / "golden")
    with pytest.raises(BadGolden, match="is no golden"):
        golden.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda head: head.update(format=2), "format 2: this refpar reads format 1"),
        (lambda head: head.update(events=head["events"][1:]), "events"),
        (lambda head: head.update(tier="certain"), "tier"),
        (lambda head: head["case"]["model"].update(kind="Diffusion"), "one of MLP, GPT"),
        (lambda head: head["case"]["model"].update(depth=3), "no 'depth'"),
        (lambda head: head["case"]["model"].update(widths=[10**9, 10**9]), "more than 268435456 parameters"),
        (lambda head: head["case"].update(clip=-1), "clip"),
        (lambda head: head.update(layout=[]), "Layout is no JSON object"),
        (lambda head: head["case"].update(precision={"compute": "float128"}), "float128"),
    ],
)
def test_a_folder_that_makes_no_sense_is_refused(
    small: dict[str, Golden], tmp_path: Path, change: Callable[[dict[str, object]], object], text: str
) -> None:
    """Right checksums do not make a golden: every part is looked at, and what is wrong is said in one line."""
    small["integers-zero"].write(tmp_path / "golden")
    head = json.loads((tmp_path / "golden" / "case.json").read_bytes())
    change(head)
    (tmp_path / "golden" / "case.json").write_text(json.dumps(head))
    sums = [f"{hashlib.sha256((tmp_path / 'golden' / n).read_bytes()).hexdigest()}  {n}\n" for n in golden.FILES]
    (tmp_path / "golden" / "SHA256SUMS").write_text("".join(sums))
    with pytest.raises(BadGolden, match=text) as caught:
        golden.load(tmp_path / "golden")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- what is in there


def test_shares_of_replicas_add_up(small: dict[str, Golden]) -> None:
    """The replicas' shares sum to the gradient, their micro-batches' losses and counts to those of the step."""
    made = small["ragged"]
    expected = made.expected
    for step in range(made.steps):
        micro = {name: x for name, x in expected.items() if name.startswith(f"step{step}/dp") and "/micro" in name}
        count = sum(int(x) for name, x in micro.items() if name.endswith("/count"))
        assert count == int(expected[f"step{step}/count"])
        losses = [float(x) for name, x in micro.items() if name.endswith("/loss")]
        assert sum(losses) / count == pytest.approx(float(expected[f"step{step}/loss"]), rel=1e-14)
        for name in expected:
            if name.startswith(f"step{step}/gradient/"):
                shares = [expected[f"step{step}/dp{d}/{name.partition('/')[2]}"] for d in range(3)]
                apart = np.abs(np.sum(shares, axis=0) - expected[name]).max()
                assert apart < 1e-15, name


def test_events_are_in_causal_order(small: dict[str, Golden]) -> None:
    """Micro-batches before the loss, a share before its sum, all gradients before the norm, weights last."""
    place = {name: i for i, name in enumerate(small["ragged"].events)}
    order = [
        "step0/count", "step0/dp0/micro0/loss", "step0/loss", "step0/dp2/gradient/head.weight",
        "step0/gradient/head.weight", "step0/gradient/embedding.token.weight", "step0/norm", "step0/outcome",
        "step0/parameter/head.weight", "step1/count",
    ]  # fmt: skip
    assert [place[name] for name in order] == sorted(place[name] for name in order)


def test_ledger_is_what_the_ring_must_send(small: dict[str, Golden]) -> None:
    """The reduction's ledger is the formula's; that of data parallel has 2(N-1) times the gradient over all ranks."""
    sizes = [x.size for name, x in small["all-reduce"].expected.items()]
    for rank, account in enumerate(small["all-reduce"].ledger):
        assert account[0]["elements"] == sum(sum(split.ring_elements(n, 5, rank)) for n in sizes)
    parameters = sum(x.size for name, x in small["ragged"].inputs.items() if name.startswith("parameter/"))
    sent = sum(e["elements"] for a in small["ragged"].ledger for e in a if e["group"] == "dp")
    assert sent == 2 * 2 * parameters * small["ragged"].steps


PLAIN = """
import json, sys
import numpy as np
from safetensors.numpy import load_file
assert "refpar" not in sys.modules
folder = sys.argv[1]
case, given = json.load(open(folder + "/case.json")), load_file(folder + "/inputs.safetensors")
expected, lr = load_file(folder + "/expected.safetensors"), case["case"]["optimizer"]["lr"]
beta = case["case"]["optimizer"]["momentum"]
p = {n.removeprefix("parameter/"): x.copy() for n, x in given.items() if n.startswith("parameter/")}
buffers = {n: np.zeros_like(x) for n, x in p.items()}
for step in range(2):
    x, y, mask = (given[f"step{step}/{n}"] for n in ("inputs", "targets", "mask"))
    count, g = mask.sum(), {n: np.zeros_like(v) for n, v in p.items()}
    for rows in np.array_split(np.arange(len(x)), case["layout"]["dp"]):
        for part in np.array_split(rows, case["layout"]["micro_batches"]):
            h = x[part] @ p["layers.0.weight"] + p["layers.0.bias"]
            out = np.maximum(h, 0) @ p["layers.1.weight"] + p["layers.1.bias"]
            dy = 2 * (out - y[part]) * mask[part, None]
            g["layers.1.bias"] += dy.sum(0)
            g["layers.1.weight"] += np.maximum(h, 0).T @ dy
            dh = (dy @ p["layers.1.weight"].T) * (h > 0)
            g["layers.0.bias"] += dh.sum(0)
            g["layers.0.weight"] += x[part].T @ dh
    for n in p:
        assert np.array_equal(g[n] / np.float32(count), expected[f"step{step}/gradient/{n}"]), n
        buffers[n] = np.float32(beta) * buffers[n] + g[n] / np.float32(count)
        p[n] = p[n] - np.float32(lr) * buffers[n]
        assert p[n].dtype == np.float32 and np.array_equal(p[n], expected[f"step{step}/parameter/{n}"]), n
print("equal")
"""


def test_a_program_without_refpar_can_use_it(small: dict[str, Golden], tmp_path: Path) -> None:
    """Thirty lines of NumPy in float32, with the files alone, get the very bits of an exact golden."""
    small["integers-zero"].write(tmp_path / "golden")
    done = subprocess.run([sys.executable, "-c", PLAIN, str(tmp_path / "golden")], capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


# ----------------------------------------------------------------------------------------------- the command line


def test_command_writes_a_golden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``refpar golden NAME -o DIR`` writes the folder, prints its checksum, and does not overwrite anything."""
    assert main(["golden", "all-reduce", "-o", str(tmp_path / "golden")]) == 0
    out = capsys.readouterr().out
    assert golden.check_sums(tmp_path / "golden") in out
    assert main(["golden", "all-reduce", "-o", str(tmp_path / "golden")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["golden"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "needs the NAME"),
        (["nothing", "-o", "x"], "no case is called 'nothing'"),
        (["integers"], "needs -o DIR"),
        (["overflow", "-o", "x", "--dtype", "float32"], "about float16"),
        (["--case", "missing.json", "-o", "x"], "No such file"),
        (["integers", "--case", "missing.json", "-o", "x"], "needs the NAME of a case, or --case"),
    ],
)
def test_command_refuses_in_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad input is status 2 and one clear line."""
    assert main(["golden", *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_command_lists_and_explains(capsys: pytest.CaptureFixture[str]) -> None:
    """``--list`` prints one name a line with a description after it, ``--format`` the page that documents the files."""
    assert main(["golden", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(golden.listing())
    assert all(len(line.split()) > 3 for line in lines)
    assert main(["golden", "--format"]) == 0
    page = capsys.readouterr().out
    assert all(name in page for name in golden.FILES)
    assert "Promise" in page


MINE = {
    "model": {"kind": "MLP", "widths": [3, 5, 2]},
    "optimizer": {"kind": "SGD", "lr": 0.125},
    "layout": {"dp": 2},
    "batches": {"steps": 1, "rows": 5, "masked": 1},
    "seed": 3,
}


def test_a_case_of_ones_own(worlds: Worlds, tmp_path: Path) -> None:
    """``--case FILE``: batches drawn from a seed, or one's own in a file beside it; the same golden either way."""
    (tmp_path / "case.json").write_text(json.dumps(MINE))
    name, what, case, layout = golden.read_case(tmp_path / "case.json")
    made = golden.build(name, what, golden.in_dtype(case, "float32"), layout, world=worlds(2))
    assert made.tier == "running"
    assert made.case is not None
    assert made.case.precision.compute == "float32"
    batches = {n: x for n, x in made.inputs.items() if n.startswith("step")}
    save_file(batches, tmp_path / "mine.safetensors")
    (tmp_path / "case.json").write_text(json.dumps({**MINE, "batches": {"file": "mine.safetensors"}}))
    _, _, again, _ = golden.read_case(tmp_path / "case.json")
    assert np.array_equal(again.batches[0].inputs, case.batches[0].inputs)
    assert load_file(tmp_path / "mine.safetensors")["step0/mask"].sum() == 4


def test_a_case_of_whole_numbers(worlds: Worlds, tmp_path: Path) -> None:
    """An MLP's rows may be integers in the file: they are the same numbers."""
    x = np.arange(12).reshape(4, 3) % 3 - 1
    rows = {"step0/inputs": x, "step0/targets": x[:, :2] * 2, "step0/mask": np.ones(4, bool)}
    made = []
    for kind in ("int64", "float64", "uint8"):
        save_file({n: a if n.endswith("mask") else abs(a).astype(kind) for n, a in rows.items()}, tmp_path / "r")
        (tmp_path / "case.json").write_text(json.dumps({**MINE, "batches": {"file": "r"}}))
        name, what, case, layout = golden.read_case(tmp_path / "case.json")
        made.append(golden.build(name, what, golden.in_dtype(case, "float32"), layout, world=worlds(2)))
    assert made[0].digest == made[1].digest == made[2].digest


def test_another_type_keeps_the_types_that_a_case_chooses() -> None:
    """Those that it leaves to refpar follow; one that would be too narrow is refused, not dropped."""
    case = CASES["mlp"].make("float32")
    for own, dtype, expected in (
        (Precision("float32"), "float64", Precision("float64")),
        (Precision("float16"), "float32", Precision("float32")),
        (Precision("float16", "float32"), "float32", Precision("float32", "float32")),
        (Precision("float32", "float64"), "float16", Precision("float16", "float64")),
        (Precision("float32", reduce="float64"), "float16", Precision("float16", reduce="float64")),
    ):
        assert golden.in_dtype(replace(case, precision=own), dtype).precision == expected
    for own in (Precision("float16", "float32"), Precision("float16", reduce="float16")):
        with pytest.raises(ValueError, match="must not be narrower than"):
            golden.in_dtype(replace(case, precision=own), "float64")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batches": None}, "batches must be"),
        ({"batches": {"rows": -1}}, "rows is -1: it must be a whole number from 0 to 65,536"),
        ({"batches": {"rows": 3, "steps": 0}}, "steps is 0: it must be a whole number from 1 to 1,000"),
        ({"batches": {"rows": 3, "masked": 4}}, "masked is 4: it must be a whole number from 0 to 3"),
        ({"batches": {"rows": 3, "row": 4}}, "batches has no 'row': it has steps, rows and masked"),
        ({"layout": {"dp": 10**6}}, "1000000 ranks: at most 512"),
        ({"layout": {"micro_batches": 10**9}}, "from 1 to 65,536"),
        ({"precision": "float32"}, "precision is 'float32': it must be an object"),
        ({"seed": "three"}, "seed is 'three': it must be a whole number"),
        ({"frozen": "layers.0"}, "frozen is 'layers.0': it must be a sequence"),
        ({"batches": {"file": "nowhere.safetensors"}}, "nowhere"),
        ({"layout": {"dp": 0}}, "dp is 0"),
        ({"layout": {"gp": 2}}, "no 'gp'"),
        ({"optimizer": {"kind": "Lion"}}, "one of SGD, Adam, AdamW"),
        ({"optimizer": {"kind": "SGD"}}, "lr"),
        ({"model": 3}, "must say its kind"),
        ({"surprise": 1}, "no 'surprise'"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, object], text: str) -> None:
    """Each in one line that names the file and what is wrong with it."""
    (tmp_path / "case.json").write_text(json.dumps({**MINE, **change}))
    with pytest.raises(BadGolden, match=text) as caught:
        golden.read_case(tmp_path / "case.json")
    assert "case.json" in str(caught.value)
    assert "\n" not in str(caught.value)
