"""The verbs of the command line; no mathematics.

Exit status: 0 matched; 1 a mismatch, with the first wrong number named; 2 bad input; 3 the run itself
failed; 130 on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from refpar import output

if TYPE_CHECKING:
    from refpar.oracle.verify import Problem, Row

MATCHED, MISMATCH, BAD_INPUT, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
TECHNIQUES = ("ring", "dp", "zero1", "zero2", "zero3", "tp", "pp", "hybrid", "checkpoint", "fp16")
WIDTH = 160  # columns where nobody looks: a file, or a pipe
MOST_RANKS = 512
MOST_ON_GPUS = 12
MOST_KEPT = 1000  # steps of a run that keeps every array of every step, a megabyte each
MOST_LAYERS = 1000
MOST_PASSES = 10_000  # of a schedule that is drawn, forward and backward ones on all stages


class BadInput(Exception):
    """Something the user gave cannot be used; the text is the one line they see."""


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise BadInput(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``refpar`` with ``argv`` and return its exit status."""
    with output.patient() as out:
        status = judged(argv)
        out.flush()
        if out.full and status == MATCHED:
            status = complain(f"standard output: {out.error.strerror}", FAILED)  # type: ignore[union-attr]
        return status


def judged(argv: Sequence[str] | None) -> int:
    """Run a verb, say what has gone wrong, and return the exit status."""
    options = argparse.Namespace()
    try:
        parser().parse_args(argv, options)
        return on_mpi(options) if getattr(options, "transport", None) == "mpi" else int(options.verb(options))
    except SystemExit as ended:  # --help
        return int(ended.code or 0)
    except BadInput as error:
        return complain(error, BAD_INPUT, options)
    except KeyboardInterrupt:
        exec("")  # or CPython ends by the signal, if that came within another exec, as while a dataclass was made
        return complain("interrupted", INTERRUPTED, options)
    except Exception as error:
        from refpar.arrays import Unavailable
        from refpar.comm import RankError

        if isinstance(error, Unavailable):
            return complain(error, BAD_INPUT, options)
        if isinstance(error, RankError):
            return complain(error, FAILED, options)
        if isinstance(error, MemoryError):
            return complain(f"out of memory: {error}" if str(error) else "out of memory", FAILED, options)
        if isinstance(error, OSError):  # the machine is out of something
            where = f"{error.filename}: " if error.filename else ""
            return complain(where + str(error.strerror or error), FAILED, options)
        traceback.print_exc()
        return complain("this is a defect of refpar: please report it with the lines above", FAILED, options)


def on_mpi(options: argparse.Namespace) -> int:
    """Run the verb on every rank that MPI has started."""
    from refpar.arrays import Unavailable
    from refpar.comm import mpi

    mpi.library()

    def verb() -> int:
        try:
            return int(options.verb(options))
        except (BadInput, Unavailable) as error:
            mpi.refuse(BAD_INPUT, error)

    return mpi.everywhere(verb)


def complain(error: object, status: int, options: argparse.Namespace | None = None) -> int:
    """Print the error and return the exit status that goes with it; a program that reads JSON is told as well."""
    if not (isinstance(error, BadInput) and one_of_several()):
        print(f"refpar: {error}", file=sys.stderr)
    if getattr(options, "json", None) == "-":
        print(json.dumps({"schema": 1, "error": str(error), "exit_status": status}, indent=1))
    return status


def one_of_several() -> bool:
    """Return whether a launcher has started this program several times, and this is not the first: that one speaks."""
    from refpar.comm import mpi

    told = mpi.launched()
    return told is not None and told.rank > 0


