"""The pictures: what they show is what was measured, and it can be read."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from refpar import cli
from refpar.parallel import schedule
from refpar.parallel.simulator import simulate
from refpar.teach import measure

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'refpar[plot]'")

from refpar.teach import figures  # noqa: E402

MEASURED = ("memory", "ring_states", "real_run", "vanishing", "errors", "mistaken")


@pytest.fixture(scope="module")
def drawn() -> Iterator[dict[str, Any]]:
    """Every picture, drawn once; what was measured for it is kept for whoever asks again."""
    with pytest.MonkeyPatch.context() as patch:
        for name in MEASURED:
            patch.setattr(measure, name, functools.cache(getattr(measure, name)))
        traces = list(measure.traces())
        patch.setattr(measure, "traces", lambda: traces)
        yield {name: draw() for name, draw in figures.PICTURES.items()}
    matplotlib.pyplot.close("all")


def test_pictures_are_those_on_offer() -> None:
    """The command line names those there are."""
    assert tuple(figures.PICTURES) == cli.PICTURES


@pytest.mark.parametrize("name", cli.PICTURES)
def test_picture_can_be_read(drawn: dict[str, Any], name: str) -> None:
    """Every axis says what it shows and in what unit, no text is smaller than 7 points or runs off the page."""
    fig = drawn[name]
    fig.canvas.draw()
    page = fig.bbox
    for ax in fig.axes:
        if ax.axison:
            assert ax.get_title(loc="left")
            assert ax.get_xlabel() or len(fig.axes) > 1  # else that of the axes below
    assert fig.axes[-1].get_xlabel()
    undrawn = {id(text) for ax in fig.axes for text in undrawn_ticks(ax)}
    for text in fig.findobj(matplotlib.text.Text):
        if text.get_visible() and text.get_text().strip() and id(text) not in undrawn:
            assert text.get_fontsize() >= 7, text
            box = text.get_window_extent()
            assert page.x0 - 1 <= box.x0 <= box.x1 <= page.x1 + 1, text
            assert page.y0 - 1 <= box.y0 <= box.y1 <= page.y1 + 1, text


def undrawn_ticks(ax: Any) -> Iterator[Any]:
    """Yield the labels of ticks that lie outside the range of their axis, or of an axis that is not drawn."""
    for i, axis in enumerate((ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks() + axis.get_minor_ticks():
            for label in (tick.label1, tick.label2):
                if not ax.axison or not low <= label.get_position()[i] <= high:
                    yield label


SAFE = {"#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442"}


@pytest.mark.parametrize("name", cli.PICTURES)
def test_colours_are_safe_for_the_colour_blind(drawn: dict[str, Any], name: str) -> None:
    """Every saturated colour is one of Okabe & Ito's, or a shade of their blue."""
    used = set()
    for ax in drawn[name].axes:
        used |= {matplotlib.colors.to_hex(patch.get_facecolor()) for patch in ax.patches}
        used |= {matplotlib.colors.to_hex(line.get_color()) for line in ax.lines}
    blue = matplotlib.colors.rgb_to_hsv(matplotlib.colors.to_rgb("#0072b2"))[0]
    for colour in used - SAFE:
        hue, saturation, value = matplotlib.colors.rgb_to_hsv(matplotlib.colors.to_rgb(colour))
        assert saturation < 0.05 or value == 0 or abs(hue - blue) < 0.03, colour


def test_memory_is_that_of_the_paper(drawn: dict[str, Any]) -> None:
    """Weights, gradients and optimizer: 2 + 2 + 12 bytes a parameter, and what each stage leaves of them."""
    psi, found = measure.memory(4)
    stages = [(2, 2, 12), (2, 2, 3), (2, 0.5, 3), (0.5, 0.5, 3)]
    for memory, expected in zip(found.values(), stages, strict=True):
        got = memory.weights / psi, memory.gradients / psi, memory.optimizer / psi
        # The fullest rank has up to one element more of each parameter than a fourth: 36 of them, under 14 bytes each.
        assert got == pytest.approx(expected, abs=36 * 14 / psi)
        assert memory.activations > 0


