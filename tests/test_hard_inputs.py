"""What nobody means to give to ranks: foreign byte orders, odd numbers, hostile exceptions, no descriptors."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from refpar.arrays import accumulator, total, widen
from refpar.comm import CollectiveMismatch, CommTimeout, Communicator, RankError, World, mailbox, ring
from refpar.comm.mailbox import IN_CALL, RETURNED, Mailboxes, Region


def run_script(text: str, *, close_stdout: bool = False, limit: float = 60) -> subprocess.CompletedProcess[str]:
    """Run Python on a script of its own."""
    command = [sys.executable, "-c", textwrap.dedent(text)]
    if close_stdout:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit)


# Byte orders


@pytest.mark.parametrize("dtype", ring.DTYPES)
@pytest.mark.parametrize("odd", ["", "out"])
def test_byte_orders_may_differ_between_ranks(worlds: Callable[[int], World], dtype: str, odd: str) -> None:
    """Values are summed and gathered, not bytes: rank 0 brings big-endian numbers, the others little-endian ones."""

    def fn(comm: Communicator) -> Any:
        x = np.arange(1, 8).astype(np.dtype(dtype).newbyteorder("<" if comm.rank else ">")) + comm.rank
        x = x.astype(np.dtype(dtype).newbyteorder("<" if comm.rank else ">"))

        def out(*shape: int) -> dict[str, Any]:
            return {"out": np.zeros(shape, x.dtype)} if odd else {}

        counts = [3, 2, 2]
        results = [
            ring.all_reduce(comm, x, **out(7)),
            ring.all_reduce(comm, x.copy(), "max", **out(7)),
            ring.reduce_scatter(comm, x, **out(counts[comm.rank])),
            ring.all_gather(comm, x, **out(3, 7)),
            ring.broadcast(comm, x, **out(7)),
            ring.all_to_all(comm, np.stack([x, x, x])),
        ]
        if odd:
            results += [ring.all_reduce(comm, x.copy(), out=(y := x.copy())), y]
        return [result.tolist() for result in results]

    base = np.arange(1, 8)
    everyone = [(base + rank).tolist() for rank in range(3)]
    for rank, got in enumerate(worlds(3).run(fn)):
        sums = (3 * base + 3).tolist()
        part = [sums[:3], sums[3:5], sums[5:]][rank]
        assert got == [sums, (base + 2).tolist(), part, everyone, base.tolist(), everyone, *([sums] * 2 if odd else [])]


def test_messages_have_one_byte_order(worlds: Callable[[int], World]) -> None:
    """Whatever the sender's and the receiver's arrays have."""

    def fn(comm: Communicator) -> list[int]:
        orders = "><" if comm.rank else "<>"
        got: list[int] = []
        for order in orders:
            out = np.zeros(3, order + "i4")
            comm.sendrecv(np.array([1, 2, 300], order + "i4"), 1 - comm.rank, out, 1 - comm.rank)
            got += out.tolist()
        return got

    assert worlds(2).run(fn) == [[1, 2, 300] * 2] * 2


def test_foreign_halves_are_summed_wide() -> None:
    """4,096 big-endian ones are 4,096, not the 2,048 that a sum in half stops at."""
    ones = np.ones((4096, 2), ">f2")
    assert accumulator(">f2") == np.float32
    assert accumulator(">f8") == np.float64
    assert widen(ones).dtype == np.float32
    assert total(ones, axis=0).tolist() == [4096.0, 4096.0]


# Numbers that a caller may pass


def test_numbers_of_numpy_are_numbers() -> None:
    with World(np.int64(2), timeout=np.float32(30)) as world:  # type: ignore[arg-type]
        assert world.run(lambda comm: comm.size) == [2, 2]
        assert type(world.ranks) is int


@pytest.mark.parametrize("ranks", [np.bool_(True), True, 2.0, np.float64(2), "2"])
def test_ranks_must_be_a_whole_number(ranks: Any) -> None:
    with pytest.raises(ValueError, match=r"ranks is .*; it must be an integer from 1 to 512"):
        World(ranks)


@pytest.mark.parametrize("timeout", ["5", True, [5], float("inf"), 1e300, -float("inf"), float("nan")])
def test_a_limit_must_be_a_number_of_seconds(timeout: Any) -> None:
    """When the World is made, not when it is first used."""
    with pytest.raises(ValueError, match=r"timeout is .*; it must be a positive number of seconds"):
        World(2, timeout=timeout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.7,), "TypeError: color is 0.7; it must be an integer of 64 bits, or None"),
        ((2**70,), f"ValueError: color is {2**70}; it must be an integer of 64 bits, or None"),
        ((0, 0.5), "TypeError: key is 0.5; it must be an integer of 64 bits"),
        ((0, -(2**63) - 1), "ValueError: key is -9223372036854775809; it must be"),
    ],
)
def test_split_takes_whole_numbers(worlds: Callable[[int], World], arguments: Any, words: str) -> None:
    with pytest.raises(RankError) as caught:
        worlds(2).run(lambda comm: comm.split(*arguments))
    assert words in str(caught.value)


def test_split_takes_any_whole_number(worlds: Callable[[int], World]) -> None:
    def fn(comm: Communicator) -> int:
        return comm.split(np.int32(1), -comm.rank).rank + comm.split(2**63 - 1, -(2**63)).size

    assert worlds(2).run(fn) == [3, 2]


# Groups


def test_groups_of_one_name_are_told_apart(worlds: Callable[[int], World]) -> None:
    """Two splits by one colour and other keys are both world.0, and a rank may be in both at once."""

    def fn(comm: Communicator) -> Any:
        forth, back = comm.split(0), comm.split(0, -comm.rank)
        assert forth.name == back.name == "world.0"
        return ring.all_gather(back if comm.rank else forth, np.array([comm.rank])).tolist()

    with pytest.raises(CollectiveMismatch) as caught:  # both ranks are the first of their group
        worlds(2).run(fn)
    assert "world.0" in str(caught.value)


def test_groups_of_other_members_do_not_mix(worlds: Callable[[int], World]) -> None:
    """Even of like shape: ranks 0 and 1 meet in a group of two, and in one of three, under one name."""

    def fn(comm: Communicator) -> Any:
        two = comm.split(0 if comm.rank < 2 else None, name="dp")
        three = comm.split(0, name="dp")
        group = two if comm.rank == 0 else three
        assert group is not None
        if comm.rank == 0:
            group.send(np.ones(2), 1)
        elif comm.rank == 1:
            return group.recv(np.ones(2), 0).tolist()
        return None

    with pytest.raises(CollectiveMismatch):
        worlds(3).run(fn)


@pytest.mark.parametrize("letter", ["ä", "群", "x", "\ud800"])
def test_any_name_of_a_group_can_be_shown(worlds: Callable[[int], World], letter: str) -> None:
    """What is cut off may be cut in the middle of a letter."""

    def fn(comm: Communicator) -> None:
        for shift in range(3):
            group = comm.split(0, name="x" * shift + letter * 500)
            if shift == 2 or comm.rank == 0:
                ring.all_reduce(group, np.ones(3 + comm.rank))
            else:
                ring.all_reduce(group, np.ones(3))

    with pytest.raises(CollectiveMismatch, match="ranks do not agree on what to do"):
        worlds(2).run(fn)


# Exceptions


def test_an_exception_that_cannot_be_shown_is_reported(worlds: Callable[[int], World]) -> None:
    def fn(comm: Communicator) -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise ZeroDivisionError("no words")

        if comm.rank == 1:
            raise Mute
        comm.barrier()

    with pytest.raises(RankError) as caught:
        worlds(2).run(fn)
    assert caught.value.rank == 1
    assert "rank 1 raised Mute: <its text cannot be shown: ZeroDivisionError>" in str(caught.value)
    assert "raise Mute" in str(caught.value)


@pytest.mark.parametrize("name", ["Unavailable", "CommTimeout", "CollectiveMismatch"])
def test_an_exception_is_not_taken_for_another_of_its_name(worlds: Callable[[int], World], name: str) -> None:
    def fn(comm: Communicator) -> None:
        raise type(name, (Exception,), {})("mine")

    with pytest.raises(RankError) as caught:
        worlds(2).run(fn)
    assert type(caught.value) is RankError
    assert f"raised {name}: mine" in str(caught.value)


def test_a_kind_of_timeout_is_a_timeout(worlds: Callable[[int], World]) -> None:
    def fn(comm: Communicator) -> None:
        class Impatience(CommTimeout):
            pass

        raise Impatience("waited long enough", 1)

    with pytest.raises(CommTimeout, match="waited long enough"):
        worlds(2).run(fn)


# Descriptors, memory, streams


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_no_output_is_no_trouble(method: str) -> None:
    """Standard output that is closed, as by >&- and in services."""
    done = run_script(
        f"""
        import sys
        from refpar.comm import World
        with World(2, start_method={method!r}) as world:
            sys.stderr.write(repr(world.run(lambda comm: comm.rank)))
        """,
        close_stdout=True,
    )
    assert (done.returncode, done.stderr) == (0, "[0, 1]")


def test_output_that_cannot_be_written_does_not_replace_the_result(worlds: Callable[[int], World]) -> None:
    def fn(comm: Communicator) -> int:
        import sys

        class Full:
            def flush(self) -> None:
                raise OSError(28, "No space left on device")

        sys.stdout = Full()  # type: ignore[assignment]
        return comm.rank

    with World(2) as world:
        assert world.run(fn) == [0, 1]
        assert world.run(lambda comm: comm.rank) == [0, 1]


def test_too_few_descriptors_are_a_clear_error() -> None:
    """It says what to raise, leaves nothing behind, and the World works once there are enough."""
    done = run_script(
        """
        import os, resource
        from refpar.comm import World
        with World(1) as first:
            first.run(lambda comm: None)
        files = sorted(os.listdir("/proc/self/fd"))
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        world = World(8)
        for few in range(len(files), len(files) + 30, 3):
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, most[1]))
            try:
                world.run(lambda comm: None)
            except OSError as error:
                assert "ulimit -n" in str(error) and "8 ranks" in str(error), error
            else:
                raise AssertionError(few)
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
            assert sorted(os.listdir("/proc/self/fd")) == files, few
        print(world.run(lambda comm: comm.rank))
        world.close()
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2, 3, 4, 5, 6, 7]\n", "")


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_no_shared_memory_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def failing(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    files = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match=r"shared memory for 3 ranks") as caught:
        World(3).run(lambda comm: None)
    assert caught.value.errno == 12
    assert os.listdir("/proc/self/fd") == files


