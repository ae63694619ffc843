"""The verbs that check other people's code: ``golden``, ``compare``, ``conformance``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refpar.cli.places import check_places, write, write_json
from refpar.cli.words import MATCHED, MISMATCH, BadInput, positive


def add(verbs: Any) -> None:
    """Add the verbs that check others."""
    checking(verbs)
    conforming(verbs)


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
        help="another run that is right, such as the single device with the batch in another order: sets what is "
        "allowed; give four",
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
