"""The README is what a newcomer believes: what it says to run is run, here or in CI, and prints what it shows."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_golden import PINNED
from test_mpi import needs_mpi

from refpar.oracle import golden

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()

FILES = dict(re.findall(r"```py\n# (\w+\.py)\n(.*?)```", README, re.DOTALL))
"""Programs that it shows, by the name in their first line."""

CHANGES = ("refpar mistakes", "refpar train", "refpar conformance", "mpiexec")
"""Commands that run on the source of refpar, draw examples, or say how fast: their numbers are not always the same."""


@dataclass(frozen=True)
class Shown:
    """A command as the README shows it, and the lines beneath."""

    command: str
    lines: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command.partition("  # ")[0])

    @property
    def status(self) -> int:
        comment = self.command.partition("  # exit status ")[2]
        return int(comment) if comment else 0


def commands() -> list[Shown]:
    """Return every command after a ``$``, with what it prints."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL):
        parts = re.split(r"^\$ (.+)$", block, flags=re.MULTILINE)[1:]
        for command, output in zip(parts[::2], parts[1::2], strict=True):
            lines = tuple(x.rstrip() for x in output.splitlines() if x.strip() and x != "[...]")
            found.append(Shown(command, lines))
    return found


COMMANDS = commands()


def masked(line: str) -> str:
    """Return a line without its numbers, names of parameters, and spacing."""
    names = re.sub(r"[a-z]\w*(\.\w+)*\.(weight|bias)\b", "name", line)
    return " ".join(re.sub(r"[-+]?[\d.,]+(e-?\d+)?|none", "#", names).split())


def run(shown: Shown, folder: Path) -> None:
    """Run a command in ``folder``; it must end as it says, and print the lines that stand beneath it."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    shim = programs / "refpar"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m refpar "$@"\n')
    shim.chmod(0o755)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    done = subprocess.run(
        shown.words, cwd=folder, capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": str(ROOT), "PATH": path, "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == shown.status, f"{shown.command}: {done.stderr}"
    same = masked if shown.command.startswith(CHANGES) else str.rstrip
    printed = {same(line) for line in done.stdout.splitlines()}
    assert [line for line in shown.lines if same(line) not in printed] == [], done.stdout


def test_two_commands_are_those_of_ci() -> None:
    """CI runs what the README tells a newcomer to run."""
    first, second = COMMANDS[:2]
    for command in [*first.command.split(" && "), second.command]:
        assert command.replace("python -m pip install", "python -m pip install --quiet") in CI


def test_python_runs(tmp_path: Path) -> None:
    """The Python in it runs from top to bottom, as a script without a guard."""
    script = tmp_path / "readme.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)))
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "matches: " in done.stdout


def needs(shown: Shown) -> str:
    """Return the extra that a command needs, and ``""`` where a plain install will do."""
    source = "".join(FILES.get(word.partition(":")[0].removesuffix(".py") + ".py", "") for word in shown.words)
    if "mpiexec" in shown.words or shown.command.endswith("by MPI"):
        return "mpi"
    return "torch" if "torch" in source else ""


def of(extra: str) -> list[Shown]:
    """Return the commands, all but the first two, that need ``extra``."""
    return [shown for shown in COMMANDS[2:] if needs(shown) == extra]


def test_commands_run(tmp_path: Path) -> None:
    """Every command of refpar that it shows, one after the other in one folder."""
    assert len(of("")) > 8
    for shown in of(""):
        run(shown, tmp_path)


@needs_mpi
def test_commands_that_need_mpi_run(tmp_path: Path) -> None:
    """An all-reduce of one's own is held to a golden, and to the battery."""
    assert len(of("mpi")) == 3
    run(Shown("refpar golden all-reduce -o golden", ()), tmp_path)
    for shown in of("mpi"):
        run(shown, tmp_path)


@pytest.mark.torch
def test_commands_that_need_torch_run(tmp_path: Path) -> None:
    """A training step of one's own; and what PyTorch computes wrongly."""
    pytest.importorskip("torch", reason="torch is not installed (pip install 'refpar[torch]' brings it)")
    assert len(of("torch")) == 2
    for shown in of("torch"):
        run(shown, tmp_path)


def test_golden_of_the_recipe_is_the_pinned_one() -> None:
    """CI of a reader stays green as long as the promise of the format holds."""
    assert f"--sha256 {PINNED['integers-zero']}" in README


def test_cases_are_counted_right() -> None:
    """As many named cases as it says in words."""
    words = ("fourteen", "fifteen", "sixteen", "seventeen", "eighteen")
    assert f"`refpar golden --list` has {words[len(golden.listing()) - 14]} cases" in README


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((\w[\w/.]+)\)", README))))
def test_links_lead_somewhere(path: str) -> None:
    """Files that it names exist."""
    assert (ROOT / path).exists()
