"""The command line: one verb a task, and no mathematics.

Exit status: 0 matched; 1 a mismatch, with the first wrong number named; 2 bad input; 3 the run itself
failed; 130 on Ctrl-C.

Here is what all verbs have in common. Each file beside this one adds some verbs to the parser, and hands what they
are given to the package that does the work: ``verify.py``, ``train.py``, ``learn.py`` (schedule, show, mistakes,
figures), ``paper.py`` (memory, plan), ``check.py`` (golden, compare, conformance). ``words.py`` reads what was typed,
``places.py`` files, and ``ranks.py`` says where ranks run.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence

from refpar import output
from refpar.cli import check, learn, paper, train, verify
from refpar.cli.learn import PICTURES, STORIES
from refpar.cli.verify import TECHNIQUES
from refpar.cli.words import BAD_INPUT, FAILED, INTERRUPTED, MATCHED, MISMATCH, BadInput, Parser

__all__ = [
    "BAD_INPUT", "FAILED", "INTERRUPTED", "MATCHED", "MISMATCH", "PICTURES", "STORIES", "TECHNIQUES", "BadInput",
    "main", "parser",
]  # fmt: skip


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
    for verb in (verify, train, learn, paper, check):
        verb.add(verbs)
    return top
