"""MPI's ranks do what processes do, bit for bit, and end together when something is wrong.

The tests start ``mpiexec`` themselves, the one that lies beside this Python if there is one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import on_mpi
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from refpar import state
from refpar.arrays import Unavailable
from refpar.cli import BAD_INPUT, FAILED, INTERRUPTED, MATCHED, MISMATCH
from refpar.comm import World, mpi
from refpar.comm.ledger import Ledger, Sent
from refpar.comm.pack import pack, unpack

HERE = Path(__file__).parent
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
MISSING = next(
    (
        f"{what} is not installed (pip install 'refpar[mpi]' brings it)"
        for what, there in (("mpi4py", importlib.util.find_spec("mpi4py")), ("mpiexec", MPIEXEC))
        if not there
    ),
    None,
)


def needs_mpi(test: Any) -> Any:
    return pytest.mark.mpi(pytest.mark.skipif(MISSING is not None, reason=str(MISSING))(test))


def mpiexec(
    ranks: int, *arguments: str, runner: tuple[str, ...] = ("-m", "mpi4py"), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m mpi4py ARGUMENTS`` on so many ranks."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [str(MPIEXEC), "-n", str(ranks), sys.executable, *runner, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": path, **env},
    )


def same(one: Any, other: Any, where: str = "") -> None:
    """Assert that two results are equal in every bit and every type."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, (x, y) in enumerate(zip(one, other, strict=True)):
            same(x, y, f"{where}/{i}")
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            same(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}")
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), where
    else:
        assert one == other or (one != one and other != other), where


# As on processes


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_same_bits_as_processes(worlds: Callable[[int], World], tmp_path: Path, ranks: int) -> None:
    """Collectives, large messages in both directions at once, whole training runs and their ledgers; no pickling."""
    done = mpiexec(ranks, "on_mpi.py", "everything", str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    theirs = unpack(np.fromfile(tmp_path / "results", np.uint8))
    same(theirs, on_mpi.everything(worlds, ranks))


@needs_mpi
def test_verify(tmp_path: Path) -> None:
    """``refpar verify`` on 4 ranks says what it says on processes, once, and writes one report."""
    (tmp_path / "text").write_bytes(bytes(range(256)))
    arguments = ["verify", "--only", "ring,dp", "--ranks", "2,4", "--steps", "1", "--data", str(tmp_path / "text")]
    arguments.append("--json")
    done = mpiexec(4, "-m", "refpar", *arguments, str(tmp_path / "mpi"), "--transport", "mpi")
    assert done.returncode == MATCHED, done.stderr
    assert done.stdout.splitlines()[-1] == "refpar verify: all 4 rows match one device"
    assert done.stderr == ""
    local = subprocess.run(
        [sys.executable, "-m", "refpar", *arguments, str(tmp_path / "processes")], capture_output=True, text=True
    )
    assert done.stdout == local.stdout
    reports = [json.loads((tmp_path / name).read_text()) for name in ("mpi", "processes")]
    for report in reports:
        for row in report["results"]:
            assert len(set(row.pop("pids"))) == row["ranks"]
            del row["seconds"]
    assert reports[0] == reports[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mpi", "processes", "text"]


@needs_mpi
def test_verify_runs_what_there_are_ranks_for() -> None:
    """Where no numbers are asked for, each technique runs on those of its usual ones that there are."""
    done = mpiexec(2, "-m", "refpar", "verify", "--only", "ring,dp", "--steps", "1", "--transport", "mpi", runner=())
    assert done.returncode == MATCHED, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:-1]] == [["ring", "2"], ["dp", "1"], ["dp", "2"]]


@needs_mpi
def test_train(tmp_path: Path) -> None:
    """``refpar train`` saves what it saves on processes, once; and resumes it in another layout."""
    (tmp_path / "text").write_bytes(bytes(range(256)))
    small = ["train", "--data", str(tmp_path / "text"), "--precision", "fp16", "--layers", "1", "--width", "12"]
    small += ["--heads", "3", "--context", "8", "--rows", "6"]
    layout = ["--dp", "2", "--tp", "2", "--zero", "1", "--steps", "3", "--save"]
    done = mpiexec(4, "-m", "refpar", *small, *layout, str(tmp_path / "mpi"), "--transport", "mpi")
    assert (done.returncode, done.stderr) == (MATCHED, "")
    local = [sys.executable, "-m", "refpar", *small, *layout, str(tmp_path / "processes")]
    subprocess.run(local, check=True, capture_output=True)
    same(state.load(tmp_path / "mpi"), state.load(tmp_path / "processes"))
    other = ["--pp", "2", "--steps", "4", "--resume", str(tmp_path / "mpi"), "--transport", "mpi"]
    done = mpiexec(2, "-m", "refpar", *small, *other)
    assert done.returncode == MATCHED, done.stderr
    assert done.stdout.splitlines()[-1].endswith("done after step 4 of 4 in dp=1,pp=2")
    done = mpiexec(2, "-m", "refpar", *small, "--dp", "3", "--transport", "mpi")
    assert done.returncode == BAD_INPUT
    assert "3 ranks were asked for; MPI has started 2" in done.stderr


