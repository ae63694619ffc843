"""Ranks as processes: what they are given and give back; that nothing hangs and nothing is left, whatever happens."""

import contextlib
import ctypes
import functools
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import on_mpi
import pytest
from truth import hold

from refpar.case import Layout
from refpar.comm import CollectiveMismatch, CommTimeout, Communicator, RankError, World, processes, ring
from refpar.comm.mailbox import Chain
from refpar.comm.pool import limit_waits
from refpar.comm.region import WAITING, Status

SOON = 5.0
"""Seconds within which an error is there that waits for no limit. It takes about 0.02; the rest is a busy machine."""


@pytest.fixture
def world(worlds: Callable[[int], World]) -> World:
    return worlds(4)


def all_right(world: World) -> bool:
    """Say whether the world works: the sum of 1, 2, 3, 4 is 10 everywhere."""
    results = world.run(lambda comm: ring.all_reduce(comm, np.array([comm.rank + 1.0])).tolist())
    return bool(results == [[world.ranks * (world.ranks + 1) / 2]] * world.ranks)


def failure(world: World, fn: Callable[..., Any], kind: type[RankError], *args: Any) -> RankError:
    """Return the error that a run ends with, at once, and leaves the world in order."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        world.run(fn, *args)
    assert time.monotonic() - began < SOON
    assert type(caught.value) is kind
    assert all_right(world)
    return caught.value


def stat(pid: int) -> list[str]:
    """Return state, parent, process group, ... of a process; of one that is gone that it is dead, "X"."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0", "0"]


def alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    return stat(pid)[0] not in "ZX"


def all_gone(pids: list[int], within: float = 5.0) -> bool:
    limit = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.01)
    return not any(map(alive, pids))


def named_segments(pid: int) -> list[str]:
    """Return what a process has mapped from /dev/shm, where it might be left. (Others have their files there too.)"""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# What goes in and comes out


def test_results_come_by_rank(world: World) -> None:
    """Of a lambda, a closure, a partial function alike, with its arguments."""
    offset = 10
    assert world.run(lambda comm, factor: offset + factor * comm.rank, 3) == [10, 13, 16, 19]
    assert world.run(size_of_world) == [4, 4, 4, 4]
    assert world.run(functools.partial(scaled, by=2)) == [0, 2, 4, 6]


def size_of_world(comm: Communicator) -> int:
    return comm.size


def scaled(comm: Communicator, by: int) -> int:
    return by * comm.rank


def test_the_pool_stands(world: World) -> None:
    """The same processes, one a rank, serve every run."""
    pids = world.pids
    assert len(set(pids)) == 4
    assert world.run(lambda comm: os.getpid()) == pids == world.pids
    assert os.getpid() not in pids


def test_ranks_that_have_started_are_ready() -> None:
    """No wait for a rank includes its start: all are deaf to Ctrl-C already."""
    with World(4) as world:
        for pid in world.pids:
            ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
            assert ignored is not None
            assert int(ignored[1], 16) >> (signal.SIGINT - 1) & 1


def test_large_arguments_and_results(world: World) -> None:
    """Much larger than the pipes they go through."""
    big = np.arange(10**6)
    for rank, result in enumerate(world.run(lambda comm, x: x + comm.rank, big)):
        np.testing.assert_array_equal(result, big + rank)


def test_a_run_starts_with_a_clean_slate(world: World) -> None:
    """Ledger and numbering begin anew, whatever was run before."""
    ledgers = [world.run(lambda comm: (ring.all_reduce(comm, np.ones(4)), comm.ledger)[1]) for _ in range(2)]
    assert ledgers[0] == ledgers[1]
    assert [ledger.messages_sent for ledger in ledgers[0]] == [6] * 4


