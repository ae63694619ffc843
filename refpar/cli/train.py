"""``refpar train``: a real run on a text, watched, saved and resumed; the steps are in :mod:`refpar.longrun`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from refpar.cli.learn import teach
from refpar.cli.places import check_places, read, speaks
from refpar.cli.ranks import ranks_for, recording, where
from refpar.cli.words import INTERRUPTED, MATCHED, MOST_RANKS, WIDTH, BadInput, fraction, natural, positive, up_to

MOST_LAYERS = 1000


def add(verbs: Any) -> None:
    """Add ``train``; what it does is in :mod:`refpar.longrun`."""
    p = verbs.add_parser(
        "train",
        help="train a GPT on the bytes of a text, in any layout, on real processes",
        description="Train a GPT on the bytes of a text. The layout changes how the work is split and nothing else: "
        "a run can be saved, and resumed in another.",
    )
    p.add_argument("--data", metavar="FILE", type=Path, help="text to train on (default: the source of refpar)")
    p.add_argument("--steps", metavar="N", type=positive, default=200, help="steps in all, before --resume too (200)")
    p.add_argument("--save", metavar="PATH", type=Path, help="where to save at the end, or on Ctrl-C or SIGTERM")
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
