"""What ``refpar golden`` and ``refpar compare`` do, for the command line to call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refpar.oracle import candidate, control, golden, reports
from refpar.oracle.compare import Comparison
from refpar.oracle.dumps import open_dump


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
        return str(golden.__doc__)
    if listed:
        return "\n".join(f"{each:18} {what}" for each, what in golden.listing().items())
    if (name is None) == (case is None):
        raise ValueError("golden needs the NAME of a case, or --case FILE; --list shows the names")
    if folder is None:
        raise ValueError("golden needs -o DIR, the folder to write")
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
) -> tuple[Comparison, str, str]:
    """Return the comparison, the name of what was compared, and the digest of the golden.

    Raises
    ------
    ValueError, golden.BadGolden, dumps.BadDump
        With one line that says what is wrong.
    """
    if reference is not None:
        if sha256:
            raise ValueError("--sha256 is of a golden, and --reference is none")
        others = [open_dump([path]) for path in controls]
        return control.against(open_dump([reference]), open_dump(paths, sharding), others), paths[0].name, ""
    if controls:
        raise ValueError("--control goes with --reference: a golden brings its own bounds")
    if len(paths) < 2:
        raise ValueError("compare needs a golden and a candidate, or --reference DUMP and a candidate")
    digest = golden.check_sums(paths[0])
    if sha256 and digest != sha256.lower():
        raise ValueError(f"{paths[0]} has the SHA-256 {digest}, not {sha256}")
    made = golden.load(paths[0])
    return candidate.check(made, open_dump(paths[1:], sharding), steps=steps), made.name, digest


def report(comparison: Comparison, name: str, digest: str) -> tuple[str, dict[str, Any], str]:
    """Return a comparison as text, for JSON, and as JUnit XML."""
    return (
        reports.as_text(comparison, name), reports.as_json(comparison, name, digest), reports.as_junit(comparison, name)
    )  # fmt: skip