def parser() -> Parser:
    """Return the parser of all verbs."""
    top = Parser(prog="refpar", description="The reference implementation of distributed training, on real processes.")
    verbs = top.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    p = verbs.add_parser(
        "verify",
        help="run every technique on real processes and hold it to one device",
        description="Train a small GPT on one device and with every technique on real processes; "
        "print what was compared, how far off it was, and what was sent.",
    )
    p.add_argument("--only", metavar="NAME,…", type=names, help=f"techniques to run, of {', '.join(TECHNIQUES)}")
    p.add_argument("--ranks", metavar="N,…", type=rank_counts, help="numbers of ranks to run each of them on")
    p.add_argument("--layout", metavar="dp=N,…", type=layout, help="one layout to run, such as dp=2,tp=2,pp=2,zero=1")
    p.add_argument("--data", metavar="FILE", type=Path, help="text to train on (default: the source of refpar)")
    p.add_argument("--steps", metavar="N", type=up_to(MOST_KEPT), default=4, help="optimizer steps (default: 4)")
    p.add_argument("--seed", metavar="S", type=natural, default=0, help="of initial values, dropout and batches")
    p.add_argument("--json", metavar="PATH", help="write the results as JSON; - for standard output")
    p.add_argument("--trace", metavar="FILE", type=Path, help="write what each rank did, and when, for ui.perfetto.dev")
    where(p)
    p.set_defaults(verb=verify)
    training(verbs)
    teaching(verbs)
    planning(verbs)
    checking(verbs)
    conforming(verbs)
    return top


def speaks() -> bool:
    """Return whether this process prints and writes files: all do, but of MPI's ranks only the first."""
    if "mpi4py.MPI" not in sys.modules:
        return True
    from refpar.comm import mpi

    return mpi.speaks()


def where(p: Parser) -> None:
    """Add the options that say where ranks run, and on what."""
    p.add_argument(
        "--backend",
        metavar="NAME",
        help="array library of the ranks: numpy or cupy (default: $REFPAR_BACKEND, or numpy)",
    )
    p.add_argument(
        "--transport",
        choices=("processes", "mpi"),
        default="processes",
        help="start processes on this machine, or use the ranks that mpiexec or srun has started (default: processes)",
    )


def ranks_for(options: argparse.Namespace, asked: int | None) -> tuple[Callable[[int], Any], int | None]:
    """Return what opens a world of so many ranks, and how many there are at most, None for any number.

    ``asked`` is how many the run needs, where that is known. Ranks on a GPU are not started by the dozen unasked:
    each takes hundreds of megabytes of it before it holds anything.
    """
    from refpar import arrays
    from refpar.comm import mpi

    try:
        backend = arrays.chosen_backend(options.backend)
        if options.transport == "mpi":
            return functools.partial(mpi.MpiWorld, backend=backend), mpi.size(asked)
        mpi.refuse_local_ranks()
    except (ValueError, arrays.Unavailable) as error:
        raise BadInput(error) from None
    from refpar.comm.processes import World

    return functools.partial(World, backend=backend), None if backend == "numpy" else MOST_ON_GPUS


def verify(options: argparse.Namespace) -> int:
    """``refpar verify``."""
    from refpar.oracle import verify as oracle

    text = oracle.package_text() if options.data is None else read(options.data)
    if options.layout and (options.only or options.ranks):
        raise BadInput("--layout is a run by itself: leave out --only and --ranks")
    asked = options.layout.ranks if options.layout else max(options.ranks) if options.ranks else None
    opened, most = ranks_for(options, asked)
    if options.trace is not None:
        opened = recording(options)
    problem = oracle.Problem(text, options.steps, options.seed, options.ranks, opened, most)
    try:
        problem.case  # noqa: B018  (cuts the batches, or says why it cannot)
    except ValueError as error:
        raise BadInput(f"--data {options.data}: {error}") from None
    if options.layout and (reason := problem.why_not(options.layout)):
        raise BadInput(f"--layout {options.layout}: {reason}")
    check_places(options, "json", "trace")
    with problem.stack:
        if options.layout:
            rows = [oracle.hybrid_row(problem, "hybrid", options.layout)]
        else:
            rows = run_rows(problem, options.only or TECHNIQUES)
    if problem.skipped and not {*(options.only or ())} <= {row.technique for row in rows}:
        raise BadInput("; ".join(problem.skipped))  # something that was asked for by name has not been run at all
    show(rows, problem.skipped, sys.stderr if options.json == "-" else sys.stdout)
    if options.trace is not None:
        teach("write_runs", options.trace, problem.worlds.values())
    write_json(options.json, oracle.report(rows, options.seed))
    return MATCHED if all(row.passed for row in rows) else MISMATCH