def test_ranks_see_the_environment_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is when they start, not as it was when the fork server did."""
    monkeypatch.setenv("REFPAR_TEST", "set late")
    with World(2) as world:
        assert world.run(lambda comm: os.environ["REFPAR_TEST"]) == ["set late"] * 2


def test_a_rank_has_one_blas_thread(world: World) -> None:
    """More of them, times the ranks, are six times slower on few processors."""

    def threads(comm: Communicator) -> int:
        from threadpoolctl import threadpool_info

        return max(pool["num_threads"] for pool in threadpool_info())

    assert world.run(threads) == [1] * 4


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc can be told to keep memory")
def test_a_rank_keeps_memory_that_it_frees(world: World) -> None:
    """Arrays of a megabyte, made and dropped again and again, do not have their pages fetched again and again."""

    def faults(comm: Communicator) -> int:
        import resource

        for turn in range(21):
            if turn == 1:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            arrays = [np.ones(2**18, np.float32) for _ in range(4)]
            del arrays
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert max(world.run(faults)) < 4 * 2**20 / os.sysconf("SC_PAGE_SIZE")  # one turn of 20


FLUSHING = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("0fae17c3"))  # ldmxcsr [rdi]; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
flags = ctypes.c_uint32(0x9FC0)  # the usual 0x1F80, and both flags that make subnormals 0
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.byref(flags))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets the flags by an instruction of x86-64")
def test_a_rank_that_flushes_subnormals_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As libraries built with -ffast-math do to the whole process that loads them (HypothesisWorks/hypothesis#3156)."""
    (tmp_path / "sitecustomize.py").write_text(FLUSHING)  # which Python runs when it starts
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with (
        World(1, start_method="spawn") as world,
        pytest.raises(RankError, match="a library in this process flushes subnormal numbers to zero"),
    ):
        world.run(size_of_world)


@pytest.mark.parametrize("layout", ["dp=4,bucket=50", "dp=2,zero=3,tp=2", "dp=2,pp=2,micro_batches=3"])
def test_no_order_depends_on_the_hash_seed(hashing: World, layout: str) -> None:
    """Ranks that went through a set of names would pair up gradients of different weights (NVIDIA/apex#18)."""
    for case in on_mpi.CASES:
        hold(case, Layout.parse(layout), lambda _: hashing)


@pytest.fixture(scope="module")
def hashing() -> Iterator[World]:
    """Ranks with a hash seed of its own each, as processes have that nobody has forked from one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONHASHSEED", raising=False)
        with World(4, start_method="spawn") as world:
            assert len(set(world.run(lambda comm: hash("blocks.0.mlp.up.weight")))) == 4
            yield world


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "4", None, 513, 10**9])
def test_the_number_of_ranks_is_checked(ranks: Any) -> None:
    with pytest.raises(ValueError, match=r"ranks is .*: it must be a whole number from 1 to 512"):
        World(ranks)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_the_limit_is_checked(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout is"):
        World(2, timeout=timeout)


@pytest.mark.parametrize("method", ["fork", "frok", 3])
def test_the_start_method_is_checked(method: Any) -> None:
    """A fork of the caller itself would inherit locks that a thread of it holds."""
    with pytest.raises(ValueError, match=f"start_method is {method!r}; it must be one of forkserver, spawn"):
        World(2, start_method=method)


def test_what_cannot_be_sent_is_named(world: World) -> None:
    """Before any rank hears of it."""
    with pytest.raises(TypeError, match=r"argument 2 of World.run, <generator .*, cannot be sent to the ranks"):
        world.run(lambda comm, *args: None, 1, (i for i in range(3)))
    with pytest.raises(TypeError, match="a World cannot be sent to its ranks"):
        world.run(lambda comm, other: None, world)
    assert all_right(world)


def test_a_result_that_cannot_be_sent_is_an_error(world: World) -> None:
    def fn(comm: Communicator) -> Any:
        return (i for i in range(3)) if comm.rank == 2 else 0

    error = failure(world, fn, RankError)
    assert "rank 2 raised TypeError: the result, generator, cannot be sent" in str(error)


def test_a_communicator_does_not_leave_its_rank(world: World) -> None:
    assert "belongs to one rank" in str(failure(world, lambda comm: comm, RankError))


def test_a_closed_world_says_so() -> None:
    world = World(1)
    world.close()
    with pytest.raises(RuntimeError, match="this World is closed"):
        world.run(size_of_world)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("moment", ["while the second rank starts", "when all have started"])
def test_a_signal_handler_may_close_a_world_that_starts(
    monkeypatch: pytest.MonkeyPatch, method: str, moment: str
) -> None:
    """The call says so, and no rank waits for the garbage collector."""
    pids: list[int] = []

    class Pool(processes.Pool):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if moment == "when all have started":
                signal.raise_signal(signal.SIGUSR1)

        def _start(self, context: Any, starter: Any, rank: int, backend: str) -> None:
            if rank == 1 and moment == "while the second rank starts":
                signal.raise_signal(signal.SIGUSR1)
            super()._start(context, starter, rank, backend)
            pids.append(self.processes[-1].pid)

    monkeypatch.setattr(processes, "Pool", Pool)
    world = World(3, start_method=method)
    before = signal.signal(signal.SIGUSR1, lambda *_: world.close())
    try:
        with pytest.raises(RuntimeError, match="this World was closed while its ranks started"):
            world.run(size_of_world)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert pids
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="this World is closed"):
        world.run(size_of_world)


def test_a_world_inside_a_rank_is_refused(world: World) -> None:
    error = failure(world, lambda comm: World(2), RankError)
    assert "a rank cannot start ranks of its own" in str(error)


def test_two_worlds_run_at_once() -> None:
    """From two threads, without getting in each other's way."""
    results: dict[int, Any] = {}

    def work(ranks: int) -> None:
        with World(ranks) as world:
            results[ranks] = [world.run(lambda comm: float(ring.all_reduce(comm, np.ones(9))[8])) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(ranks,)) for ranks in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {2: [[2.0] * 2] * 20, 3: [[3.0] * 3] * 20}


