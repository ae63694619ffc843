"""What goes wrong on a bad day: each is one clear line and the right exit status, and nothing is lost.

One table for all verbs. A row is what is typed, with ``{tmp}`` for a folder of files that are not what they should be,
and words that the one line must have.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from refpar import cli, files, state
from refpar.cli import BAD_INPUT, FAILED, MATCHED
from refpar.oracle import verify

SMALL = "train --layers 1 --width 12 --heads 3 --context 8 --rows 6 --steps 2"
QUICK = "verify --only ring --ranks 1"
TEXT = "a text of some length, " * 20

DATA = {
    f"{verb}: {what}": (f"{start} --data {file}", words)
    for verb, start in (("verify", "verify --only dp --ranks 2"), ("train", SMALL))
    for what, file, words in (
        ("no such text", "{tmp}/missing", "No such file"),
        ("a folder for a text", "{tmp}", "Is a directory"),
        ("an empty text", "{tmp}/empty", "has 0 bytes"),
        ("a text shorter than a row", "{tmp}/short", "has 5 bytes: one row of"),
        ("a text that cannot be read", "/proc/self/mem", "/proc/self/mem: Input/output error"),
        ("a text below a file", "{tmp}/text/more", "Not a directory"),
    )
}

SAVED = {
    f"resume: {what}": (f"{SMALL} --data {{tmp}}/text --resume {file}", words)
    for what, file, words in (
        ("no such file", "{tmp}/missing", "No such file"),
        ("a folder", "{tmp}", "{tmp}: Is a directory"),
        ("an empty file", "{tmp}/empty", "{tmp}/empty"),
        ("a binary file", "{tmp}/noise", "{tmp}/noise"),
        ("somebody else's safetensors", "{tmp}/foreign.safetensors", "{tmp}/foreign.safetensors"),
        ("a file cut off", "{tmp}/cut", "{tmp}/cut"),
        ("a run of another model", "{tmp}/saved --width 24", "width"),
        ("a run of other data", "{tmp}/saved --seed 5", "--resume"),
        ("a run that is over", "{tmp}/saved", "--steps 2"),
    )
}

NUMBERS = {
    "train: no replicas": (f"{SMALL} --dp 0", "--dp: 0 must be at least 1"),
    "train: 10,000 ranks": (f"{SMALL} --dp 10000", "10000 ranks: at most 512"),
    "train: steps below 0": ("train --steps -1", "--steps: -1 must not be negative"),
    "train: steps without end": (f"train --steps {10**30}", "at most 1,000,000,000"),
    "train: micro-batches without end": (f"{SMALL} --micro-batches 99999999", "65,536"),
    "train: layers without end": ("train --layers 99999999", "at most 1,000"),
    "train: more slices than heads": ("train --tp 7", "tp is 7"),
    "train: heads that do not divide the width": ("train --heads 7", "heads"),
    "train: more stages than units": (f"{SMALL} --pp 9", "pp is 9"),
    "train: a stage of ZeRO that there is not": (f"{SMALL} --zero 4", "zero is 4"),
    "train: a schedule that there is not": (f"{SMALL} --schedule 1f2b", "1f2b"),
    "train: stages that are not all": (f"{SMALL} --pp 2 --stages 1+1", "stages"),
    "train: stages without a number": (f"{SMALL} --pp 2 --stages 1+x", "stages"),
    "train: recompute what": (f"{SMALL} --recompute 0", "recompute"),
    "train: everything dropped": (f"{SMALL} --dropout 1.5", "dropout"),
    "train: a rate that is no number": (f"{SMALL} --lr nan", "--lr"),
    "train: a precision that there is not": (f"{SMALL} --precision fp8", "fp8"),
    "train: a library that there is not": (f"{SMALL} --backend cuppy", "did you mean cupy?"),
    "train: a transport that there is not": (f"{SMALL} --transport mpu", "mpu"),
    "verify: 10,000 ranks": ("verify --ranks 10000", "at most 512"),
    "verify: no ranks": ("verify --ranks 0", "0 must be at least 1"),
    "verify: steps below 0": ("verify --steps -1", "-1 must not be negative"),
    "verify: an unknown technique": ("verify --only zero4", "did you mean zero"),
    "verify: an unknown key": ("verify --layout dp=2,micro_batch=3", "did you mean micro_batches?"),
    "verify: a key without a value": ("verify --layout dp", "has no value"),
    "verify: a value that is no number": ("verify --layout dp=two", "dp is 'two'"),
    "verify: no replicas": ("verify --layout dp=0", "dp is 0"),
    "verify: more slices than heads": ("verify --layout tp=7", "tp is 7"),
    "verify: a key that is given twice": ("verify --layout dp=2,dp=1", "dp is given twice"),
    "verify: a layout that says nothing": ("verify --layout=", "says nothing"),
    "verify: more steps than can be kept": ("verify --steps 100000000", "at most 1,000"),
    "verify: more micro-batches than a schedule has room for": ("verify --layout micro_batches=99999999", "65,536"),
    "verify: two things at once": ("verify --layout dp=2 --only dp", "--only"),
    "verify: an unknown option": ("verify --stepps 3", "--stepps"),
    "memory: an unknown model": ("memory --model gpt2-xll", "gpt2-xl"),
    "memory: no model": ("memory", "--model"),
    "memory: no devices": ("memory --model gpt2-xl --gpus 0", "--gpus"),
    "memory: a size in no unit": ("memory --model gpt2-xl --device-memory 80QB", "80QB"),
    "memory: a number that is none": ("memory --params many", "many"),
    "memory: more parameters than there are numbers": ("memory --params 1e400 --gpus 8", "'1e400' is too large"),
    "memory: more layers than anybody has": ("memory --layers 1e9 --width 8 --heads 2 --gpus 8", "at most 1,000"),
    "memory: more rows than there are": ("memory --model gpt2-xl --gpus 8 --batch 1e30", "at most 1,000,000,000"),
    "memory: more memory than there is": ("memory --model gpt2-xl --device-memory 1e400GB", "too large"),
    "memory: a number below 0": ("memory --params -7", "--params"),
    "plan: an unknown model": ("plan --model lama3-8b --gpus 8", "llama3-8b"),
    "plan: no devices": ("plan --model gpt2-xl --gpus 0", "--gpus"),
    "plan: an unknown recipe": ("plan --model gpt2-xl --gpus 8 --recipe mixd-adam", "mixed-adam"),
    "golden: an unknown case": ("golden integer -o {tmp}/new", "did you mean integers?"),
    "golden: a type that there is not": ("golden integers -o {tmp}/new --dtype float8", "float8"),
    "golden: nowhere to write": ("golden integers", "-o"),
    "schedule: an unknown one": ("schedule gpip", "gpip"),
    "schedule: no stages": ("schedule gpipe --stages 0", "--stages"),
    "schedule: too long to draw": ("schedule gpipe --micro-batches 99999999", "4 stages of 99999999 micro-batches"),
    "schedule: a cost without end": ("schedule gpipe --forward 1e99999999", "no number such as 2, 1.5 or 3/2"),
    "schedule: a cost over 0": ("schedule gpipe --backward 3/0", "no number such as"),
    "schedule: a cost of 0": ("schedule gpipe --backward 0/3", "must be above 0"),
    "mistakes: more steps than can be kept": ("mistakes tail_not_reduced --steps 99999999", "at most 1,000"),
    "show: an unknown technique": ("show rign", "ring"),
    "mistakes: an unknown one": ("mistakes tail_not_reducd", "tail_not_reduced"),
    "conformance: an unknown check": ("conformance refpar.conformance.example:X --only alreduce", "no check is called"),
    "conformance: nowhere to report to": (
        "conformance refpar.conformance.example:X --report {tmp}/fodler/new",
        "--report {tmp}/fodler/new: No such file",
    ),
    "conformance: no check at all": ("conformance refpar.conformance.example:X --only (", "--list shows them"),
    "figures: an unknown one": ("figures -o {tmp}/new --only pipelin", "did you mean pipeline?"),
    "no verb": ("", "VERB"),
    "an unknown verb": ("verfy", "verfy"),
}

FILES = {
    "golden: no such case file": ("golden --case {tmp}/missing -o {tmp}/new", "No such file"),
    "golden: a folder for a case": ("golden --case {tmp} -o {tmp}/new", "directory"),
    "golden: an empty case": ("golden --case {tmp}/empty -o {tmp}/new", "{tmp}/empty"),
    "golden: a binary case": ("golden --case {tmp}/noise -o {tmp}/new", "{tmp}/noise"),
    "golden: a list for a case": ("golden --case {tmp}/list.json -o {tmp}/new", "{tmp}/list.json"),
    "compare: no such golden": ("compare {tmp}/missing {tmp}/foreign.safetensors", "{tmp}/missing"),
    "compare: a folder that is no golden": ("compare {tmp} {tmp}/foreign.safetensors", "{tmp}"),
    "compare: a file for a golden": ("compare {tmp}/text {tmp}/foreign.safetensors", "{tmp}/text"),
    "compare: no such candidate": ("compare --reference {tmp}/foreign.safetensors {tmp}/missing", "{tmp}/missing"),
    "compare: an empty candidate": ("compare --reference {tmp}/foreign.safetensors {tmp}/empty", "{tmp}/empty"),
    "compare: a binary candidate": ("compare --reference {tmp}/foreign.safetensors {tmp}/noise.npz", "{tmp}/noise.npz"),
    "compare: a candidate cut off": ("compare --reference {tmp}/foreign.safetensors {tmp}/cut", "{tmp}/cut"),
    "compare: a file where the golden goes": ("compare {tmp}/foreign.safetensors {tmp}", "a golden is a folder"),
    "schedule: a folder": ("schedule {tmp}", "{tmp}"),
    "schedule: a micro-batch that nobody has": ("schedule {tmp}/far", "'F99999999999' is no pass"),
    "schedule: a binary file": ("schedule {tmp}/noise", "{tmp}/noise"),
}

TARGETS = {
    f"{name}: {what}": (f"{start} {target}", words)
    for name, start in (
        ("verify --json", f"{QUICK} --json"),
        ("memory --json", "memory --model gpt2-xl --gpus 8 --json"),
        ("plan --json", "plan --model gpt2-xl --gpus 8 --device-memory 80GB --json"),
        ("schedule --trace", "schedule gpipe --trace"),
        ("train --save", f"{SMALL} --data {{tmp}}/text --save"),
        ("train --trace", f"{SMALL} --data {{tmp}}/text --trace"),
    )
    for what, target, words in (
        ("into a folder that is not there", "{tmp}/no/such/place", "{tmp}/no/such"),
        ("onto a folder", "{tmp}/folder", "{tmp}/folder"),
        ("where nothing can be made", "/sys/refpar-test", "/sys"),
        ("onto a full disk", "{tmp}/full", "{tmp}/full"),
        ("below a file", "{tmp}/text/more", "{tmp}/text"),
    )
} | {
    "train: over what was saved": (
        f"{SMALL} --data {{tmp}}/text --save {{tmp}}/new --trace {{tmp}}/new",
        "--trace {tmp}/new: this is what --save writes",
    ),
    "train: over what is resumed": (
        f"{SMALL} --steps 3 --data {{tmp}}/text --resume {{tmp}}/saved --trace {{tmp}}/saved",
        "saved: this is read",
    ),
    "verify: over the text": (f"{QUICK} --data {{tmp}}/text --json {{tmp}}/../{{name}}/text", "text: this is read"),
    "compare: over the candidate": (
        "compare --reference {tmp}/saved {tmp}/foreign.safetensors --json {tmp}/foreign.safetensors",
        "this is read",
    ),
    "golden -o: a folder that is there": ("golden integers -o {tmp}/folder", "{tmp}/folder"),
    "golden -o: where nothing can be made": ("golden integers -o /sys/refpar-test", "/sys"),
    "golden -o: in a folder that is not there": ("golden integers -o {tmp}/fodler/new", "fodler/new: No such file"),
    "figures -o: in a folder that is not there": ("figures -o {tmp}/fodler/new", "fodler/new: No such file"),
    "compare --junit: in a folder that is not there": (
        "compare --reference {tmp}/foreign.safetensors {tmp}/foreign.safetensors --junit {tmp}/fodler/new",
        "--junit {tmp}/fodler/new: No such file",
    ),
    "golden -o: below a file": ("golden integers -o {tmp}/text/more", "{tmp}/text"),
    "schedule --plot: of no known kind": ("schedule gpipe --plot {tmp}/picture.doc", "picture.doc"),
    "figures -o: onto a file": ("figures -o {tmp}/text --only pipeline", "{tmp}/text"),
}

BAD = DATA | SAVED | NUMBERS | FILES | TARGETS


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of files that are not what they should be."""
    tmp = tmp_path_factory.mktemp("wrong")
    (tmp / "empty").touch()
    (tmp / "short").write_text("short")
    (tmp / "text").write_text(TEXT)
    (tmp / "noise").write_bytes(np.random.default_rng(0).bytes(1000))
    (tmp / "noise.npz").write_bytes(b"PK\3\4" + np.random.default_rng(0).bytes(1000))
    (tmp / "list.json").write_text("[1, 2]")
    (tmp / "far").write_text("F0 F99999999999 B0")
    (tmp / "folder").mkdir()
    (tmp / "folder" / "kept").write_text("kept")
    (tmp / "full").symlink_to("/dev/full")
    save_file({"x": np.ones(3, np.float32)}, tmp / "foreign.safetensors")
    assert cli.main([*SMALL.split(), "--data", str(tmp / "text"), "--save", str(tmp / "saved")]) == MATCHED
    (tmp / "cut").write_bytes((tmp / "saved").read_bytes()[:-100])
    return tmp


