"""``refpar verify``: run every technique, and print a row of what was compared for each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refpar.cli.learn import teach
from refpar.cli.places import check_places, read, write_json
from refpar.cli.ranks import ranks_for, recording, where
from refpar.cli.words import MATCHED, MISMATCH, MOST_KEPT, WIDTH, BadInput, layout, natural, rank_counts, several, up_to

if TYPE_CHECKING:
    from refpar.oracle.verify import Problem, Row

TECHNIQUES = ("ring", "dp", "zero1", "zero2", "zero3", "tp", "pp", "hybrid", "checkpoint", "fp16")


def add(verbs: Any) -> None:
    """Add ``verify``."""
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


def names(text: str) -> list[str]:
    """Read ``--only``."""
    return several(text, "technique", TECHNIQUES)


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
