"""What nobody means to give to ranks: foreign byte orders, odd numbers, hostile exceptions, no descriptors."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refpar import GPT, MLP, SGD, AdamW, Batch, Case, Layout, rng, save, single, text_batches, train
from refpar.arrays import accumulator, total, widen
from refpar.case import State
from refpar.comm import CollectiveMismatch, CommTimeout, Communicator, RankError, World, ring
from refpar.comm.mailbox import Mailboxes
from refpar.comm.region import IN_CALL, RETURNED, STATUS, Region
from refpar.oracle import bounds
from refpar.precision import LossScale, Precision


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


def a_case(**changes: Any) -> Case:
    """Return a case of two rows, with something in it that is not what it should be."""
    batch = Batch([[1.0, 2.0, 3.0]] * 2, [[1.0, 2.0]] * 2, [True, False])
    return Case(**{"model": MLP((3, 2)), "optimizer": SGD(lr=0.1), "batches": [batch], **changes})


def test_numbers_of_numpy_become_pythons() -> None:
    """A seed draws the same, a saved run belongs to the same case, and JSON and a layout's text are the same."""
    numpys = a_case(
        model=MLP((np.int32(3), np.uint8(2))), optimizer=AdamW(np.float64(0.1), warmup=np.int64(2)), seed=np.int64(3),
        clip=np.float32(0.5),
    )  # fmt: skip
    pythons = a_case(optimizer=AdamW(0.1, warmup=2), seed=3, clip=0.5)
    assert State.initial(numpys).identity == State.initial(pythons).identity
    for name, x in State.initial(pythons).parameters.items():
        assert np.array_equal(State.initial(numpys).parameters[name], x)
    assert rng.bits((3,), 0, 1) != rng.bits((np.int64(3),), 0, 1)  # which is why
    numpys_layout = Layout(dp=np.int64(2), zero=np.int8(1), pp=2, stages=(np.int64(1), 1), recompute=np.int64(2))
    assert str(numpys_layout) == "dp=2,pp=2,zero=1,recompute=2,stages=1+1"
    assert numpys_layout == Layout(dp=2, zero=1, pp=2, stages="1+1", recompute=2)


def test_lists_are_rows() -> None:
    """As they are for NumPy."""
    batch = a_case().batches[0]
    assert (batch.inputs.shape, batch.targets.dtype.name, batch.mask.tolist()) == ((2, 3), "float64", [True, False])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_whole_numbers_are_numbers_to_an_mlp(dtype: str) -> None:
    """Inputs and targets of integers or truth values give the bits of the same numbers in floating point."""
    wide = np.array([[0, 1, 1], [1, 0, 1]]), np.array([[2, 0], [1, 1]])
    by_kind = [
        single.train(a_case(batches=[Batch(wide[0].astype(a), wide[1].astype(b), MASK)], precision=Precision(dtype)))
        for a, b in (("float64", "float64"), ("int64", "float64"), ("float64", "uint8"), ("bool", "int32"))
    ]
    for other in by_kind[1:]:
        assert dict(other.steps[0].items()).keys() == dict(by_kind[0].steps[0].items()).keys()
        assert other.peak_bytes == by_kind[0].peak_bytes
        for (name, x), (_, true) in zip(other.steps[0].items(), by_kind[0].steps[0].items(), strict=True):
            assert np.array_equal(x, true), name


@pytest.mark.parametrize("kind", ["uint8", "int8", "uint32", "uint64"])
def test_tokens_of_any_integer_type(kind: str) -> None:
    """The trace, the pieces and the bounds of a golden are those of the same tokens in int64."""
    model, layout = GPT(11, 4, 6, 1, 2), Layout(dp=2, micro_batches=2)

    def case(tokens: str) -> Case:
        x = rng.integers((0, "tokens"), (5, 5), 0, 11).astype(tokens)
        rows = Batch(x[:, :3], x[:, 1:4], np.ones((5, 3), bool))  # shorter than the context
        return Case(model, SGD(0.25), (rows,), Precision("float32"))

    truth, own = bounds.truth(case("int64")), bounds.truth(case(kind))
    [true], [values] = (bounds.everything(t.case, layout, t) for t in (truth, own))
    assert list(values) == list(true)
    assert all(np.array_equal(values[name], x) for name, x in true.items())