def contents(folder: Path) -> dict[str, str]:
    """Return what is in a folder, and where its links point."""
    return {
        str(path): os.readlink(path)
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("what", BAD)
def test_one_clear_line(what: str, wrong: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit status 2; one line that names what is wrong; and every file is as it was."""
    typed, words = (text.replace("{tmp}", str(wrong)).replace("{name}", wrong.name) for text in BAD[what])
    before = contents(wrong)
    status = cli.main(typed.split())
    said = capfd.readouterr().err.splitlines()
    assert status == BAD_INPUT, said
    assert len(said) == 1, said
    assert said[0].startswith("refpar: ")
    needs_plot = ("--plot" in typed or "figures" in typed) and find_spec("matplotlib") is None
    assert words in said[0] or (needs_plot and "pip install 'refpar[plot]'" in said[0])
    assert contents(wrong) == before


@pytest.mark.parametrize("start", ["verify --only dp --ranks 2 --steps 1", SMALL])
def test_any_bytes_are_text(wrong: Path, start: str) -> None:
    """A binary file is as good as any."""
    assert cli.main([*start.split(), "--data", str(wrong / "noise")]) == MATCHED


@pytest.mark.parametrize("device", ["/dev/null", "pipe"])
def test_devices_stay_devices(tmp_path: Path, device: str) -> None:
    """What is written to a device is written to it, and nothing takes its place, whoever runs this."""
    (tmp_path / "link").symlink_to(device)
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit((tmp_path / "pipe").read_text) if device == "pipe" else None
        status = cli.main(["memory", "--model", "gpt2-xl", "--gpus", "8", "--json", str(tmp_path / "link")])
        assert status == MATCHED
        assert read is None or json.loads(read.result())
    assert os.readlink(tmp_path / "link") == device
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127, "-", ".part"])
def test_any_name_that_a_file_can_have(tmp_path: Path, name: str) -> None:
    """The name under which a file is written first is not longer than its own may be."""
    files.write_whole(tmp_path / name, b"one")
    files.check_place(tmp_path / name)
    files.write_whole(tmp_path / name, b"two")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"two")]


def test_what_a_killed_run_left_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the number of a process is that of the last run's: its half-written file has another name."""
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(os, "unlink", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(tmp_path / "saved", b"half")
    monkeypatch.undo()
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    files.write_whole(tmp_path / "saved", b"whole")
    assert (tmp_path / "saved").read_bytes() == b"whole"


def test_who_may_read_a_file_may_read_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody else; one that is write-protected is kept, though its folder would let us replace it."""
    place = tmp_path / "saved"
    place.touch(0o600)
    files.write_whole(place, b"private")
    assert place.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "access", lambda path, mode: path != place)  # root may write everywhere
    for write in (files.check_place, lambda path: files.write_whole(path, b"")):
        with pytest.raises(PermissionError, match="Permission denied"):
            write(place)
    assert place.read_bytes() == b"private"


STREAMS = {  # what becomes of standard output: exit status, and what is said of it
    ">&-": (MATCHED, ""),
    "2>&-": (MATCHED, ""),
    ">/dev/full": (FAILED, "refpar: standard output: No space left on device\n"),
    "2>/dev/full": (MATCHED, ""),
    "| :": (MATCHED, ""),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(
    ("typed", "left"),
    [
        (f"{QUICK} --json report", ["report"]),
        (f"{SMALL} --data text --save saved", ["saved"]),
        ("golden --format", []),
        ("schedule gpipe --trace trace", ["trace"]),
        ("--help", []),
    ],
)
def test_nobody_need_listen(tmp_path: Path, stream: str, typed: str, left: list[str]) -> None:
    """Files are written and the exit status is the verdict, whether somebody reads what is printed or not."""
    (tmp_path / "text").write_text(TEXT)
    status, said = STREAMS[stream]
    command = f"{{ sleep 0.3; {shlex.quote(sys.executable)} -m refpar {typed}; }} {stream}; echo ${{PIPESTATUS[0]}} >&3"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(cli.__file__).parents[2]), *sys.path])}
    done = subprocess.run(
        ["bash", "-c", f"exec 3>status; {command}"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (int((tmp_path / "status").read_text()), done.stderr) == (status, said)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["status", "text", *left])


@pytest.mark.parametrize("stream", ["2>/dev/full", "2>&-"])
def test_bad_input_is_bad_input_where_nobody_is_told(stream: str) -> None:
    """An exit status of 1 would say that something differs."""
    command = f"{shlex.quote(sys.executable)} -m refpar verify --ranks 0 {stream}"
    assert subprocess.run(["bash", "-c", command], timeout=60, stdout=subprocess.DEVNULL).returncode == BAD_INPUT


@pytest.mark.parametrize("typed", ["memory --help", "golden --format", "golden --list"])
def test_letters_that_the_terminal_has_not(typed: str) -> None:
    """They are printed otherwise."""
    done = subprocess.run(
        [sys.executable, "-m", "refpar", *typed.split()], capture_output=True, timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (MATCHED, b"")
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("typed", "status"),
    [
        ("verify --data {tmp}/missing --json -", BAD_INPUT),
        ("compare {tmp} {tmp}/foreign.safetensors --json -", BAD_INPUT),
        ("memory --model gpt --json -", BAD_INPUT),
        (f"{QUICK} --json -", FAILED),
    ],
)
def test_json_says_what_went_wrong(
    typed: str, status: int, wrong: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that reads standard output gets JSON whatever happens: an error, and the exit status."""
    monkeypatch.setattr(verify, "package_text", lambda: (_ for _ in ()).throw(MemoryError("too much")))
    assert cli.main(typed.replace("{tmp}", str(wrong)).split()) == status
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told == {"schema": 1, "error": told["error"], "exit_status": status}
    assert err == f"refpar: {told['error']}\n"


def test_a_defect_is_told_from_bad_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With its traceback, and what to do with it."""
    monkeypatch.setattr(verify, "package_text", lambda: 1 // 0)
    assert cli.main(QUICK.split()) == FAILED
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback")
    assert said[-1] == "refpar: this is a defect of refpar: please report it with the lines above"


class Terminal(io.StringIO):
    """What is printed to it is looked at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", ["20", "80"])
@pytest.mark.parametrize(
    "typed",
    [
        "verify --only ring,dp --ranks 2 --steps 1",
        "memory --model gpt2-xl --gpus 8 --device-memory 16GB --lines --zero 1",
        "plan --model gpt2-xl --gpus 8 --device-memory 80GB",
    ],
)
def test_nothing_of_a_table_is_cut_off(typed: str, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal that is too narrow it goes beyond the edge: all its words are there, the verdict of a row too."""
    words = []
    for width in ("400", columns):
        monkeypatch.setattr(sys, "stdout", out := Terminal())
        monkeypatch.setenv("COLUMNS", width)
        monkeypatch.setenv("NO_COLOR", "1")
        cli.main(typed.split())
        words.append(sorted(re.sub(r"\x1b\[\d*m", "", out.getvalue()).split()))
    assert words[0] == words[1]


@contextlib.contextmanager
def at_once(*commands: str, cwd: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start several runs together, and wait for all."""
    path = os.pathsep.join([str(Path(cli.__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "refpar", *command.split()],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for command in commands
    ]
    try:
        yield running
    finally:
        for process in running:
            process.communicate(timeout=120)


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """What they write is whole: one of both, never a mixture; and a golden is written by one of them."""
    (tmp_path / "text").write_text(TEXT)
    train = f"{SMALL} --data text --save saved"
    with at_once(train, train, f"{QUICK} --json report", f"{QUICK} --json report", cwd=tmp_path) as running:
        pass
    assert [process.returncode for process in running] == [MATCHED] * 4
    assert state.load(tmp_path / "saved").step == 2
    assert json.loads((tmp_path / "report").read_text())["passed"]
    with at_once(*["golden integers -o golden"] * 2, cwd=tmp_path) as running:
        pass
    assert sorted(process.returncode for process in running) == [MATCHED, BAD_INPUT]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["golden", "report", "saved", "text"]


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """A file that was there is kept when the one that should take its place cannot be written to its end."""
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "saved").write_text("of yesterday")
    large = "--width 240 --rows 1"  # some 10 MB to save; shared memory of one rank takes 2
    command = [sys.executable, "-m", "refpar", *f"{SMALL} {large} --data text --save saved".split()]
    path = os.pathsep.join([str(Path(cli.__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20)),
    )
    assert done.returncode == BAD_INPUT, done.stderr
    assert done.stderr.splitlines() == ["refpar: --save saved: File too large"]
    assert (tmp_path / "saved").read_text() == "of yesterday"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "text"]


VERBS = [name for action in cli.parser()._actions if action.choices for name in action.choices]


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_there_at_once(verb: str) -> None:
    """It takes at most 0.4 s of a processor, and says what each option is for within the width of a terminal."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "refpar", *verb.split(), "--help"], capture_output=True, text=True, timeout=60
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if times[-1] <= 0.4:
            break
    assert done.returncode == 0
    assert min(times) <= 0.4
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert done.stdout.startswith(f"usage: refpar {verb}".rstrip())