# Moments


def test_closing_a_world_that_runs_is_a_clear_error(worlds: Callable[[int], World]) -> None:
    """As a signal handler may do."""
    world = World(2)

    def close(*_: Any) -> None:
        world.close()

    before = signal.signal(signal.SIGUSR1, close)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(RuntimeError, match="this World was closed while it ran"):
            world.run(lambda comm: [0 for _ in iter(int, 1)])
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(RuntimeError, match="this World is closed"):
        world.run(lambda comm: None)


def test_a_status_is_never_read_half_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader between two writes must not see the new run with the old state: it would take a rank for done."""
    whole, seen = mailbox.STATUS, []

    class Slow:
        """Writes a status in two parts, with a reader in between."""

        cut = 0
        unpack_from = staticmethod(whole.unpack_from)

        def pack_into(self, memory: Any, at: int, *fields: Any) -> None:
            data = whole.pack(*fields)
            memory[at : at + self.cut] = data[: self.cut]
            status = region.status(0)
            seen.append((status.run, status.state))
            memory[at : at + len(data)] = data

    region, slow = Region.create(1), Slow()
    monkeypatch.setattr(mailbox, "STATUS", slow)
    box = Mailboxes(region, 0, None)
    for slow.cut in range(whole.size + 1):
        box.begin(1)
        box.finish()
        assert (region.status(0).run, region.status(0).state) == (1, RETURNED)
        seen.clear()
        box.begin(2)
        assert seen[0][1] == IN_CALL
    monkeypatch.undo()
    assert str(region.status(0)) == "computing, has not communicated"
    region.close()
