"""On a GPU: ``pytest -m gpu``. Skipped where there is none; ``test_backend.py`` has the proof that needs none.

Everything on the device runs in ranks, which are spawned: this process never imports cupy.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator

import numpy as np
import on_backend
import pytest
from test_strict import CASES, LAYOUTS, same_dict

from refpar import single
from refpar.case import Layout
from refpar.comm import World, ring
from refpar.oracle import cases
from refpar.oracle.bounds import spread
from refpar.oracle.compare import compare
from refpar.parallel import hybrid
from refpar.precision import Precision


def missing() -> str:
    """Return what is missing, empty where nothing is."""
    if importlib.util.find_spec("cupy") is None:
        return "the package cupy is not installed: pip install 'refpar[cuda12]' or 'refpar[cuda13]'"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver on this machine"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Callable[[int], World]]:
    """Give out standing worlds on cupy; several ranks share a GPU where there are fewer of those."""
    standing: dict[int, World] = {}

    def get(ranks: int) -> World:
        if ranks not in standing:
            standing[ranks] = World(ranks, backend="cupy")
        return standing[ranks]

    yield get
    for world in standing.values():
        world.close()


def test_expressions(gpus: Callable[[int], World]) -> None:
    """CuPy does what the stand-in takes it to do."""
    [wrong] = gpus(1).run(on_backend.outcomes)
    assert wrong == {}


@pytest.mark.parametrize("dtype", ring.DTYPES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ring(gpus: Callable[[int], World], ranks: int, dtype: str) -> None:
    """Every collective gives NumPy's bits."""
    for shape in [(), (0,), (3, 4)]:
        for device, host in gpus(ranks).run(on_backend.both, dtype, shape):
            same_dict(device, host)


def test_nothing_is_lost_or_mixed_up(gpus: Callable[[int], World]) -> None:
    """Slots are given away, and results sent, when the device is done with them."""
    assert gpus(3).run(on_backend.race, 30, 2**20) == [[], [], []]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_techniques(gpus: Callable[[int], World], layout: str) -> None:
    """Each matches one device on NumPy in float64, within what that device's own roundings do to it."""
    case, split = dataclasses.replace(CASES["float16 gpt"], precision=Precision()), Layout.parse(layout)
    truth = single.train(case)
    verdict = compare(hybrid.run(case, split, world=gpus(split.ranks)), truth, bounds=spread(truth))
    assert verdict.first is None, verdict.first


@pytest.mark.parametrize("name", ["integers-zero", "overflow"])
def test_exact_cases(gpus: Callable[[int], World], name: str) -> None:
    """Where no operation rounds, or the half that it rounds to is the same anywhere, so is every bit."""
    named = cases.CASES[name]
    case = named.make("float16")
    with np.errstate(over="ignore", invalid="ignore"):
        truth = single.train(case)
    verdict = compare(hybrid.run(case, named.layout, world=gpus(named.layout.ranks)), truth)
    assert verdict.first is None, verdict.first
