"""The flag that says which library the ranks compute with: CuPy where there is a GPU, NumPy by default.

No GPU is needed. ``pretending/cupy`` is a package of that name made of the strict stand-in, with GPUs to count.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import expressions
import numpy as np
import on_backend
import pytest
import strictpy
import test_gpu
from test_strict import CASES, flat, needs_cupy, same_dict

from refpar.arrays import Unavailable, chosen_backend
from refpar.case import Case, Layout
from refpar.cli import BAD_INPUT, MATCHED
from refpar.comm import World
from refpar.parallel import hybrid

pytestmark = pytest.mark.strict

HERE = Path(__file__).parent


def refpar(*arguments: str, pretending: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m refpar ARGUMENTS``, with a package called cupy or without."""
    paths = [str(HERE / "pretending")] * pretending + [str(HERE), str(HERE.parent), *filter(None, sys.path)]
    code = (
        "import sys; from refpar import cli; status = cli.main(sys.argv[1:]); "
        "assert 'cupy' not in sys.modules, 'cupy was imported by the parent'; sys.exit(status)"
    )
    kept = {name: value for name, value in os.environ.items() if name != "REFPAR_BACKEND"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**kept, "PYTHONPATH": os.pathsep.join(paths), **env},
    )


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let this process find the package called cupy, and 2 GPUs in it."""
    monkeypatch.syspath_prepend(str(HERE / "pretending"))
    monkeypatch.setenv("PRETENDED_GPUS", "2")
    monkeypatch.delenv("REFPAR_BACKEND", raising=False)
    before = "cupy" in sys.modules
    yield monkeypatch
    assert ("cupy" in sys.modules) == before


# Which library


def test_the_argument_then_the_environment_then_numpy(pretended: pytest.MonkeyPatch) -> None:
    """In this order, each of them by name."""
    assert chosen_backend() == "numpy"
    pretended.setenv("REFPAR_BACKEND", "cupy")
    assert (chosen_backend(), chosen_backend("numpy"), chosen_backend("cupy")) == ("cupy", "numpy", "cupy")
    pretended.setenv("REFPAR_BACKEND", "")
    assert chosen_backend() == "numpy"


def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the one that was meant, and where the name came from."""
    with pytest.raises(ValueError, match=r"^backend 'cupi' is unknown: did you mean cupy\?$"):
        World(2, backend="cupi")
    monkeypatch.setenv("REFPAR_BACKEND", "torch")
    with pytest.raises(ValueError, match=r"^REFPAR_BACKEND 'torch' is unknown: known are numpy, cupy$"):
        World(2)


def test_ranks_are_spawned_and_share_the_gpus(pretended: pytest.MonkeyPatch) -> None:
    """Rank r gets GPU ``r % count``; nobody forks; who starts them does not import the library."""
    with World(3, backend="cupy") as world:
        told = world.run(on_backend.where)
    assert [rank["device"] for rank in told] == [0, 1, 0]
    assert {rank["spawned"] for rank in told} == {os.getpid()}
    assert {rank["xp"] for rank in told} == {rank["in parts of the world"] for rank in told} == {"cupy"}
    with pytest.raises(ValueError, match="must be spawned"):
        World(2, backend="cupy", start_method="forkserver")


def test_ranks_on_numpy_know_it(worlds: Callable[[int], World]) -> None:
    """``comm.xp`` is there on every backend."""
    assert {rank["xp"] for rank in worlds(2).run(on_backend.where)} == {"numpy"}
    assert not any(rank["spawned"] for rank in worlds(2).run(on_backend.where))


def test_results_come_home_as_host_arrays(pretended: pytest.MonkeyPatch) -> None:
    """Who reads them needs neither a device nor the library."""
    with World(2, backend="cupy") as world:
        for rank, (x, rest) in enumerate(world.run(on_backend.results)):
            total, transposed = rest["nested"]
            assert {type(x), type(total), type(transposed)} == {np.ndarray}
            np.testing.assert_array_equal(x, [rank, rank + 1, rank + 2])
            assert float(total) == 3 + 3 * rank


# Not there


MISSING = "pip install 'refpar[cuda12]' or 'refpar[cuda13]'"


def test_a_missing_package_is_said_before_anything_starts() -> None:
    """Exit status 2, and one line that says how to install it; NumPy does not stand in for it."""
    if importlib.util.find_spec("cupy"):
        pytest.skip("cupy is installed")
    for arguments, env in ((["--backend", "cupy"], {}), ([], {"REFPAR_BACKEND": "cupy"})):
        done = refpar("verify", "--only", "dp", *arguments, pretending=False, **env)
        assert done.returncode == BAD_INPUT
        assert len(done.stderr.splitlines()) == 1
        assert "the package cupy is not installed" in done.stderr
        assert MISSING in done.stderr
        assert done.stdout == ""
    with pytest.raises(Unavailable, match="not installed"):
        World(2, backend="cupy")


def test_a_missing_gpu_is_said_by_the_ranks() -> None:
    """Exit status 2, and one line with what the library says."""
    done = refpar("verify", "--only", "ring", "--backend", "cupy", "--ranks", "2")
    assert done.returncode == BAD_INPUT, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "no GPU can be used on this machine: RuntimeError: cudaErrorNoDevice" in done.stderr
    assert done.stdout == ""