def run_rows(problem: Problem, only: Sequence[str]) -> list[Row]:
    """Run the named techniques, with a progress display on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from refpar.oracle import verify as oracle

    rows: list[Row] = []
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("one device", total=len(only))
        for name in only:
            progress.update(task, description=f"verifying {name}")
            for row in oracle.TECHNIQUES[name](problem):
                rows.append(row)
                progress.update(task, description=f"verifying {name}: {row.layout} done")
            progress.advance(task)
    return rows


def show(rows: Sequence[Row], skipped: Sequence[str], out: Any) -> None:
    """Print the table, what could not be run, and the verdict."""
    from rich.table import Table

    from refpar.screen import Screen

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("technique", "ranks", "layout", "compared", "error of allowed", "sent by a rank", "predicted", ""):
        left = name in ("technique", "layout", "error of allowed")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "layout", overflow="fold")
    for row in rows:
        table.add_row(
            row.technique,
            str(row.ranks),
            row.layout.replace(",", ", "),
            f"{row.tensors_compared:,}",
            f"{row.max_error:.1e} of {row.bound:.1e}" if row.bound else f"{row.max_error:.1e}, exact",
            sent(row, row.bytes_sent),
            "-" if row.bytes_expected is None else f"{max(row.bytes_expected) / row.steps:,.0f} B",
            "[green]ok[/]" if row.passed else "[red]WRONG[/]",
        )
    console = Screen(out, WIDTH)
    console.print(table)
    for reason in skipped:
        console.print(f"not run: {reason}", markup=False, soft_wrap=True)
    bad = [row for row in rows if not row.passed]
    for row in bad:
        console.print(f"{row.technique} {row.layout}: {row.detail}", markup=False, soft_wrap=True)
    verdict = (
        f"{len(bad)} of {len(rows)} rows differ from one device" if bad else f"all {len(rows)} rows match one device"
    )
    console.print(f"refpar verify: {verdict}", markup=False)


def sent(row: Row, by_rank: list[int] | None) -> str:
    """Return the most that a rank sends in a step, in bytes and as a multiple of what is reduced."""
    if by_rank is None:
        return "-"
    most = max(by_rank) / row.steps
    return f"{most:,.0f} B = {most / (row.elements * row.itemsize):.3f}x"


def finite(value: Any) -> Any:
    """Return ``value`` with null for every number that JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list) else value