SABOTAGED = """
import sys
from refpar import cli, single
original = single.train
def drifted(*args, **options):
    trace = original(*args, **options)
    trace.steps[-1].gradients["head.norm.bias"][0] += 1e-3
    return trace
single.train = drifted
sys.exit(cli.main(["verify", "--only", "dp", "--steps", "1", "--transport", "mpi"]))
"""


@needs_mpi
def test_a_mismatch_is_status_1() -> None:
    """One report of it, and the status of ``mpiexec``."""
    done = mpiexec(2, "-c", SABOTAGED)
    assert done.returncode == MISMATCH, done.stderr
    assert done.stdout.splitlines()[-1] == "refpar verify: 2 of 2 rows differ from one device"
    assert (done.stdout.count("verify:"), done.stderr) == (1, "")


# When something is wrong


WRONG = {
    "raises": (FAILED, "refpar: rank 1 raised ValueError: boom", 'raise ValueError("boom")'),
    "exits": (FAILED, "refpar: rank 1 raised SystemExit: 5", "sys.exit(5)"),
    "another_collective": (FAILED, "rank 1 is in broadcast #1 of float32 (3,)", "rank 0 sent it all_reduce #1"),
    "another_shape": (FAILED, "all_reduce #1 of float32 (3,)", "all_reduce #1 of float32 (4,)"),
    "waits_for_who_is_done": (FAILED, "rank 0 is in send of float64 (3,)", "rank 1 sent it the end of run 1"),
    "sends_for_nobody": (FAILED, "rank 1 is in the end of run 1", "rank 0 sent it send of float64 (3,)"),
    "stalls": (
        FAILED,
        "refpar: rank 0 waited 1 s for rank 1 in barrier #1 of uint8 (0,) in world; ",
        "MPI does not say what rank 1 does: it may be waiting for another itself",
    ),
    "unsendable": (FAILED, "object cannot be sent between ranks without pickling it", ""),
    "starts_processes": (FAILED, "would start ranks of its own: use --transport mpi", ""),
    "interrupts": (INTERRUPTED, "", ""),
}


@needs_mpi
@pytest.mark.parametrize("what", WRONG)
def test_a_rank_that_fails_ends_all(what: str) -> None:
    """At once, with its traceback, and the status of a failed run."""
    status, *texts = WRONG[what]
    began = time.monotonic()
    done = mpiexec(2, "on_mpi.py", what)
    assert time.monotonic() - began < 15
    assert done.returncode == status, done.stderr
    assert all(text in done.stderr for text in texts), done.stderr
    assert "not reached" not in done.stdout
    assert ("Traceback" in done.stderr) == (status == FAILED)


BAD = {
    "more ranks than there are": (["--ranks", "8"], {}, "8 ranks were asked for; MPI has started 2"),
    "fewer ranks than there are": (["--ranks", "1"], {}, "1 ranks were asked for; MPI has started 2"),
    "a number that is none": (["--steps", "-1"], {}, "-1 must not be negative"),
    "a file that is not there": (["--data", "missing.txt"], {}, "missing.txt: No such file"),
    "no such backend": (["--backend", "cupi"], {}, "did you mean cupy?"),
    "processes in each": (["--transport", "processes"], {}, "2 of this program have been started together"),
}


@needs_mpi
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("runner", [(), ("-m", "mpi4py")], ids=["plain", "mpi4py"])
def test_bad_input_is_said_once(what: str, runner: tuple[str, ...]) -> None:
    """Exit status 2 and one line, whether or not mpi4py's runner is around; MPI may add that it was told to end."""
    arguments, env, words = BAD[what]
    done = mpiexec(2, "-m", "refpar", "verify", "--only", "dp", "--transport", "mpi", *arguments, runner=runner, **env)
    assert done.returncode == BAD_INPUT, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("Abort(2)")]
    assert len(said) == 1
    assert words in said[0]