def test_ring_is_that_of_the_docstring(drawn: dict[str, Any]) -> None:
    """After step 0 rank 0 has a2 + d2; after three its chunk 0 is complete; after six everything is, everywhere."""
    states = measure.ring_states(4)
    assert len(states) == 7
    assert states[1][0][2] == "ad"
    assert states[3] == [
        ["abcd", "acd", "ad", "a"],
        ["b", "abcd", "abd", "ab"],
        ["bc", "c", "abcd", "abc"],
        ["bcd", "cd", "d", "abcd"],
    ]
    assert states[6] == [["abcd"] * 4] * 4


def test_loss_scaling_saves_gradients(drawn: dict[str, Any]) -> None:
    """A good part of the logits' gradient is below 2^-24. The scale saves 99 of 100 weights' gradients that are lost.

    The text is the package's own source, so every change of that is another draw.
    """
    seen = measure.vanishing()
    assert (seen.logits < 2.0**-24).mean() > 0.2
    assert seen.lost[0] > 0
    assert seen.lost[1] <= seen.lost[0] / 100
    assert (seen.logits * seen.scale < 65504).all()


def test_techniques_are_inside_and_mistakes_outside(drawn: dict[str, Any]) -> None:
    """Each error is within its bound, each mistake a million bounds off; losses in float64 agree to the last digits."""
    assert all(ratio <= 1 for ratio in measure.errors().values())
    assert len(measure.errors()) == len(measure.TECHNIQUES)
    assert len(measure.mistaken()) >= 8
    assert min(measure.mistaken().values()) >= 1e6
    right = [step.loss for step in measure.truth().steps]
    for name, trace in measure.traces():
        # float64: a few roundings of the loss itself; halves: their activations have 11 digits.
        assert [step.loss for step in trace.steps] == pytest.approx(right, rel=2.0**-11 if name == "fp16" else 2.0**-45)


def test_a_picture_is_the_same_file_each_time(tmp_path: Path) -> None:
    """Nothing in it depends on the day; and the kinds of file are those that the name says."""
    simulations = {"1F1B": simulate(schedule.one_f_one_b(3, 4))}
    for kind in figures.KINDS:
        figures.save(figures.timelines(simulations), tmp_path / f"a{kind}")
    figures.save(figures.timelines(simulations), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_timeline_is_the_simulation(tmp_path: Path) -> None:
    """A bar for each pass, as long as it takes, where it takes place."""
    simulation = simulate(schedule.gpipe(3, 4), backward=2)
    fig = figures.timelines({"GPipe": simulation})
    bars = sorted((p.get_x(), round(p.get_y() + p.get_height() / 2), p.get_width()) for p in fig.axes[0].patches)
    spans = sorted(
        (float(span.start), stage, float(span.end - span.start))
        for stage, spans in enumerate(simulation.spans)
        for span in spans
    )
    assert np.allclose(bars, spans)
    figures.save(fig, tmp_path / "x.svg")


def test_plot_and_figures_write_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``refpar schedule --plot`` and ``refpar figures``, and what they say of names that cannot be."""
    assert cli.main(["schedule", "gpipe", "--plot", str(tmp_path / "p.svg")]) == cli.MATCHED
    assert cli.main(["figures", "-o", str(tmp_path / "new"), "--only", "pipeline", "--format", "png"]) == cli.MATCHED
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["p.svg", "pipeline.png"]
    capsys.readouterr()
    assert cli.main(["schedule", "gpipe", "--plot", str(tmp_path / "p.doc")]) == cli.BAD_INPUT
    assert "p.doc must end in .svg, .png, .pdf" in capsys.readouterr().err
    assert cli.main(["schedule", "gpipe", "--plot", str(tmp_path / "no" / "p.svg")]) == cli.BAD_INPUT
    assert "No such file or directory" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["figures", "-o", str(tmp_path / "file"), "--only", "pipeline"]) == cli.BAD_INPUT
    assert "File exists" in capsys.readouterr().err


WITHOUT = """
import sys
sys.modules["matplotlib"] = None
from refpar import cli
sys.exit(cli.main(["figures", "-o", sys.argv[1]]))
"""


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path) -> None:
    """Exit status 2 and one line, before anything is run or made."""
    folder = tmp_path / "pictures"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == cli.BAD_INPUT
    assert done.stderr == "refpar: matplotlib is not installed: pip install 'refpar[plot]'\n"
    assert not folder.exists()
