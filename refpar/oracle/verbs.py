"""What ``refpar golden`` and ``refpar compare`` do, for the command line to call."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from refpar import arrays
from refpar.oracle import candidate, control, dumps, explain, golden, reports
from refpar.oracle.compare import Comparison
from refpar.oracle.dumps import REPLICAS, BadDump, Dump, open_dump


def golden_text(
    name: str | None, case: Path | None, folder: Path | None, dtype: str | None, *, listed: bool, explained: bool
) -> str:
    """Write a golden, or say what there is; return what to print.

    Raises
    ------
    ValueError, golden.BadGolden
        With one line that says what is wrong.
    """
    if explained:
        return f"{golden.__doc__}\n{dumps.__doc__}\n{golden.read_case.__doc__}"
    if listed:
        return "\n".join(f"{each:18} {what}" for each, what in golden.listing().items())
    if (name is None) == (case is None):
        raise ValueError("golden needs the NAME of a case, or --case FILE; --list shows the names")
    if folder is None:
        raise ValueError("golden needs -o DIR, the folder to write")
    golden.check_folder(folder)
    if case is not None:
        known, what, own, layout = golden.read_case(case)
        made = golden.build(known, what, golden.in_dtype(own, dtype), layout)
    else:
        assert name is not None
        made = golden.make(name, dtype)
    made.write(folder)
    values = f"{len(made.expected)} values, {made.tier} in {made.dtype}"
    return f"{folder}: {made.name}: {values}\nsha256 {made.digest}"


def compare(
    paths: list[Path],
    *,
    reference: Path | None,
    controls: list[Path],
    sharding: Path | None,
    steps: int | None,
    sha256: str | None,
    explained: bool = True,
) -> tuple[Comparison, str, str]:
    """Return the comparison, the name of what was compared, and the digest of the golden.

    Parameters
    ----------
    explained : whether to replay the known mistakes where numbers of a candidate differ from a golden's

    Raises
    ------
    ValueError, golden.BadGolden, dumps.BadDump
        With one line that says what is wrong.
    """
    if reference is not None:
        if sha256:
            raise ValueError("--sha256 is of a golden, and --reference is none")
        others = [open_dump([path]) for path in controls]
        dump = open_dump(paths, sharding)
        return control.against(open_dump([reference]), dump, others, steps=steps), paths[0].name, ""
    if controls:
        raise ValueError("--control goes with --reference: a golden brings its own bounds")
    if len(paths) < 2:
        raise ValueError("compare needs a golden and a candidate, or --reference DUMP and a candidate")
    digest = golden.check_sums(paths[0])
    if sha256 and digest != sha256.lower():
        raise ValueError(f"{paths[0]} has the SHA-256 {digest}, not {sha256}")
    made = golden.load(paths[0])
    if steps is not None and steps > made.steps:
        raise ValueError(f"--steps {steps}: {paths[0]} has {made.steps} steps")
    dump = open_dump(paths[1:], sharding)
    result = candidate.check(made, dump, steps=steps)
    numbers = any(found.problem == "" or found.problem.startswith(REPLICAS) for found in result.divergences)
    if explained and numbers and made.case is not None and made.layout is not None:
        result.notes.extend(explanation(made, dump, result))
    return result, made.name, digest


def explanation(made: golden.Golden, dump: Dump, result: Comparison) -> list[str]:
    """Return what is known of the mistake that a candidate has made, in lines."""
    assert made.case is not None
    assert made.layout is not None
    names = candidate.aliases(dump, made.expected)
    got = {}
    for name, own in names.items():
        with contextlib.suppress(BadDump, ValueError):  # told already, with all that is wrong with it
            got[name] = dump.read(own)[0].reshape(made.expected[name].shape)
    if not got:
        return []
    first = result.first.name if result.first else ""
    dtype = made.dtype
    try:
        told = explain.explain(got, made.case, made.layout, made.expected, made.bound, dtype=dtype, first=first)
    except (ValueError, OSError, arrays.Unavailable) as error:
        return [f"the known mistakes could not be replayed: {error}"]
    return str(told).splitlines()


def report(comparison: Comparison, name: str, digest: str) -> tuple[str, dict[str, Any], str]:
    """Return a comparison as text, for JSON, and as JUnit XML."""
    return (
        reports.as_text(comparison, name), reports.as_json(comparison, name, digest), reports.as_junit(comparison, name)
    )  # fmt: skip
