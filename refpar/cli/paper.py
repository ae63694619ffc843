"""On paper: ``memory`` and ``plan``; the arithmetic is in :mod:`refpar.plan`."""

from __future__ import annotations

import argparse
from typing import Any

from refpar.cli.places import write_json
from refpar.cli.words import BadInput


def add(verbs: Any) -> None:
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