def test_64_ranks_talk_to_each_other() -> None:
    """Every pair of them, and round the ring: 2 * 63 / 64 = 1.969 of the array, as the papers say."""

    def talk(comm: Communicator) -> tuple[bool, int]:
        everybody = ring.all_to_all(comm, np.arange(64.0) + 100 * comm.rank)
        ring.all_reduce(comm, np.arange(640.0))
        expected = comm.rank + 100 * np.arange(64.0)
        return bool((everybody == expected).all()), comm.ledger.total(operation="all_reduce").elements

    with World(64) as world:
        assert world.run(talk) == [(True, 1260)] * 64  # 1.96875 * 640


# What goes wrong on a rank


def test_an_exception_ends_the_run(world: World) -> None:
    """Rank 2 raises in mid-ring; its traceback arrives, and what each other was doing (pytorch/torchtitan#1790)."""

    def fn(comm: Communicator) -> None:
        ring.all_reduce(comm, np.ones(100))
        if comm.rank == 2:
            raise ZeroDivisionError("no such gradient")
        ring.all_reduce(comm, np.ones(100))

    error = failure(world, fn, RankError)
    assert error.rank == 2
    text = str(error)
    assert text.startswith("rank 2 raised ZeroDivisionError: no such gradient\n")
    assert 'raise ZeroDivisionError("no such gradient")' in text  # its line, in the traceback
    for other in (0, 1, 3):
        assert f"  rank {other}: " in text


