"""The command line as a user meets it: real processes, exit statuses, one clear line for bad input."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from refpar.cli import BAD_INPUT, FAILED, INTERRUPTED, MATCHED, MISMATCH, TECHNIQUES
from refpar.oracle.verify import ring_input

REFPAR = [sys.executable, "-m", "refpar"]


def refpar(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*REFPAR, *arguments], capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What ``refpar verify`` says as JSON of two cheap techniques."""
    done = refpar("verify", "--only", "ring,dp", "--ranks", "1,3", "--steps", "2", "--json", "-")
    assert done.returncode == MATCHED, done.stderr
    assert "all 4 rows match one device" in done.stderr
    return json.loads(done.stdout, parse_constant=pytest.fail)


def test_json_says_what_was_run(report: dict[str, Any]) -> None:
    """Every field is there, by rank where it is by rank, and nothing in it is NaN or infinite."""
    assert (report["schema"], report["passed"], report["seed"]) == (1, True, 0)
    assert set(report["versions"]) >= {"refpar", "numpy", "python"}
    assert [(row["technique"], row["ranks"]) for row in report["results"]] == [
        ("ring", 1), ("ring", 3), ("dp", 1), ("dp", 3),
    ]  # fmt: skip
    for row in report["results"]:
        assert len(row["pids"]) == len(set(row["pids"])) == row["ranks"]
        assert os.getpid() not in row["pids"]
        assert row["max_error"] <= row["bound"]
        assert row["passed"] is True
        for field in (
            "bytes_sent",
            "bytes_expected",
            "elements",
            "itemsize",
            "steps",
            "tensors_compared",
            "bound_kind",
        ):
            assert row[field] is not None
        assert len(row["bytes_sent"]) == row["ranks"]
        assert row["bytes_sent"] == row["bytes_expected"]