@needs_cupy
@pytest.mark.skipif(not test_gpu.missing(), reason="there is a GPU")
def test_a_missing_gpu_is_said_by_the_package_itself() -> None:
    """As above, with the words of the real one."""
    done = refpar("verify", "--only", "ring", "--backend", "cupy", "--ranks", "2", pretending=False)
    assert done.returncode == BAD_INPUT, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "no GPU can be used on this machine: CUDARuntimeError: cudaError" in done.stderr


# There


def test_three_ways_to_say_it(tmp_path: Path, pretended: pytest.MonkeyPatch) -> None:
    """The option, the variable and the argument give the same run, and the numbers of NumPy."""
    reports = []
    (tmp_path / "text").write_bytes(bytes(range(256)))
    for name, (options, env) in {
        "option": (["--backend", "cupy"], {}),
        "variable": ([], {"REFPAR_BACKEND": "cupy"}),
        "numpy": (["--backend", "numpy"], {"REFPAR_BACKEND": "cupy"}),
    }.items():
        file = str(tmp_path / name)
        done = refpar(
            *("verify", "--data", str(tmp_path / "text"), "--only", "ring", "--ranks", "2"),
            *("--json", file, *options),
            PRETENDED_GPUS="1",
            **env,
        )
        assert done.returncode == MATCHED, done.stderr
        reports.append(json.loads(Path(file).read_text()))
        for row in reports[-1]["results"]:
            del row["pids"], row["seconds"]
    assert reports[0] == reports[1] == reports[2]
    case = CASES["float64 mlp"]
    with World(2, backend="cupy") as world:
        trace = hybrid.run(case, Layout(dp=2), world=world)
    with World(2) as world:
        same_dict(flat(trace), flat(hybrid.run(case, Layout(dp=2), world=world)))


def test_a_slot_is_given_away_when_the_device_has_read_it(worlds: Callable[[int], World]) -> None:
    """Between every copy to the device, and the sender's getting the memory back, the host waits for the device."""
    for log in worlds(3).run(on_backend.events_of_transfers):
        assert log.count("copy from a slot") >= 2 * 5  # two steps of each ring at least
        assert "copy from the host" in log
        pending = False
        for event in log:
            assert not (pending and event == "give away"), log
            pending = event.startswith("copy") or (pending and event != "wait")


# What is expected of the package, tried on the stand-in


def test_expressions() -> None:
    """Every line of the table comes out on the stand-in as it is expected to come out on a GPU."""
    assert expressions.outcomes(strictpy) == {}


def test_expressions_can_be_wrong() -> None:
    """NumPy refuses what is wrong on any library, and nothing else; and it differs where CuPy is known to."""
    with np.errstate(all="ignore"):
        wrong = expressions.outcomes(np)
    anywhere = {"the truth of many", "the largest of none", "shapes that do not fit"}
    assert set(expressions.REFUSED) - set(wrong) == anywhere
    assert set(expressions.VALUES) & set(wrong) == {"a sum is an array", "an element is a view", "half ones, summed"}


def test_race(worlds: Callable[[int], World]) -> None:
    """The race that is run on a GPU is lost by nobody on the host."""
    assert worlds(2).run(on_backend.race, 2, 1000) == [[], []]


def test_the_check_for_a_gpu_runs() -> None:
    """``benchmarks/gpu_check.py`` prints a line a step, and its exit status says whether all passed."""
    script = str(HERE.parent / "benchmarks" / "gpu_check.py")
    paths = os.pathsep.join([str(HERE / "pretending"), *filter(None, sys.path)])
    for gpus, steps in (("1", "versions,expressions,refusal,ring"), ("0", "versions,refusal")):
        done = subprocess.run(
            [sys.executable, script, "--only", steps],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": paths, "PRETENDED_GPUS": gpus},
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        passed = [gpus == "1" or step == "refusal" for step in steps.split(",")]
        assert [line["step"] for line in lines] == [*steps.split(","), "all"], done.stderr
        assert [line["passed"] for line in lines] == [*passed, all(passed)], done.stdout
        assert done.returncode == (not all(passed))


# Every technique, on ranks as a GPU needs them


@pytest.fixture(scope="module")
def spawned() -> Iterator[Callable[[int], World]]:
    """Give out standing worlds of spawned ranks on the package called cupy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE / "pretending"))
        patch.setenv("PRETENDED_GPUS", "2")
        standing: dict[int, World] = {}

        def get(ranks: int) -> World:
            if ranks not in standing:
                standing[ranks] = World(ranks, backend="cupy")
            return standing[ranks]

        yield get
        for world in standing.values():
            world.close()


LAYOUTS = (
    *("dp=3,micro_batches=2", "dp=3,zero=1", "dp=3,zero=2", "dp=3,zero=3,recompute=block", "tp=3"),
    *("pp=3,micro_batches=3", "pp=3,schedule=gpipe,micro_batches=2", "dp=2,tp=2,zero=1,recompute=sqrt"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_techniques_on_spawned_ranks(
    worlds: Callable[[int], World], spawned: Callable[[int], World], layout: str
) -> None:
    """They send, hold and compute what they do on NumPy, in float16."""
    case: Case = CASES["float16 gpt"]
    split = Layout.parse(layout)
    one, other = (hybrid.run(case, split, world=get(split.ranks)) for get in (spawned, worlds))
    same_dict(flat(one), flat(other))
    assert (one.bytes_held, one.peak_bytes) == (other.bytes_held, other.peak_bytes)
    assert one.ledgers == other.ledgers