@needs_mpi
@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["--ranks", "1"], {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "Open MPI has started 4"),
        (["--ranks", "4"], {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "srun has started 4"),
        ([], {}, "MPI has started 1 rank"),
        (["--ranks", "4"], {}, "4 ranks were asked for; MPI has started 1"),
    ],
)
def test_a_world_of_one_is_an_error(arguments: list[str], env: dict[str, str], words: str) -> None:
    """A launcher of another MPI starts programs each of which is alone; so is one that nobody has launched."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "refpar", "verify", "--only", "dp", "--transport", "mpi", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )
    assert done.returncode == BAD_INPUT, done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "4", np.float64(2)])
def test_ranks_are_checked_as_for_processes(ranks: Any) -> None:
    """Before MPI is looked for."""
    for world in (World, mpi.MpiWorld):
        with pytest.raises(ValueError, match=r"ranks is .*: it must be a whole number (of at least|from) 1"):
            world(ranks)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_the_limit_is_checked_as_for_processes(timeout: Any) -> None:
    for world in (World, mpi.MpiWorld):
        with pytest.raises(ValueError, match=r"timeout is .*; it must be a positive number of seconds"):
            world(2, timeout=timeout)


ASKED = """
import numpy as np
from refpar.comm.mpi import MpiWorld
from refpar.arrays import Unavailable
for ranks, results in ((np.int64(1), [1]), (np.uint8(2), [2, 2]), (None, [2, 2])):
    world = MpiWorld(ranks, timeout=np.float32(20))
    assert type(world.ranks) is int
    assert world.run(lambda comm: comm.size) == results
try:
    MpiWorld(3)
except Unavailable as error:
    assert str(error) == "ranks is 3; MPI has started 2: mpiexec -n says how many"
else:
    raise AssertionError("there are not 3")
"""


@needs_mpi
def test_any_integer_is_a_number_of_ranks() -> None:
    """NumPy's too, as on processes; more than there are is said."""
    done = mpiexec(2, "-c", ASKED)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_of_several_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has started this program several times did not mean each of them to start ranks."""
    for size, rank, _ in mpi.LAUNCHERS:
        with monkeypatch.context() as patch:
            patch.setenv(size, "3")
            patch.setenv(rank, "2")
            assert mpi.launched()[:2] == (3, 2)
            with pytest.raises(Unavailable, match="3 of this program"):
                World(2)
            patch.setenv(size, "1")
            assert mpi.launched() is None
            World(2).close()


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py is installed")
def test_without_mpi() -> None:
    """One line that says how to get it."""
    done = subprocess.run(
        [sys.executable, "-m", "refpar", "verify", "--transport", "mpi"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == BAD_INPUT
    assert "pip install 'refpar[mpi]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# Results in bytes


@dataclass(frozen=True)
class Point:
    x: Any
    y: Any


ARRAYS = hnp.arrays(
    st.sampled_from(["bool", "int8", "int64", "uint16", "float16", "float32", "float64"]), hnp.array_shapes(min_dims=0)
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | ARRAYS | ARRAYS.map(lambda x: x.T)
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.text())
VALUES = st.recursive(
    LEAVES | ARRAYS.filter(lambda x: x.size).map(lambda x: x.reshape(-1)[0]),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.builds(Point, inner, inner)
    ),
    max_leaves=10,
)


@settings(max_examples=100)
@given(VALUES)
def test_pack_and_unpack(value: Any) -> None:
    """Every value comes back as it was: types, shapes, bits, order; arrays in C order, NaN and surrogates included."""
    data = pack(value)
    assert (data.dtype, data.size % 8) == (np.uint8, 0)
    same(unpack(data), value)


def test_unpacked_arrays_are_ones_own() -> None:
    """They can be written to, and the buffer they came in does not change."""
    data = pack([np.arange(3)])
    [x] = unpack(data)
    x[:] = 7
    assert unpack(data)[0].tolist() == [0, 1, 2]


def test_pack_refuses() -> None:
    """What is not known by its parts is not sent; and a class is not imported for having been named."""
    for value in (object(), {1, 2}, lambda: 0, Point, np.array([None]), Ledger):
        with pytest.raises(TypeError, match="without pickling"):
            pack([value])
    data = pack(Sent(1, 2, 3)).tobytes()
    assert unpack(np.frombuffer(data, np.uint8)) == Sent(1, 2, 3)
    for wrong in (b"refpar.comm.ledgeR", b"os"):
        with pytest.raises((TypeError, AttributeError)):
            unpack(np.frombuffer(data.replace(b"refpar.comm.ledger", wrong.ljust(18)), np.uint8))