def test_a_long_message_arrives_whole(world: World) -> None:
    """And blocks nobody on a full pipe (pytorch/pytorch#46754)."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 2:
            raise ValueError("x" * 10**6)
        comm.barrier()

    assert "x" * 10**6 in str(failure(world, fn, RankError))


def test_the_parent_watches_every_rank(world: World) -> None:
    """It does not wait for rank 0 while rank 1 is gone (pytorch/pytorch#13518)."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(1)  # until all have begun
            raise ValueError("before any collective")
        time.sleep(60)

    error = failure(world, fn, RankError)
    assert error.rank == 1
    assert "rank 0: computing, has not communicated" in str(error)


ENDS: list[tuple[Callable[[], None], str]] = [
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 2 was killed by SIGKILL"),
    (lambda: os.kill(os.getpid(), signal.SIGSEGV), "rank 2 was killed by SIGSEGV"),
    (lambda: os._exit(3), "rank 2 exited with status 3"),
    (lambda: os._exit(0), "rank 2 exited with status 0"),
]


@pytest.mark.parametrize(("end", "words"), [*ENDS, (lambda: sys.exit(5), "rank 2 raised SystemExit: 5")])
def test_the_end_of_a_rank_ends_the_run(world: World, end: Callable[[], None], words: str) -> None:
    """With its signal or status, and what the others were doing."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 2:
            end()
        ring.all_reduce(comm, np.ones(1000))

    error = failure(world, fn, RankError)
    assert error.rank == 2
    assert str(error).startswith(words)
    for other in (0, 1, 3):
        assert f"  rank {other}: " in str(error)


@pytest.mark.parametrize(("end", "words"), ENDS)
def test_a_rank_may_die_in_a_collective(world: World, end: Callable[[], None], words: str) -> None:
    """At any moment: a thread of its own ends it while it sends and receives."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 2:
            threading.Timer(0.02, end).start()
        while True:
            ring.all_reduce(comm, np.ones(1000))

    error = failure(world, fn, RankError)
    assert error.rank == 2
    assert str(error).startswith(words)


def test_a_rank_may_leave_a_child_behind(world: World) -> None:
    """It holds the rank's pipe open, and no end of file tells of the rank's end."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 2:
            if os.fork() == 0:
                time.sleep(3)
                os._exit(0)
            os._exit(7)
        comm.barrier()

    assert str(failure(world, fn, RankError)).startswith("rank 2 exited with status 7")


def test_a_rank_may_die_between_runs(world: World) -> None:
    """The next run says so, the one after it works."""
    os.kill(world.pids[2], signal.SIGKILL)
    assert all_gone([world.pids[2]])
    error = failure(world, lambda comm: 0, RankError)
    assert str(error).startswith("rank 2 was killed by SIGKILL")


# Ranks that do not agree


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda comm: ring.broadcast(comm, np.ones(4)), "broadcast #3 of float64 (4,) from 0 in world"),
        (lambda comm: ring.all_reduce(comm, np.ones(5)), "all_reduce #3 of float64 (5,), sum in float64 in world"),
        (lambda comm: ring.all_reduce(comm, np.ones((2, 2))), "of float64 (2, 2), sum"),
        (lambda comm: ring.all_reduce(comm, np.ones(4, np.float32)), "of float32 (4,), sum in float32"),
        (lambda comm: ring.all_reduce(comm, np.ones(4), "max"), "of float64 (4,), max"),
        (lambda comm: ring.reduce_scatter(comm, np.ones(4)), "reduce_scatter #3"),
        (lambda comm: comm.barrier(), "barrier #3"),
        (lambda comm: (comm.barrier(), comm.barrier()), "barrier #3"),
        (lambda comm: ring.all_reduce(comm.split(comm.rank), np.ones(4)), "all_gather #3"),
        (lambda comm: comm.recv(np.empty(4), 1), "send of float64 (4,)"),
    ],
)
def test_another_call_is_shown_beside_the_usual(world: World, odd: Callable[..., Any], words: str) -> None:
    """Instead of sums of what does not belong together, or a hang."""

    def fn(comm: Communicator) -> None:
        ring.all_reduce(comm, np.ones(4))
        comm.barrier()
        if comm.rank == 2:
            odd(comm)
        else:
            ring.all_reduce(comm, np.ones(4))

    error = failure(world, fn, CollectiveMismatch)
    assert words in str(error)
    assert "all_reduce #3 of float64 (4,), sum in float64 in world" in str(error)
    assert "rank 2" in str(error)


def test_counts_are_compared_too(world: World) -> None:
    def fn(comm: Communicator) -> None:
        ring.reduce_scatter(comm, np.ones(8), counts=[2, 2, 2, 2] if comm.rank != 2 else [1, 3, 2, 2])

    error = failure(world, fn, CollectiveMismatch)
    assert "by [2, 2, 2, 2]" in str(error)
    assert "by [1, 3, 2, 2]" in str(error)


@pytest.mark.parametrize(
    "sent", [np.full(4, 0.5, np.float16), np.full((2, 2), 0.5, np.float32), np.full(3, np.float32(0.5))]
)
def test_a_message_of_another_kind_is_not_received(world: World, sent: np.ndarray) -> None:
    """Halves put into a float32 array are noise, without any error (deepspeedai/DeepSpeed#3316)."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(sent, 1)
        elif comm.rank == 1:
            comm.recv(np.empty(4, np.float32), 0)

    error = failure(world, fn, CollectiveMismatch)
    assert "send of float32 (4,) in world" in str(error)
    assert f"send of {sent.dtype} {sent.shape} in world" in str(error)


def test_a_rank_that_has_returned_is_not_waited_for(world: World) -> None:
    def fn(comm: Communicator) -> None:
        if comm.rank != 2:
            ring.all_reduce(comm, np.ones(4))

    error = failure(world, fn, CollectiveMismatch)
    assert error.rank == 2
    assert "rank 3 waits for rank 2 in all_reduce #1" in str(error)
    assert "whose function has returned" in str(error)


def test_a_message_that_nobody_wants_is_an_error(world: World) -> None:
    """It would be taken for one of the next run, whether it fits into the mailbox or not."""
    for size in (1, 10**6):

        def fn(comm: Communicator, size: int = size) -> None:
            if comm.rank == 2:
                comm.send(np.ones(size), 1)

        error = failure(world, fn, CollectiveMismatch)
        assert error.rank in (1, 2)
        assert "rank 2" in str(error)
        assert "rank 1" in str(error)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_circle_of_waits_is_seen(world: World, length: int) -> None:
    """At once: every rank of a circle receives from the next before it sends."""

    def fn(comm: Communicator) -> None:
        if comm.rank < length:
            comm.recv(np.empty(1), (comm.rank + 1) % length)
            comm.send(np.empty(1), (comm.rank - 1) % length)

    error = failure(world, fn, CollectiveMismatch)
    assert "no rank can go on" in str(error)
    for rank in range(length):
        assert f"rank {rank}" in str(error)


def test_a_circle_that_is_none_is_waited_out(world: World) -> None:
    """Ranks that wait for each other's slow work for long are not accused: only nobody at work makes a circle."""

    def fn(comm: Communicator) -> bool:
        x = np.empty(1)
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        for turn in range(8):
            if turn % comm.size == comm.rank:
                time.sleep(0.1)
                comm.send(x, right)
                comm.recv(x, left)
            else:
                comm.recv(x, left)
                comm.send(x, right)
        return True

    assert world.run(fn) == [True] * 4


def test_a_look_that_began_before_proves_nothing() -> None:
    """A circle stands when each of it has begun, and ended, a look for messages while all others waited already."""

    def chain(*seen: tuple[int, int]) -> Chain:
        waits = [Status(changes, looks, 1, WAITING, 0, "") for changes, looks in seen]
        return Chain(list(enumerate(waits, start=1)))

    before = chain((5, 10), (6, 20))
    assert chain((5, 12), (6, 22)).unchanged_since(before)
    assert not chain((5, 12), (6, 21)).unchanged_since(before)  # that look may be older
    assert not chain((5, 12), (7, 22)).unchanged_since(before)  # has moved since
    assert not chain((5, 12)).unchanged_since(before)
    assert not before.unchanged_since(Chain())


# Limits


@pytest.mark.parametrize("stop", ["sleeps", "stopped"])
def test_a_wait_has_a_limit_and_says_for_whom(stop: str) -> None:
    """Rank 2 stalls; whoever gives up first points at it, along the chain of waits."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP) if stop == "stopped" else time.sleep(60)
        ring.all_reduce(comm, np.ones(4))

    with World(4, timeout=0.3) as world:
        error = failure(world, fn, CommTimeout)
        assert error.rank == 2
        assert "waited 0.3 s for rank" in str(error)
        assert "in all_reduce #1 of float64 (4,), sum in float64 in world" in str(error)
        assert "rank 2: computing, has not communicated" in str(error)


def test_the_caller_does_not_wait_for_a_stopped_rank() -> None:
    """That takes no call larger than what the pipe holds, or stops in the middle of its report."""
    with World(2, timeout=0.3) as world:
        os.kill(world.pids[1], signal.SIGSTOP)
        error = failure(world, lambda comm, x: None, CommTimeout, np.zeros(10**6))
        assert str(error).startswith("rank 1 did not take the call within 0.3 s")
        assert error.rank == 1
    ours, theirs = socket.socketpair()
    with ours, theirs:
        limit_waits(ours.fileno(), 0.05)
        with pytest.raises(BlockingIOError):
            os.read(ours.fileno(), 1)


def test_the_limit_is_for_one_wait(world: World) -> None:
    """Not for the run, nor for a rank that computes."""
    with World(2, timeout=0.3) as world:

        def fn(comm: Communicator) -> float:
            for _ in range(4):
                time.sleep(0.2)
                comm.barrier()
            time.sleep(0.2 if comm.rank else 0.5)  # nobody waits for the other here
            return 1.0

        assert world.run(fn) == [1.0, 1.0]


def test_no_limit_is_no_limit() -> None:
    """For debuggers."""
    with World(2, timeout=None) as world:
        world.run(lambda comm: (time.sleep(0.3 * comm.rank), comm.barrier()))


# What is left


def test_nothing_is_left_of_a_world() -> None:
    """No process, no descriptor, no shared memory, after an orderly end and after others.

    Nothing has a name that could be left, or unlinked under somebody's feet (python/cpython#104291).
    """
    with World(1) as first:
        first.pids  # noqa: B018 - starts the fork server, which stays
    files = open_files()
    pids = []

    def fn(comm: Communicator, what: int) -> None:
        if comm.rank == what:
            os.kill(os.getpid(), signal.SIGKILL)
        ring.all_reduce(comm, np.ones(1000))

    with World(3) as world:
        for what in range(5):
            pids += world.pids
            assert not any(map(named_segments, [os.getpid(), *world.pids]))
            if what < 3:
                with pytest.raises(RankError):
                    world.run(fn, what)
            else:
                world.run(fn, what)
    abandoned = World(2)
    pids += abandoned.pids
    del abandoned
    assert all_gone(pids)
    assert open_files() == files


def run_script(text: str, **options: Any) -> subprocess.Popen[str]:
    """Start Python on a script of its own, in a process group of its own."""
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", textwrap.dedent(text)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options
    )


@pytest.fixture
def script() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start scripts; end what is left of them."""
    running: list[subprocess.Popen[str]] = []

    def start(text: str) -> subprocess.Popen[str]:
        running.append(run_script(text))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def read_pids(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    return [int(word) for word in line.split()]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize(
    "busy",
    [
        "pass",
        "comm.recv(np.empty(1), (comm.rank + 1) % 3 if comm.rank else 0)",
        "[0 for _ in iter(int, 1)]",
        "[ring.all_reduce(comm, np.ones(10**5)) for _ in iter(int, 1)]",
    ],
)
def test_nothing_outlives_a_killed_parent(script: Any, busy: str, method: str) -> None:
    """Whatever the ranks were doing: idle, waiting, computing, sending."""
    process = script(
        f"""
        import numpy as np
        from refpar.comm import World, ring

        def fn(comm):
            {busy}

        world = World(3, start_method={method!r})
        world.run(lambda comm: None)
        print(*world.pids, flush=True)
        world.run(fn)
        __import__("time").sleep(60)
        """
    )
    pids = read_pids(process)
    time.sleep(0.03)
    assert not any(map(named_segments, [process.pid, *pids]))
    os.kill(process.pid, signal.SIGKILL)
    assert all_gone(pids)
    assert group_is_empty(process), "the fork server or a tracker has stayed"


def group_is_empty(process: subprocess.Popen[str]) -> bool:
    """Say whether, within a while, no process of the script's group is left."""
    process.wait()
    everything = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return all_gone([pid for pid in everything if stat(pid)[2] == str(process.pid)])


def test_ctrl_c_ends_the_ranks_and_the_world_works_again(script: Any) -> None:
    """The signal goes to all processes of the terminal; KeyboardInterrupt comes out of run, and nothing is printed."""
    process = script(
        """
        import time
        import numpy as np
        from refpar.comm import World, ring

        world = World(3)
        pids = world.pids
        world.run(lambda comm: None)
        print(*pids, flush=True)
        try:
            world.run(lambda comm: [ring.all_reduce(comm, np.ones(10)) for _ in iter(int, 1)])
        except KeyboardInterrupt:
            print(*world.run(lambda comm: int(ring.all_reduce(comm, np.array([comm.rank]))[0])), flush=True)
        """
    )
    pids = read_pids(process)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ("3 3 3\n", "", 0)
    assert all_gone(pids)
    assert group_is_empty(process)


def test_ctrl_c_leaves_idle_ranks_alone(script: Any) -> None:
    """It is the caller's to answer: the ranks that stand ready stay, and print nothing."""
    process = script(
        """
        import time
        from refpar.comm import World

        world = World(2)
        world.run(lambda comm: None)
        pids = world.pids
        print(*pids, flush=True)
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            world.run(lambda comm: None)
            print(world.pids == pids)
        """
    )
    read_pids(process)
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=20) == ("True\n", "")


@pytest.mark.parametrize("busy", ["time.sleep(0.5)", "time.sleep(60)"])
def test_a_world_closed_in_the_middle_of_a_run_is_silent(script: Any, busy: str) -> None:
    """Ranks whose result nobody takes any more print nothing, and those that compute on are not waited for in turn."""
    process = script(
        f"""
        import signal, time
        from refpar.comm import World

        world = World(6)
        world.run(lambda comm: None)
        signal.signal(signal.SIGALRM, lambda *_: world.close())
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began = time.monotonic()
        try:
            world.run(lambda comm: {busy})
        except RuntimeError as error:
            print(error, time.monotonic() - began < 4)
        """
    )
    assert process.communicate(timeout=30) == ("this World was closed while it ran True\n", "")
    assert group_is_empty(process)


# Where a world is made


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_world_outlives_the_thread_that_made_it(method: str) -> None:
    """The kernel's parent-death signal is sent when a thread ends; it must not be this one."""
    made: list[World] = []

    def make() -> None:
        made.append(World(2, start_method=method))
        made[0].run(size_of_world)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    time.sleep(0.1)
    with made[0] as world:
        assert all_right(world)


SCRIPT = """
    from dataclasses import dataclass
    import numpy as np
    from refpar.comm import World, ring

    print("main runs", flush=True)
    scale = 2.0

    @dataclass
    class Point:
        x: float

    def helper(x):
        return scale * x

    def fn(comm, point):
        return helper(float(ring.all_reduce(comm, np.array([point.x]))[0]))

    world = World(3{method})
    print(world.run(fn, Point(5.0)))
    """


def test_a_module_beside_the_script_goes_by_name(tmp_path: Path) -> None:
    """Both ways, whatever else it holds: by value, it would have to be sent whole, and arrive as another."""
    (tmp_path / "helpers.py").write_text("unsendable = (x for x in ())\ndef double(x):\n    return 2 * x\n")
    text = """
        import helpers
        from refpar.comm import World

        with World(2) as world:
            print([fn(5) for fn in world.run(lambda comm: [helpers.double(comm.rank), lambda x: helpers.double(x)][1])])
        """
    process = run_script(text, cwd=tmp_path)
    assert process.communicate(timeout=30) == ("[10, 10]\n", "")


def test_ranks_have_from_the_start_what_their_program_has_imported(tmp_path: Path) -> None:
    """Of refpar, and what needs no other library: 64 ranks that import it one by one take seconds longer."""
    (tmp_path / "refpar_of_mine.py").write_text("print('imported')")
    text = """
        import refpar_of_mine, refpar.conformance.plugin, refpar.oracle.verify
        from refpar.comm import World

        wanted = "refpar.conformance.plugin", "refpar.oracle.verify", "refpar.parallel.hybrid", "refpar.plan"
        with World(2) as world:
            print(world.run(lambda comm: [name in __import__("sys").modules for name in wanted])[1])
        """
    out, err = run_script(text, cwd=tmp_path).communicate(timeout=30)
    assert (out, err) == ("imported\n[False, True, True, False]\n", "")


@pytest.mark.parametrize("method", ["", ", start_method='spawn'"])
def test_a_script_needs_no_guard(script: Any, tmp_path: Path, method: str) -> None:
    """It is not run again in the ranks, whose functions and classes of the main module come by value."""
    file = tmp_path / "unguarded.py"
    file.write_text(textwrap.dedent(SCRIPT.replace("{method}", method)))
    for text in (
        SCRIPT.replace("{method}", method),
        f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')",
    ):
        out, err = script(text).communicate(timeout=30)
        assert (out, err) == ("main runs\n[30.0, 30.0, 30.0]\n", "")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, str(file)], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=30
    )
    assert (done.stdout, done.stderr) == ("main runs\n[30.0, 30.0, 30.0]\n", "")