def read(path: Path) -> bytes:
    """Return the bytes of a file the user named."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"--data {path}: {error.strerror}") from None


def check_places(options: argparse.Namespace, *names: str) -> None:
    """Refuse, before the run, to write its results where that cannot be done, or over one another or what is read."""
    from refpar import files

    taken: dict[str, str] = {}
    for name in ("data", "resume", "reference", "control", "sharding", "paths"):
        given = getattr(options, name, None)
        for path in given if isinstance(given, list) else [given] if given is not None else []:
            taken[os.path.realpath(path)] = "is read"
    for name in names:
        path = getattr(options, name)
        if path is None or str(path) == "-":
            continue
        place = os.path.realpath(path)
        if place in taken and not (name == "save" and path == options.resume) and not place.startswith("/dev/"):
            raise BadInput(f"--{name} {path}: this {taken[place]}, and would be lost")
        taken[place] = f"is what --{name} writes"
        if speaks():
            try:
                files.check_place(Path(path))
            except OSError as error:
                raise BadInput(f"--{name} {path}: {error.strerror}") from None


def write(path: Path, text: str, option: str = "--json") -> None:
    """Write a file whole or not at all."""
    if not speaks():
        return
    from refpar import files

    try:
        files.write_whole(path, text.encode())
    except OSError as error:
        raise BadInput(f"{option} {path}: {error.strerror}") from None


def write_json(place: str | None, report: Any) -> None:
    """Write what ``--json`` asks for: to a file, to standard output for ``-``, or not at all."""
    if place is None:
        return
    text = json.dumps(finite(report), allow_nan=False, indent=1) + "\n"
    if place == "-":
        sys.stdout.write(text)
    else:
        write(Path(place), text)


def names(text: str) -> list[str]:
    """Read ``--only``."""
    return several(text, "technique", TECHNIQUES)


def several(text: str, what: str, known: Sequence[str]) -> list[str]:
    """Read some of the ``known`` names, with commas between them; each counts once."""
    from refpar.checks import meant

    chosen = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no {what} is called {name!r}: {meant(name, known)}")
    return chosen


def layout(text: str) -> Any:
    """Read ``--layout``."""
    from refpar.case import Layout

    try:
        chosen = Layout.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if chosen.ranks > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{chosen.ranks} ranks are too many: at most {MOST_RANKS} on one machine")
    return chosen


def rank_counts(text: str) -> list[int]:
    """Read ``--ranks``."""
    return [positive(part, MOST_RANKS) for part in text.split(",")]


def positive(text: str, most: int = 10**9) -> int:
    """Read a whole number of at least 1."""
    value = natural(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    if value > most:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is too many: at most {most:,}")
    return value


def up_to(most: int) -> Callable[[str], int]:
    """Return what reads a whole number from 1 to ``most``."""
    return functools.partial(positive, most=most)


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is no whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value


def shortened(text: str) -> str:
    """Return what was typed, or the beginning of it."""
    return text if len(text) <= 40 else f"{text[:37]}..."


# -------------------------------------------------------------------------------------------- a real run: train


def training(verbs: Any) -> None:
    """Add ``train``; what it does is in :mod:`refpar.longrun`."""
    p = verbs.add_parser(
        "train",
        help="train a GPT on the bytes of a text, in any layout, on real processes",
        description="Train a GPT on the bytes of a text. The layout changes how the work is split and nothing else: "
        "a run can be saved, and resumed in another.",
    )
    p.add_argument("--data", metavar="FILE", type=Path, help="text to train on (default: the source of refpar)")
    p.add_argument("--steps", metavar="N", type=positive, default=200, help="steps in all, before --resume too (200)")
    p.add_argument("--save", metavar="PATH", type=Path, help="where to save at the end, or on Ctrl-C")
    p.add_argument("--resume", metavar="PATH", type=Path, help="a saved run to go on with; its layout does not matter")
    p.add_argument("--trace", metavar="FILE", type=Path, help="write what each rank did, and when, for ui.perfetto.dev")
    shape = p.add_argument_group("layout")
    for name, what in (("dp", "replicas"), ("tp", "slices of each layer"), ("pp", "pipeline stages"),
                       ("micro-batches", "parts of a replica's rows")):  # fmt: skip
        shape.add_argument(f"--{name}", metavar="N", type=positive, default=1, help=f"{what} (1)")
    shape.add_argument("--zero", metavar="STAGE", type=natural, default=0, help="0, 1, 2 or 3: what replicas share out")
    shape.add_argument("--schedule", metavar="NAME", default="1f1b", help="1f1b or gpipe (1f1b)")
    shape.add_argument("--stages", metavar="A+B+…", default="", help="units of each stage (near-even)")
    shape.add_argument("--recompute", metavar="WHAT", default="none", help="none, block, sqrt or a number (none)")
    problem = p.add_argument_group("problem")
    for name, default, what, most in (
        ("layers", 4, "blocks", MOST_LAYERS), ("width", 64, "features of a token", 10**9), ("heads", 4, "heads", 10**9),
        ("context", 64, "bytes a row", 10**9), ("rows", 16, "rows a step", 10**9),
    ):  # fmt: skip
        problem.add_argument(f"--{name}", metavar="N", type=up_to(most), default=default, help=f"{what} ({default})")
    problem.add_argument("--dropout", metavar="P", type=fraction, default=0.0, help="share that is dropped (0)")
    problem.add_argument("--lr", metavar="X", type=fraction, default=3e-3, help="learning rate of AdamW (0.003)")
    problem.add_argument("--warmup", metavar="N", type=natural, default=20, help="updates to reach it (20)")
    problem.add_argument("--clip", metavar="X", type=fraction, default=1.0, help="limit on the gradient's norm (1)")
    problem.add_argument("--seed", metavar="S", type=natural, default=0, help="of initial values, dropout, batches (0)")
    problem.add_argument("--precision", choices=("float64", "float32", "fp16"), default="float32", help="(float32)")
    where(p)
    p.set_defaults(verb=train)


def train(options: argparse.Namespace) -> int:
    """``refpar train``."""
    from refpar import longrun, state
    from refpar.oracle.verify import package_text

    text = package_text() if options.data is None else read(options.data)
    try:
        case, layout = problem_of(options, text)
        opened, _ = ranks_for(options, layout.ranks)
        begin = None if options.resume is None else state.load(options.resume)
        if begin is not None:
            belongs(begin, case, options.resume)
        if begin is not None and begin.step == options.steps:
            raise BadInput(
                f"--steps {options.steps}: {options.resume} is after step {begin.step}, and --steps counts all"
            )
    except state.StateError as error:
        raise BadInput(f"--resume {error}") from None
    except ValueError as error:
        raise BadInput(error) from None
    check_places(options, "save", "trace")
    if options.trace is not None:
        opened = recording(options)

    def keep(trace: Any) -> None:
        if options.save is not None and speaks():
            try:
                state.save(options.save, trace)
            except state.StateError as error:
                raise BadInput(f"--save {error}") from None

    with opened(layout.ranks) as world, watching(options.steps, 0 if begin is None else begin.step) as hear:
        trace, stopped = longrun.train(case, layout, world=world, start=begin, hear=hear, keep=keep)
    made = trace.begun + len(trace.steps)
    print(f"refpar train: {'stopped' if stopped else 'done'} after step {made} of {options.steps} in {layout}")
    if options.save is not None:
        print(f"refpar train: saved to {options.save}; go on with --resume {options.save}, in any layout")
    if options.trace is not None:
        teach("write_runs", options.trace, [world])
    return INTERRUPTED if stopped else MATCHED


def belongs(begin: Any, case: Any, path: Path) -> None:
    """Refuse a saved run of another case."""
    try:
        begin.check(case)
    except ValueError as error:
        raise BadInput(f"--resume {path}: {error}") from None


def problem_of(options: argparse.Namespace, text: bytes) -> Any:
    """Return case and layout, or raise ValueError with what cannot be."""
    from refpar.case import Case, Layout, TextBatches
    from refpar.nn.models import GPT
    from refpar.optim import AdamW
    from refpar.parallel.mesh import check
    from refpar.precision import LossScale, Precision

    o = options
    layout = Layout(o.dp, o.tp, o.pp, o.zero, o.micro_batches, o.schedule, o.recompute, stages=o.stages)
    if layout.ranks > MOST_RANKS:
        raise ValueError(f"layout {layout} needs {layout.ranks} ranks: at most {MOST_RANKS} on one machine")
    model = GPT(256, o.context, o.width, o.layers, o.heads, dropout=o.dropout)
    check(layout, model.build())
    types = Precision("float16", loss_scale=LossScale()) if o.precision == "fp16" else Precision(o.precision)
    optimizer = AdamW(o.lr, weight_decay=0.1, warmup=o.warmup)
    batches = TextBatches(text, range(o.steps), o.rows, o.context, o.seed)
    return Case(model, optimizer, batches, types, clip=o.clip or None, seed=o.seed), layout


@contextlib.contextmanager
def watching(steps: int, begun: int) -> Iterator[Any]:
    """Give what is called for each step: it shows a bar on a terminal or else a line now and then, and then sums up."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from refpar.screen import Screen

    console = Screen(sys.stdout, WIDTH)
    lines: list[Any] = []
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=steps, completed=begun)

        def hear(line: Any) -> None:
            lines.append(line)
            progress.update(task, completed=line.step, description=said(lines[-20:]))
            if not console.is_terminal and (line.step % max(1, steps // 20) == 0 or line.step == steps):
                console.print(f"step {line.step}/{steps}: {said(lines[-20:])}", markup=False, soft_wrap=True)

        yield hear
    if lines:
        last, made, seconds = lines[-1], len(lines), sum(line.seconds for line in lines)
        skipped = sum(line.outcome != "updated" for line in lines)
        rate = sum(line.tokens for line in lines) / seconds
        console.print(
            f"loss {lines[0].loss:.4f} -> {last.loss:.4f} in {made} steps and {seconds:,.0f} s, "
            f"{rate:,.0f} tokens/s, {skipped} steps skipped"
        )
        by_group = ", ".join(f"{group} {short(n / made)}" for group, n in last.sent.items() if n)
        console.print(f"sent a step, by all ranks: {by_group or 'nothing'}", soft_wrap=True)


def said(lines: Sequence[Any]) -> str:
    """Return what is said of the last steps; what was sent is by all ranks, since the beginning."""
    last, seconds = lines[-1], sum(line.seconds for line in lines)
    rate = sum(line.tokens for line in lines) / seconds if seconds else 0.0
    sent = ", ".join(f"{group} {short(n)}" for group, n in last.sent.items() if n and group != "world")
    scale = f", scale {last.scale:g}" if last.scale != 1 else ""
    return f"loss {last.loss:.4f}, {rate:,.0f} tokens/s{scale}" + (f", sent {sent}" if sent else "")


def short(n: float) -> str:
    """Return a number of bytes in a few characters."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"


def fraction(text: str) -> float:
    """Read a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0, and finite")
    return value


# ------------------------------------------------------------- verbs that teach: schedule, show, mistakes, figures

STORIES = ("ring", "dp", "zero1", "zero2", "zero3", "tp", "pp", "checkpoint", "fp16", "hybrid")
PICTURES = ("memory", "ring", "pipeline", "run", "fp16", "loss", "error")


def teaching(verbs: Any) -> None:
    """Add the verbs that teach; what they do is in :mod:`refpar.teach.verbs`."""
    p = verbs.add_parser("schedule", help="draw a pipeline schedule and say what follows from it")
    p.add_argument(
        "schedule", metavar="SCHEDULE", help="gpipe, 1f1b, or a file with a line such as 'F0 F1 B0 B1' a stage"
    )
    p.add_argument("--stages", metavar="K", type=positive, help="stages of gpipe or 1f1b (default: 4)")
    p.add_argument("--micro-batches", metavar="M", type=positive, help="micro-batches of gpipe or 1f1b (default: 8)")
    p.add_argument("--forward", metavar="C", type=cost, default=1, help="time of a forward pass (default: 1)")
    p.add_argument("--backward", metavar="C", type=cost, default=1, help="time of a backward pass (default: 1)")
    p.add_argument("--capacity", metavar="N", type=natural, help="messages each edge has room for; 0 is rendezvous")
    p.add_argument("--plot", metavar="FILE", type=Path, help="draw it: a name that ends in .svg, .png or .pdf")
    p.add_argument("--trace", metavar="FILE", type=Path, help="write it for ui.perfetto.dev or chrome://tracing")
    p.set_defaults(verb=schedule)
    p = verbs.add_parser("show", help="run a technique very small and tell what each rank holds, sends and computes")
    p.add_argument("name", metavar="NAME", type=story, help=f"one of {', '.join(STORIES)}")
    p.set_defaults(verb=lambda options: teach("show", options.name))
    p = verbs.add_parser("mistakes", help="list the mistakes that people make, or make one beside the truth")
    p.add_argument("name", metavar="NAME", nargs="?", help="the mistake to make; without it they are listed")
    p.add_argument("--steps", metavar="N", type=up_to(MOST_KEPT), default=12, help="optimizer steps (default: 12)")
    p.set_defaults(verb=mistakes)
    p = verbs.add_parser("figures", help="draw every picture, from runs done here and now (needs refpar[plot])")
    p.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="folder to write to")
    p.add_argument("--format", choices=("svg", "png", "pdf"), default="svg", help="(default: svg)")
    p.add_argument("--only", metavar="NAME,…", type=pictures, default=PICTURES, help=f"of {', '.join(PICTURES)}")
    p.set_defaults(verb=lambda options: teach("figures", options.output, options.format, options.only))


def teach(verb: str, *arguments: Any) -> int:
    """Run a verb of :mod:`refpar.teach.verbs`."""
    from refpar.teach import verbs

    try:
        return int(getattr(verbs, verb)(*arguments))
    except verbs.Refused as error:
        raise BadInput(error) from None


def recording(options: argparse.Namespace) -> Callable[[int], Any]:
    """Return what opens worlds that record what their ranks do, for ``--trace``."""
    from refpar import arrays
    from refpar.teach.recorder import RecordedWorld

    if options.transport != "processes":
        raise BadInput("--trace records the processes of this machine: leave out --transport mpi")
    return functools.partial(RecordedWorld, backend=arrays.chosen_backend(options.backend))


def schedule(options: argparse.Namespace) -> int:
    """``refpar schedule``."""
    o = options
    costs = o.forward, o.backward
    stages, micro_batches = o.stages or 4, o.micro_batches or 8
    if 2 * stages * micro_batches > MOST_PASSES:
        raise BadInput(
            f"{stages} stages of {micro_batches} micro-batches have more passes than are drawn: {MOST_PASSES:,}"
        )
    return teach("schedule", o.schedule, o.stages, o.micro_batches, *costs, o.capacity, o.plot, o.trace)


def mistakes(options: argparse.Namespace) -> int:
    """``refpar mistakes``."""
    return teach("list_mistakes") if options.name is None else teach("one_mistake", options.name, options.steps)


def cost(text: str) -> Any:
    """Read the time of a pass: a whole number, a decimal one, or a fraction such as 3/2."""
    import re
    from fractions import Fraction

    if not re.fullmatch(r"\d{1,9}(\.\d{1,9}|/0*[1-9]\d{0,8})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is no number such as 2, 1.5 or 3/2")
    value = Fraction(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def story(text: str) -> str:
    """Read the name of a technique to be shown."""
    return several(text.replace(",", " "), "story", STORIES)[0]


def pictures(text: str) -> list[str]:
    """Read ``figures --only``."""
    return several(text, "picture", PICTURES)


# On paper: refpar.plan


def planning(verbs: Any) -> None:
    """Add ``memory`` and ``plan``."""
    from refpar.plan import arguments

    for name, add, description in (
        ("memory", arguments.memory, arguments.MEMORY),
        ("plan", arguments.plan, arguments.PLAN),
    ):
        p = verbs.add_parser(name, help=description.partition(":")[0], description=description)
        add(p)
        p.set_defaults(verb=on_paper, on_paper=name)


def on_paper(options: argparse.Namespace) -> int:
    """``refpar memory`` and ``refpar plan``."""
    from refpar.plan import verbs

    try:
        status, report = {"memory": verbs.memory_verb, "plan": verbs.plan_verb}[options.on_paper](options)
    except ValueError as error:
        raise BadInput(error) from None
    write_json(options.json, report)
    return status


# ------------------------------------------------------------- verbs that check others: golden, compare


def checking(verbs: Any) -> None:
    """Add ``golden`` and ``compare``."""
    p = verbs.add_parser(
        "golden",
        help="write a case and its answer, for other people's implementations",
        description="Write a folder with a complete problem, its answer in float64 and what an honest implementation "
        "may differ by, in files that a program in any language can use without refpar.",
    )
    p.add_argument("name", metavar="NAME", nargs="?", help="of a case; --list shows them")
    p.add_argument("--list", action="store_true", help="print the named cases, one a line")
    p.add_argument("--format", action="store_true", help="print what is in the files, and what is promised of them")
    p.add_argument("--case", metavar="FILE", type=Path, help="a case of your own, as JSON")
    p.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="the folder to write: new or empty, in one that is there"
    )
    p.add_argument("--dtype", choices=("float16", "float32", "float64"), help="that candidates compute in")
    p.set_defaults(verb=golden)
    p = verbs.add_parser(
        "compare",
        help="hold somebody's numbers to a golden, or to their own single-device run",
        usage="refpar compare GOLDEN CANDIDATE… [options]\n"
        "       refpar compare --reference DUMP CANDIDATE… [--control DUMP …] [options]",
        description="Walk the values of a dump in causal order and report the first that is wrong. A dump is a "
        ".safetensors or .npz file, several (one a rank), or a folder of them.",
    )
    p.add_argument("paths", metavar="PATH", nargs="+", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--reference", metavar="DUMP", type=Path, help="a dump of your own single-device run, for any model")
    p.add_argument(
        "--control", metavar="DUMP", type=Path, action="append", default=[],
        help="another run that is right, such as the single device with the batch in another order: sets the threshold",
    )  # fmt: skip
    p.add_argument("--sharding", metavar="FILE", type=Path, help="JSON that says how the ranks' pieces make a whole")
    p.add_argument("--steps", metavar="N", type=positive, help="compare the first N steps only")
    p.add_argument("--sha256", metavar="HEX", help="the golden must be the one with this checksum")
    p.add_argument("--no-explain", action="store_true", help="do not replay known mistakes where a candidate differs")
    p.add_argument("--json", metavar="PATH", help="write the results as JSON; - for standard output")
    p.add_argument("--junit", metavar="PATH", help="write the results as JUnit XML; - for standard output")
    p.set_defaults(verb=comparison)


def golden(options: argparse.Namespace) -> int:
    """``refpar golden``."""
    from refpar.oracle import verbs
    from refpar.oracle.golden import BadGolden

    try:
        text = verbs.golden_text(
            options.name, options.case, options.output, options.dtype, listed=options.list, explained=options.format
        )
    except (BadGolden, ValueError) as error:
        raise BadInput(error) from None
    except OSError as error:
        raise BadInput(f"-o {options.output}: {error.strerror}") from None
    print(text)
    return MATCHED


def comparison(options: argparse.Namespace) -> int:
    """``refpar compare``."""
    from refpar.oracle import verbs
    from refpar.oracle.dumps import BadDump
    from refpar.oracle.golden import BadGolden

    check_places(options, "json", "junit")
    if options.json == options.junit == "-":
        raise BadInput("--json - and --junit - cannot both go to standard output")
    try:
        result, name, digest = verbs.compare(
            options.paths,
            reference=options.reference,
            controls=options.control,
            sharding=options.sharding,
            steps=options.steps,
            sha256=options.sha256,
            explained=not options.no_explain,
        )
    except (BadGolden, BadDump, ValueError) as error:
        raise BadInput(error) from None
    text, report, junit = verbs.report(result, name, digest)
    to_stdout = "-" in (options.json, options.junit)
    print(text, file=sys.stderr if to_stdout else sys.stdout)
    write_json(options.json, report)
    if options.junit == "-":
        sys.stdout.write(junit)
    elif options.junit:
        write(Path(options.junit), junit, "--junit")
    return MATCHED if result.ok else MISMATCH


# ------------------------------------------------------------------------------- other people's code: conformance


def conforming(verbs: Any) -> None:
    """Add ``conformance``."""
    p = verbs.add_parser(
        "conformance",
        help="run the battery against an implementation of your own, through one small adapter",
        description="Hold the operations and the training that an adapter has to one device, on examples that "
        "Hypothesis draws and shrinks. What an adapter is: python -m pydoc refpar.conformance",
    )
    p.add_argument("adapter", metavar="PACKAGE.MODULE:CLASS", nargs="?", help="the adapter")
    p.add_argument("--examples", metavar="N", type=positive, default=50, help="examples a check (default: 50)")
    p.add_argument("--only", metavar="CHECK,…", help="names of checks, or parts of them")
    p.add_argument("--known", metavar="FILE", help="known failures, a line each: CHECK: the reason")
    p.add_argument("--write", metavar="DIR", help="write failing examples, shrunk, as goldens to this folder")
    p.add_argument("--report", metavar="FILE", help="write what became of each check as JSON")
    p.add_argument("--list", action="store_true", help="say what is checked, and stop")
    p.set_defaults(verb=conformance)


def conformance(options: argparse.Namespace) -> int:
    """``refpar conformance``."""
    from refpar.conformance import verb

    if problem := verb.missing():
        raise BadInput(problem)
    if options.list:
        return verb.listing()
    if options.adapter is None:
        raise BadInput("conformance needs an adapter, PACKAGE.MODULE:CLASS; --list shows what is checked")
    check_places(options, "report")
    if options.only:
        check_parts(options.only.split(","), verb.names())
    o = options
    return verb.run(o.adapter, o.examples, o.only, o.known, o.write, o.report)


def check_parts(parts: Sequence[str], known: Sequence[str]) -> None:
    """Refuse what is no part of any of the ``known`` names of checks."""
    from refpar.checks import meant

    for part in parts:
        if not part.isidentifier() or not any(part in name for name in known):
            raise BadInput(f"--only: no check is called {part!r}: {meant(part, known, '--list shows them')}")