ROWS, TARGETS, MASK = np.ones((2, 3)), np.ones((2, 2)), np.ones(2, bool)
EMPTY = np.zeros((2, 0), int)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a masked array": (lambda: Batch(np.ma.masked_greater(ROWS, 0), TARGETS, MASK), "Batch inputs is a masked array"),
    "a masked mask": (lambda: Batch(ROWS, TARGETS, np.ma.masked_equal(MASK, 0)), "Batch mask is a masked array"),
    "rows of several lengths": (lambda: Batch([[1], [1, 2]], TARGETS, MASK), r"Batch inputs is \[\[1\], \[1, 2\]\]"),
    "words": (lambda: Batch([["a", "b"]], TARGETS, MASK), "Batch inputs is .* must be an array of numbers"),
    "objects": (lambda: Batch(ROWS, [[None, 1.0]], MASK), "Batch targets is .* must be an array of numbers"),
    "complex numbers": (lambda: Batch(ROWS * 1j, TARGETS, MASK), "Batch inputs is .* must be an array of numbers"),
    "a number for rows": (lambda: Batch(1.0, TARGETS, MASK), r"Batch inputs is of float64 and of shape \(\)"),
    "a mask of numbers": (lambda: Batch(ROWS, TARGETS, [1, 0]), "mask of int64: it must be bool"),
    "rows of no token": (
        lambda: Case(GPT(5, 3, 4, 1, 2), SGD(0.1), [Batch(EMPTY, EMPTY, EMPTY.astype(bool))]),
        r"batch 0 has inputs of shape \(2, 0\): the model takes \(2, 1\)",
    ),
    "a scale that is text": (lambda: LossScale(initial="64"), "LossScale initial is '64'"),  # type: ignore[arg-type]
    "no model": (lambda: a_case(model="gpt2"), "Case model is 'gpt2': it must be a refpar.GPT or a refpar.MLP"),
    "no optimizer": (lambda: a_case(optimizer=0.1), "Case optimizer is 0.1: it must be a refpar.SGD"),
    "a class of optimizer": (lambda: a_case(optimizer=SGD), "Case optimizer is <class"),
    "a type for a precision": (lambda: a_case(precision="float32"), "Case precision is 'float32': it must be a refpar"),
    "a seed that is text": (lambda: a_case(seed="x"), "Case seed is 'x': it must be a whole number"),
    "a seed that is true": (lambda: a_case(seed=True), "Case seed is True"),
    "a clip that is text": (lambda: a_case(clip="x"), "Case clip is 'x': it must be a number above 0"),
    "a clip of 0": (lambda: a_case(clip=0), "Case clip is 0: it must be a number above 0"),
    "a clip that is infinite": (lambda: a_case(clip=np.inf), "Case clip is inf"),
    "one batch for several": (lambda: a_case(batches=a_case().batches[0]), "Case batches is Batch.* a sequence"),
    "no batches": (lambda: a_case(batches=None), "Case batches is None: it must be a sequence, each a Batch"),
    "numbers for batches": (lambda: a_case(batches=[1]), "Case batches has 1: each must be a Batch"),
    "a name for several": (lambda: a_case(frozen="layers.0"), "Case frozen is 'layers.0': it must be a sequence"),
    "a number for a name": (lambda: a_case(frozen=("layers.0", 3)), "Case frozen has 3: each must be a str"),
    "widths that are one": (lambda: MLP(3), "MLP widths is 3"),  # type: ignore[arg-type]
    "a rate that is text": (lambda: GPT(5, 3, 4, 1, 2, dropout="x"), "GPT dropout is 'x'"),  # type: ignore[arg-type]
    "text that is no bytes": (lambda: text_batches("text" * 9, steps=1, rows=1, context=2), "it must be bytes"),  # type: ignore[arg-type]
    "steps below 0": (lambda: text_batches(b"text" * 9, steps=-1, rows=1, context=2), "steps is -1"),
    "no rows": (lambda: text_batches(b"text" * 9, steps=1, rows=0, context=2), "rows is 0"),
    "no context": (lambda: text_batches(b"text" * 9, steps=1, rows=1, context=0), "context is 0"),
    "half a replica": (lambda: Layout(dp=0.5), "Layout dp is 0.5: it must be a whole number"),  # type: ignore[arg-type]
    "a stage that is a float": (lambda: Layout(zero=1.0), "Layout zero is 1.0"),  # type: ignore[arg-type]
    "an array of replicas": (lambda: Layout(dp=np.ones(3)), r"Layout dp is array\("),  # type: ignore[arg-type]
    "text for a layout": (lambda: train(a_case(), "dp=2"), "layout is 'dp=2': it must be a refpar.Layout"),  # type: ignore[arg-type]
    "values for another model": (lambda: State.initial(a_case(), {"w": ROWS}), "has no layers.0.bias"),
    "values too many": (
        lambda: State.initial(a_case(), {"layers.0.weight": ROWS.T, "layers.0.bias": MASK, "w": ROWS}),
        "a parameter that the model has not: w",
    ),
    "masked values": (
        lambda: State.initial(a_case(), {"layers.0.weight": np.ma.masked_equal(TARGETS, 0), "layers.0.bias": MASK}),
        "State.initial layers.0.weight is a masked array",
    ),
    "nothing to recompute": (lambda: Layout(recompute=None), "recompute is 'None'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_problem_is_refused_when_it_is_made(what: str) -> None:
    """Not somewhere inside a rank, and never silently taken for something else."""
    make, words = WRONG[what]
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert len(str(caught.value).splitlines()) == 1


def test_a_path_comes_first(tmp_path: Path) -> None:
    """As for numpy.save; what is saved is a state, or the trace of a run."""
    with pytest.raises(TypeError, match="save takes a path, and then a State or a Trace, not 'saved'"):
        save(State.initial(a_case()), "saved")  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [np.bool_(True), True, 2.0, np.float64(2), "2"])
def test_ranks_must_be_a_whole_number(ranks: Any) -> None:
    with pytest.raises(ValueError, match=r"ranks is .*: it must be a whole number from 1 to 512"):
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
    """Two splits by one colour and other keys may have one name, and a rank may be in both at once."""

    def fn(comm: Communicator) -> Any:
        forth, back = comm.split(0, name="pair"), comm.split(0, -comm.rank, name="pair")
        return ring.all_gather(back if comm.rank else forth, np.array([comm.rank])).tolist()

    with pytest.raises(CollectiveMismatch) as caught:  # both ranks are the first of their group
        worlds(2).run(fn)
    assert "in pair (split 1)" in str(caught.value)
    assert "in pair (split 2)" in str(caught.value)


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
    whole, seen = STATUS, []

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
    monkeypatch.setattr("refpar.comm.region.STATUS", slow)
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