def test_busy_threads_of_the_caller_do_not_matter() -> None:
    """BLAS threads do not exist in a forked child, which then waits for them (OpenMathLib/OpenBLAS#294)."""
    stop = threading.Event()

    def multiply() -> None:
        x = np.ones((200, 200))
        while not stop.is_set():
            x @ x

    threads = [threading.Thread(target=multiply) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with World(3) as world:
            assert world.run(lambda comm: float((np.ones((8, 8)) @ np.ones((8, 8)))[7, 7])) == [8.0] * 3
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_forked_child_leaves_the_ranks_alone(world: World) -> None:
    """It may not run them, and does not end them when it ends."""
    pids = world.pids
    child = os.fork()
    if child == 0:
        status = 1
        try:
            world.run(size_of_world)
        except RuntimeError as error:
            status = 0 if "this World belongs to process" in str(error) else 2
            world._finalizer()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert world.pids == pids
    assert all_right(world)


def test_a_forked_child_may_end_as_any_program_does(script: Any) -> None:
    """And start ranks of its own; the parent's go on, and do not outlive the parent because the child lives on."""
    process = script(
        """
        import os, sys, time
        from refpar.comm import World

        world = World(2)
        world.run(lambda comm: None)
        print(*world.pids, flush=True)
        if os.fork() == 0:
            with World(2) as own:
                assert own.run(lambda comm: comm.rank) == [0, 1]
            world.close()
            sys.exit(0)
        assert os.wait()[1] == 0
        assert world.run(lambda comm: comm.rank) == [0, 1]
        if os.fork() == 0:
            time.sleep(60)
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    pids = read_pids(process)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    os.kill(process.pid, signal.SIGKILL)
    assert all_gone(pids)
    os.killpg(process.pid, signal.SIGKILL)


def test_one_that_is_stopped_while_it_waits_is_to_blame() -> None:
    """Not the one that it said it waits for, before it was stopped."""

    def fn(comm: Communicator) -> None:
        if comm.rank == 0:
            time.sleep(0.3)
        if comm.rank == 2:  # stops while it waits for rank 1, which waits for rank 0
            threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        ring.all_reduce(comm, np.ones(4))

    with World(4, timeout=0.5) as world:
        assert failure(world, fn, CommTimeout).rank == 2


@pytest.mark.parametrize("when", ["idle", "computing"])
def test_a_stopped_rank_is_named_though_nobody_waits_for_it(when: str) -> None:
    """How long a rank computes is not limited; but one that is stopped does not compute."""
    with World(3, timeout=0.4) as world:
        pid = world.pids[1]
        if when == "idle":
            os.kill(pid, signal.SIGSTOP)
        else:
            threading.Timer(0.2, os.kill, (pid, signal.SIGSTOP)).start()
        error = failure(world, lambda comm: time.sleep(0.5), CommTimeout)
    assert error.rank == 1
    assert "rank 1 is stopped, and did not go on within 0.4 s" in str(error)


def test_a_program_that_was_stopped_as_a_whole_has_not_waited(script: Any) -> None:
    """Ctrl-Z for longer than the limit, then fg."""
    process = script(
        """
        import time
        from refpar.comm import World

        def fn(comm):
            if comm.rank == 0:
                time.sleep(1)
            comm.barrier()

        world = World(2, timeout=1.5)
        print(*world.pids, flush=True)
        world.run(fn)
        print("done", flush=True)
        """
    )
    pids = read_pids(process)
    time.sleep(0.3)
    for sign, seconds in ((signal.SIGSTOP, 2), (signal.SIGCONT, 0)):
        for pid in (process.pid, *pids):
            os.kill(pid, sign)
        time.sleep(seconds)
    assert process.communicate(timeout=10) == ("done\n", "")


def test_a_rank_killed_while_it_reports_is_named(world: World) -> None:
    """Half of a result is there when it dies."""

    def fn(comm: Communicator) -> bytes:
        if comm.rank != 2:
            return b""
        from multiprocess import connection

        write = connection.Connection._write

        def half(fd: int, data: Any) -> int:
            write(fd, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        connection.Connection._send.__defaults__ = (half,)
        return b"x" * 10**7

    error = failure(world, fn, RankError)
    assert error.rank == 2
    assert "killed by SIGKILL" in str(error)


def test_what_killed_a_rank_is_named_even_without_a_name(world: World) -> None:
    """Realtime signals have numbers alone."""
    error = failure(world, lambda comm: os.kill(os.getpid(), 40) if comm.rank == 1 else comm.barrier(), RankError)
    assert error.rank == 1
    assert "killed by signal 40" in str(error)


def test_an_error_of_communication_cannot_be_caught_and_forgotten(world: World) -> None:
    """What is on its way then belongs to no call: the next one would take it for its own."""

    def late(comm: Communicator) -> Any:
        if comm.rank == 0:
            comm.send(np.ones(3), 1)
        if comm.rank == 1:
            with contextlib.suppress(CollectiveMismatch):
                comm.recv(np.empty(4), 0)

    assert failure(world, late, CollectiveMismatch).rank == 1

    def again(comm: Communicator) -> Any:
        if comm.rank == 0:
            time.sleep(0.4)
            comm.send(np.ones(3), 1)
            comm.send(np.zeros(3), 1)
        if comm.rank == 1:
            with contextlib.suppress(CommTimeout):
                comm.recv(np.empty(3), 0)
            return comm.recv(np.empty(3), 0)

    with World(2, timeout=0.2) as impatient:
        failure(impatient, again, CommTimeout)


def test_a_rank_that_forks_and_returns_twice_is_refused(world: World) -> None:
    """Or the second answer would be taken for that of the next call."""

    def fork(comm: Communicator) -> str:
        if comm.rank == 1 and os.fork() == 0:
            time.sleep(0.1)
        return "first"

    assert world.run(fork) == ["first"] * 4
    time.sleep(0.3)
    error = failure(world, lambda comm: "second", RankError)
    assert "rank 1 has answered call" in str(error)

    def fork_at_once(comm: Communicator) -> None:
        if comm.rank == 1:
            os.fork()
        time.sleep(0.2 if comm.rank == 0 else 0)

    assert "rank 1 has answered call" in str(failure(world, fork_at_once, RankError))


def test_what_lies_in_the_current_folder_is_not_imported(tmp_path: Path) -> None:
    """By the fork server, where the program itself does not look there."""
    (tmp_path / "fractions.py").write_text("1 / 0")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "program.py").write_text(
        "import refpar.oracle.verify, refpar.comm\nprint(refpar.comm.World(2).run(lambda comm: comm.rank))"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "elsewhere" / "program.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout, done.stderr) == ("[0, 1]\n", "")


def test_ctrl_c_while_ranks_are_ended_leaves_none() -> None:
    """It comes through when they are gone: here they have a thread, and a second to leave by themselves."""
    with World(1) as other:  # the fork server's descriptors are there
        other.run(lambda comm: None)
        files = open_files()
        world = World(3)
        pids = world.pids
        world.run(lambda comm: threading.Thread(target=time.sleep, args=(100,)).start())
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            world.close()
        assert not any(map(alive, pids))
        assert open_files() == files
