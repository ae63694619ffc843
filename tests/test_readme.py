"""The README is what a newcomer believes: what it says to run is run, here or in CI, and what it names is there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()

COMMANDS = re.findall(r"^\$ (.+)$", README, re.MULTILINE)
ELSEWHERE = ("python -m pip", "python -m pytest", "mpiexec", "srun", "python benchmarks/")
"""What is too long, or needs more than a plain install: CI runs these, tests of their own, or the reader."""


def test_two_commands_are_those_of_ci() -> None:
    """CI runs what the README tells a newcomer to run."""
    first, second = COMMANDS[:2]
    for command in [*first.split(" && "), second]:
        assert command.replace("python -m pip install", "python -m pip install --quiet") in CI


def test_python_runs(tmp_path: Path) -> None:
    """The Python in it runs from top to bottom, as a script without a guard."""
    script = tmp_path / "readme.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL)))
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "matches: " in done.stdout


def test_commands_run(tmp_path: Path) -> None:
    """Every command of refpar that it shows ends as it says, one after the other in one folder."""
    for command in COMMANDS:
        if command.startswith(ELSEWHERE):
            continue
        command, _, comment = command.partition("  # ")
        words = shlex.split(command)
        assert words[0] == "refpar", command
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                              env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})  # fmt: skip
        expected = int(comment.removeprefix("exit status ")) if comment.startswith("exit status") else 0
        assert done.returncode == expected, f"{command}: {done.stderr}"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((\w[\w/.]+)\)", README))))
def test_links_lead_somewhere(path: str) -> None:
    """Files that it names exist."""
    assert (ROOT / path).exists()
