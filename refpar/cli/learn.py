"""The verbs that teach: ``schedule``, ``show``, ``mistakes``, ``figures``; they act in :mod:`refpar.teach.verbs`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from refpar.cli.words import MOST_KEPT, BadInput, cost, natural, positive, several, up_to

MOST_PASSES = 10_000  # of a schedule that is drawn, forward and backward ones on all stages
STORIES = ("ring", "dp", "zero1", "zero2", "zero3", "tp", "pp", "checkpoint", "fp16", "hybrid")
PICTURES = ("memory", "ring", "pipeline", "run", "fp16", "loss", "error")


def add(verbs: Any) -> None:
    """Add the verbs that teach."""
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


def story(text: str) -> str:
    """Read the name of a technique to be shown."""
    return several(text.replace(",", " "), "story", STORIES)[0]


def pictures(text: str) -> list[str]:
    """Read ``figures --only``."""
    return several(text, "picture", PICTURES)