def test_ring_sends_the_familiar_ratio(report: dict[str, Any]) -> None:
    """2(N-1)/N of the array from each of 3 ranks, and of the gradient over all of them."""
    ring, dp = (row for row in report["results"] if row["ranks"] == 3)
    array = ring["elements"] * ring["itemsize"]
    assert ring["elements"] == 240_000
    assert ring["bytes_sent"] == [array * 4 // 3] * 3
    assert sum(dp["bytes_sent"]) == 2 * 2 * dp["elements"] * dp["itemsize"] * dp["steps"]


def test_table_is_for_people() -> None:
    """Technique, error beside its bound, bytes beside the prediction, and a verdict in one last line."""
    done = refpar("verify", "--only", "ring", "--ranks", "4")
    assert done.returncode == MATCHED
    header, row, verdict = done.stdout.splitlines()
    assert header.split()[:2] == ["technique", "ranks"]
    assert "1,440,000 B = 1.500x" in row
    assert verdict == "refpar verify: all 1 rows match one device"


BAD = {
    "unknown technique": (["--only", "rign"], "did you mean ring?"),
    "technique that is like no other": (["--only", "ring,xyzzy"], "known are ring"),
    "no ranks": (["--ranks", "0"], "--ranks: 0 must be at least 1"),
    "too many ranks": (["--ranks", "10000"], "at most 512"),
    "ranks that are no number": (["--ranks", "2,many"], "'many' is no whole number"),
    "negative steps": (["--steps", "-1"], "-1 must not be negative"),
    "no steps": (["--steps", "0"], "0 must be at least 1"),
    "option that does not exist": (["--oops"], "unrecognized arguments: --oops"),
    "missing file": (["--data", "missing.txt"], "missing.txt: No such file"),
    "directory": (["--data", "."], "Is a directory"),
    "empty file": (["--data", os.devnull], "the text has 0 bytes"),
    "no end": (["--data", "/dev/zero"], "this is a device"),
    "report in a missing folder": (["--only", "ring", "--ranks", "1", "--json", "no/such/place.json"], "No such file"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_clear_line(what: str, tmp_path: Path) -> None:
    """Exit status 2, and one line that names the argument and what is wrong with it."""
    arguments, words = BAD[what]
    done = refpar("verify", *arguments, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == BAD_INPUT, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_any_file_is_text(tmp_path: Path) -> None:
    """Text is bytes: a binary file trains as well."""
    file = tmp_path / "noise.bin"
    file.write_bytes(bytes(range(256)) * 4)
    assert refpar("verify", "--only", "dp", "--ranks", "2", "--steps", "1", "--data", str(file)).returncode == MATCHED


SABOTAGED = """
import sys
from refpar import cli, single
from refpar.oracle import verify
original = single.train
def drifted(*args, **options):
    trace = original(*args, **options)
    trace.steps[-1].gradients["head.norm.bias"][0] += 1e-3
    return trace
verify.single.train = drifted
sys.exit(cli.main(["verify", "--only", "dp", "--ranks", "2", "--steps", "1"]))
"""


def test_mismatch_names_the_first_wrong_number() -> None:
    """Exit status 1, and the step, the tensor, the entry, both values, and how far apart they may be."""
    done = subprocess.run([sys.executable, "-c", SABOTAGED], capture_output=True, text=True, timeout=120)
    assert done.returncode == MISMATCH, done.stderr
    assert "WRONG" in done.stdout
    assert "step 0: gradient/head.norm.bias[0] is" in done.stdout
    assert done.stdout.splitlines()[-1] == "refpar verify: 1 of 1 rows differ from one device"


NOT_A_NUMBER = """
import sys
from refpar import cli
from refpar.oracle import verify
original = verify.all_reduce_once
def spoiled(comm, seed):
    result, sent = original(comm, seed)
    result[5] = float("nan")
    return result, sent
verify.all_reduce_once = spoiled
sys.exit(cli.main(["verify", "--only", "ring", "--ranks", "2"]))
"""


def test_a_number_that_is_none_is_wrong() -> None:
    """NaN is larger than nothing, and equal to nothing: a maximum of errors would let it pass."""
    done = subprocess.run([sys.executable, "-c", NOT_A_NUMBER], capture_output=True, text=True, timeout=120)
    assert done.returncode == MISMATCH, done.stderr
    assert "element 5 on rank 0 is nan" in done.stdout


DRIFTING = """
import sys
from refpar import cli
from refpar.oracle import mistakes, verify
from refpar.parallel import hybrid
def drifting(comm, case, layout, start):
    from refpar.oracle import mistakes
    from refpar.parallel import hybrid
    with mistakes.applied("gradients_not_reduced"):
        return hybrid.train(comm, case, layout, start)
right = hybrid.train
hybrid.train = drifting
sys.exit(cli.main(["verify", "--only", "dp", "--ranks", "2,1", "--steps", "1", "--json", "-"]))
"""


def test_drifting_replicas_are_a_mismatch() -> None:
    """What ranks find out by themselves is a verdict like any other: exit status 1, a row, and the rows after it."""
    done = subprocess.run([sys.executable, "-c", DRIFTING], capture_output=True, text=True, timeout=120)
    assert done.returncode == MISMATCH, done.stderr
    drifted, alone = json.loads(done.stdout)["results"]
    assert "replicas have drifted apart" in drifted["detail"]
    assert (drifted["passed"], alone["passed"]) == (False, True)


@pytest.mark.parametrize(
    ("arguments", "out", "status", "words"),
    [
        (["--only", "ring,tp", "--ranks", "7"], os.devnull, BAD_INPUT, "tp is 7: blocks.0 has 5 heads"),
        (["--only", "ring", "--ranks", "1"], "/dev/full", FAILED, "No space left on device"),
    ],
)
def test_nothing_is_left_out_without_a_word(arguments: list[str], out: str, status: int, words: str) -> None:
    """A technique that was asked for and cannot run, and a table that could not be printed, are no success."""
    with open(out, "w") as file:
        done = subprocess.run(
            [*REFPAR, "verify", *arguments], stdout=file, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == status
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("seed", [0, 2**24, 10**40])
@pytest.mark.parametrize("ranks", [1, 3, 64, 512])
def test_ring_row_is_exact(ranks: int, seed: int) -> None:
    """Inputs differ between ranks, and their sums over all ranks are integers that float32 holds."""
    inputs = [ring_input(rank, ranks, seed) for rank in range(ranks)]
    assert sum(float(x.max()) for x in inputs) < 2**24
    assert all(a.max() < b.min() for a, b in itertools.pairwise(inputs))
    assert len(set(inputs[0].tolist())) == min(240_000, 2**24 // (ranks * (ranks + 1) // 2))


DYING = """
import os, signal, sys
from refpar import cli
from refpar.oracle import verify
def dying(comm, seed):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return comm.barrier(), 0
verify.all_reduce_once = dying
if __name__ == "__main__":
    sys.exit(cli.main(["verify", "--only", "ring", "--ranks", "3"]))
"""


def test_ranks_that_are_asked_for_are_run() -> None:
    """No others, and each of them alike, whatever else is asked for."""
    done = refpar("verify", "--only", "checkpoint,fp16", "--ranks", "3,2", "--steps", "1", "--json", "-")
    rows = [(row["ranks"], row["layout"]) for row in json.loads(done.stdout)["results"]]
    assert rows == [
        (3, "dp=3,zero=3,micro_batches=2,recompute=block"), (2, "dp=2,zero=3,micro_batches=2,recompute=block"),
        (3, "dp=3,zero=2"), (2, "dp=2,zero=2"), (3, "dp=3,zero=3,micro_batches=2"), (2, "dp=2,zero=3,micro_batches=2"),
    ]  # fmt: skip


def test_dead_rank_is_a_failed_run() -> None:
    """Exit status 3, and the rank and the signal."""
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=120)
    assert done.returncode == FAILED
    assert "rank 1" in done.stderr
    assert "SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr


ANNOUNCED = """
import sys
from refpar import cli
from refpar.comm import processes
class Pool(processes.Pool):
    def __init__(self, *args):
        print("ranks start", file=sys.stderr, flush=True)
        super().__init__(*args)
processes.Pool = Pool
sys.exit(cli.main(["verify", "--only", "ring,dp", "--steps", "1000", "--ranks", "2"]))
"""


def in_session(session: int) -> list[int]:
    """Return the numbers of the processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            found += [int(entry.name)] if its_session == str(session) and state not in "ZX" else []
    return found


@pytest.mark.parametrize("seconds", [0, 0.1, 0.4, 1.5])
def test_ctrl_c_ends_it(seconds: float) -> None:
    """Exit status 130, one line, and no rank is left.

    A terminal signals all processes at once; here some time after the first rank is asked for, while the process
    that ranks are forked from imports NumPy, or they start, or compute.
    """
    command = [sys.executable, "-c", ANNOUNCED]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert running.stderr is not None
        assert running.stderr.readline() == "ranks start\n"
        time.sleep(seconds)
        os.killpg(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=60)
        assert running.returncode == INTERRUPTED, errors
        assert errors.strip() == "refpar: interrupted"
        limit = time.monotonic() + 10
        while in_session(running.pid) and time.monotonic() < limit:
            time.sleep(0.02)
        assert not in_session(running.pid)
    finally:
        running.kill()


def test_help_names_every_technique() -> None:
    """And starts quickly enough to be asked for help often: nothing heavy is imported for it."""
    done = refpar("verify", "--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in TECHNIQUES)
    heavy = "import sys, refpar.cli; refpar.cli.parser(); sys.exit(any(m in sys.modules for m in ('numpy', 'rich')))"
    assert subprocess.run([sys.executable, "-c", heavy]).returncode == 0


def test_import_is_light() -> None:
    """``import refpar`` takes at most 1.5 times as long as ``import numpy``: it does not import that much."""
    code = "import sys, numpy; before = len(sys.modules); import refpar; sys.exit(len(sys.modules) - before > 3)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
