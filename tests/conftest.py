"""Fixtures that all tests share."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from refpar.comm import World

# An example takes as long as the machine is busy: that is no defect of what it tests.
settings.register_profile("refpar", deadline=None)
settings.load_profile("refpar")


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int], World]]:
    """Give out standing worlds: ``worlds(4)`` is the one of 4 ranks, started when first used.

    Ranks are worth keeping: a call on them costs less than a millisecond, their start a hundred
    times that. Functions that tests run on them are imported there by name, from the test's module.
    """
    standing: dict[int, World] = {}

    def get(ranks: int) -> World:
        if ranks not in standing:
            standing[ranks] = World(ranks)
        return standing[ranks]

    yield get
    for world in standing.values():
        world.close()
