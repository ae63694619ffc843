"""The pictures of ``refpar figures``, drawn by matplotlib from what :mod:`refpar.teach.measure` has just run.

matplotlib is the extra ``plot``, and is imported when something is drawn, not before. Colours are those of Okabe & Ito
(2008), which the colour-blind tell apart; what they say is also said by a hatch, a marker or a word, for print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from refpar.arrays import Unavailable
from refpar.case import Layout
from refpar.parallel import schedule
from refpar.parallel.schedule import Forward
from refpar.parallel.simulator import Simulation, peak_live, simulate
from refpar.teach import measure
from refpar.teach.recorder import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#000000", "#BBBBBB"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "svg.hashsalt": "refpar",
}
KINDS = (".svg", ".png", ".pdf")


def library() -> Any:
    """Return matplotlib's pyplot, set up to draw to files.

    Raises
    ------
    Unavailable
        Where it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise Unavailable("matplotlib is not installed: pip install 'refpar[plot]'") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Return an empty figure as wide as a page, and its axes."""
    return library().subplots(rows, columns, figsize=(7.2, height), layout="constrained", **options)  # type: ignore[no-any-return]


def save(drawn: Figure, path: Path) -> None:
    """Write a figure; the same figure is the same file.

    Raises
    ------
    ValueError
        Where the name does not end in one of the kinds that are known, or cannot be written.
    """
    if path.suffix not in KINDS:
        raise ValueError(f"{path} must end in {', '.join(KINDS)}")
    try:
        drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    finally:
        library().close(drawn)


def draw_all(folder: Path, kind: str, only: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Draw the named pictures into ``folder``, and yield each with its file as soon as it is there."""
    for name in only:
        path = folder / f"{name}.{kind}"
        save(PICTURES[name](), path)
        yield name, path


# ----------------------------------------------------------------------------------------------- memory


def memory() -> Figure:
    """Bytes held on a device at each stage of ZeRO, measured, beside the formulas."""
    ranks = 4
    psi, found = measure.memory(ranks)
    fig, ax = figure(3.4)
    parts = {
        "weights, fp16": ("weights", BLUE, ""),
        "gradients, fp16": ("gradients", ORANGE, "//"),
        "masters and Adam's moments, fp32": ("optimizer", GREEN, ".."),
        "activations": ("activations", GREY, ""),
    }
    names = list(found)
    left = np.zeros(len(names))
    for label, (field, colour, hatch) in parts.items():
        widths = np.array([getattr(found[name], field) for name in names]) / psi
        ax.barh(names, widths, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, label=label)
        left += widths
    formulas = [16.0, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]
    words = ["16 Ψ", "(4 + 12/N) Ψ", "(2 + 14/N) Ψ", "16 Ψ/N"]
    for y, (value, word, whole) in enumerate(zip(formulas, words, left, strict=True)):
        ax.plot(
            [value, value],
            [y - 0.46, y + 0.46],
            color=BLACK,
            linewidth=2,
            label="paper, without activations" if y == 0 else None,
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.text(whole + 0.2, y, f"{whole:.1f} Ψ = {word} + activations", va="center", bbox=box)
    limit = 9.5
    ax.axvline(limit, color=RED, linestyle="--", linewidth=1)
    ax.text(limit + 0.15, -0.55, "limit of a device that has 9.5 Ψ bytes", color=RED, va="bottom", fontsize=8)
    ax.set(
        xlabel=f"bytes on one of N = {ranks} ranks, per parameter (Ψ = {psi:,})",
        xlim=(0, 28),
        ylim=(len(names) - 0.45, -0.85),
    )
    ax.set_title("Memory held on the fullest rank, measured as the live arrays of a real run")
    fig.legend(loc="outside lower center", ncols=3, fontsize=8)
    ax.tick_params(axis="y", length=0)
    return fig


# ------------------------------------------------------------------------------------------------- ring


def ring() -> Figure:
    """Who has whose numbers, step by step, in an all-reduce on four ranks."""
    states = measure.ring_states(4)
    fig, axes = figure(4.3, 2, 4)
    titles = ["before", *(f"reduce-scatter {s}" for s in range(3)), *(f"all-gather {s}" for s in range(3))]
    order = [0, 1, 2, 3, 5, 6, 7]
    shades = {1: "#FFFFFF", 2: "#CFE3F2", 3: "#7FB5DA", 4: BLUE}
    for place, title, (number, state) in zip(order, titles, enumerate(states), strict=True):
        ax = axes.flat[place]
        before = states[number - 1] if number else state
        for rank, chunks in enumerate(state):
            for chunk, text in enumerate(chunks):
                new = before[rank][chunk] != text
                edge = (
                    {"edgecolor": RED, "linewidth": 1.6, "zorder": 3} if new else {"edgecolor": GREY, "linewidth": 0.6}
                )
                ax.add_patch(library().Rectangle((rank, chunk), 1, 1, facecolor=shades[len(text)], **edge))
                colour = "white" if len(text) == 4 else "black"
                label = text if len(text) < 4 else "all"
                ax.text(rank + 0.5, chunk + 0.5, label, ha="center", va="center", fontsize=8, color=colour, zorder=4)
        ax.set(xlim=(-0.05, 4.05), ylim=(4.05, -0.05), aspect="equal")
        ax.set_title(title)
        ax.set_xticks(np.arange(4) + 0.5, [f"{r}" for r in range(4)])
        ax.set_yticks(np.arange(4) + 0.5, [f"{c}" for c in range(4)])
        ax.set(xlabel="rank" if place in (0, 5, 6, 7) else "", ylabel="chunk" if place in (0, 5) else "")
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes.flat[4].axis("off")
    axes.flat[4].text(
        0,
        0.95,
        "a, b, c, d: numbers of\nranks 0, 1, 2, 3; ad: a + d;\nall: the sum of all four.\n\n"
        "Framed: what has just\narrived from the left.\n\n"
        "Read off the messages\nof a real run.",
        va="top",
        fontsize=8,
        transform=axes.flat[4].transAxes,
    )
    fig.get_layout_engine().set(h_pad=0.07)  # type: ignore[call-arg, union-attr]
    fig.suptitle(
        "Ring all-reduce on 4 ranks: 2 (N - 1) = 6 steps; in each every rank sends one chunk to its right",
        x=0.01,
        ha="left",
        fontsize=9,
    )
    return fig


# ------------------------------------------------------------------------------------------ timelines


def pipeline() -> Figure:
    """GPipe and 1F1B, for backward passes that cost twice as much as forward passes."""
    K, M = 4, 8
    drawn = {"GPipe": schedule.gpipe(K, M), "1F1B": schedule.one_f_one_b(K, M)}
    return timelines({name: simulate(lists, backward=2) for name, lists in drawn.items()})


def timelines(simulations: Mapping[str, Simulation]) -> Figure:
    """Draw schedules under one another, a row for each stage, to one scale of time."""
    stages = max(len(simulation.spans) for simulation in simulations.values())
    fig, axes = figure(0.9 + len(simulations) * (0.75 + 0.27 * stages), len(simulations), squeeze=False)
    end = max(
        float(simulation.spans[s][-1].end) for simulation in simulations.values() for s in range(len(simulation.spans))
    )
    for ax, (name, simulation) in zip(axes.flat, simulations.items(), strict=True):
        for stage, spans in enumerate(simulation.spans):
            for span in spans:
                forward = isinstance(span.work, Forward)
                start, length = float(span.start), float(span.end - span.start)
                look = {"facecolor": SKY} if forward else {"facecolor": ORANGE, "hatch": "///"}
                ax.barh(stage, length, left=start, height=0.9, edgecolor="white", linewidth=0.6, **look)
                if end <= 80:
                    ax.text(start + length / 2, stage, str(span.work.m), ha="center", va="center", fontsize=7)
            live = peak_live([span.work for span in spans])
            ax.text(end * 1.01, stage, f"{live} alive", va="center", fontsize=7.5)
        title = name
        if simulation.finished:
            step, ideal = simulation.bubble_of_step, simulation.bubble_of_ideal
            title += f": bubble {step} = {float(step):.0%} of the step, {ideal} = {float(ideal):.1%} of the ideal"
        ax.set_title(title)
        ax.set_yticks(range(len(simulation.spans)), [f"stage {s}" for s in range(len(simulation.spans))])
        ax.set(ylim=(len(simulation.spans) - 0.4, -0.6), xlim=(0, end * 1.1), xlabel="time, in units")
        ax.tick_params(axis="y", length=0)
    patch = library().Rectangle
    handles = [patch((0, 0), 1, 1, color=SKY), patch((0, 0), 1, 1, facecolor=ORANGE, hatch="///", edgecolor="white")]
    words = ["forward pass of the micro-batch with that number", "backward pass"]
    fig.legend(handles, words, loc="outside lower center", ncols=2, fontsize=8)
    return fig


def run() -> Figure:
    """A real run of a pipeline: what each rank did, when."""
    layout = Layout(pp=2, micro_batches=4)
    return recorded(measure.real_run(layout), f"A real run, {layout}")


def recorded(done: Run, title: str) -> Figure:
    """Draw the last step of a recorded run, a row for each rank."""
    fig, ax = figure(1.3 + 0.42 * len(done.ranks))
    starts = [[e.start for e in events if e.kind == "compute" and e.name == "F0"][-1] for events in done.ranks]
    origin = min(starts)
    looks: dict[str, dict[str, Any]] = {
        "forward": {"facecolor": SKY},
        "backward": {"facecolor": ORANGE, "hatch": "///"},
        "update": {"facecolor": GREEN},
        "wait": {"facecolor": "#EEEEEE", "hatch": "...", "edgecolor": GREY},
        "send": {"facecolor": BLACK},
    }
    used = set()
    for rank, events in enumerate(done.ranks):
        for event in sorted(events, key=lambda e: e.kind == "send"):
            kind = (
                {"F": "forward", "B": "backward", "u": "update"}.get(event.name[0])
                if event.kind == "compute"
                else event.kind
            )
            if event.end <= origin or kind not in looks:
                continue
            used.add(kind)
            start = (max(event.start, origin) - origin) / 1e6
            length = (event.end - origin) / 1e6 - start
            ax.barh(rank, length, left=start, height=0.8, linewidth=0.3, **{"edgecolor": "white", **looks[kind]})
            if kind in ("forward", "backward"):
                ax.text(start + length / 2, rank, event.name, ha="center", va="center", fontsize=7)
    shared = f"{len(done.ranks)} ranks on {done.cores} cores" + (": time-shared" if done.time_shared else "")
    ax.set_title(f"{title}, last step; {shared}")
    ax.set_yticks(range(len(done.ranks)), [f"rank {rank}" for rank in range(len(done.ranks))])
    ax.set(xlabel="milliseconds", ylim=(len(done.ranks) - 0.4, -0.6))
    ax.tick_params(axis="y", length=0)
    patch = library().Rectangle
    handles = [patch((0, 0), 1, 1, **{"edgecolor": "white", **looks[kind]}) for kind in looks if kind in used]
    words = {"wait": "wait for another rank", "send": "send"}
    fig.legend(handles, [words.get(k, k) for k in looks if k in used], loc="outside lower center", ncols=5, fontsize=8)
    return fig


# ------------------------------------------------------------------------------------------------- fp16


def fp16() -> Figure:
    """Where the gradient of the logits lies, without and with a loss scale."""
    seen = measure.vanishing()
    fig, axes = figure(3.9, 2, 1, sharex=True, sharey=True)
    edges = np.arange(-44, 13)
    cases = (
        ("without loss scaling", 1.0, seen.lost[0]),
        (f"with loss scale $2^{{{int(np.log2(seen.scale))}}}$", seen.scale, seen.lost[1]),
    )
    for ax, (title, scale, lost) in zip(axes, cases, strict=True):
        exponents = np.log2(seen.logits * scale)
        shares = np.histogram(exponents, edges)[0] / exponents.size
        dead = edges[:-1] < -24
        ax.bar(edges[:-1], shares, width=1, align="edge", color=BLUE, edgecolor="white", linewidth=0.3)
        ax.bar(
            edges[:-1][dead],
            shares[dead],
            width=1,
            align="edge",
            color=RED,
            hatch="////",
            edgecolor="white",
            linewidth=0.3,
        )
        ax.axvspan(edges[0], -24, color=GREY, alpha=0.35, linewidth=0, zorder=0)
        ax.axvline(16, color=BLACK, linewidth=1)
        ax.axvline(-14, color=BLACK, linewidth=0.8, linestyle=":")
        ax.set_title(
            f"{title}: {shares[dead].sum():.1%} below $2^{{-24}}$; {lost:.2%} of the weights' gradient entries become 0"
        )
        ax.set(xlim=(edges[0], 17), ylabel="share of entries")
    axes[0].text(-34, axes[0].get_ylim()[1] * 0.93, "less than the\nsmallest half", ha="center", va="top", fontsize=8)
    axes[0].text(-13.7, axes[0].get_ylim()[1] * 0.93, "fewer digits\nleft of this", ha="left", va="top", fontsize=8)
    axes[0].text(15.7, axes[0].get_ylim()[1] * 0.93, "overflow", ha="right", va="top", fontsize=8)
    axes[1].set(xlabel="magnitude of the gradient of the loss by a logit, true value, as a power of two")
    axes[1].set_xticks(range(-40, 17, 8), [f"$2^{{{e}}}$" for e in range(-40, 17, 8)])
    return fig


# ------------------------------------------------------------------------------------- losses and errors

MARKERS = "osD^v<>PX*"
LINES = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK)


def loss() -> Figure:
    """The loss of every technique over that of one device, and the difference."""
    right = np.array([step.loss for step in measure.truth().steps])
    fig, (ax, below) = figure(4.6, 2, 1, sharex=True, height_ratios=[3, 2])
    steps = np.arange(len(right))
    ax.plot(steps, right, color=GREY, linewidth=5, solid_capstyle="round", label="one device")
    unit = 2.0**-53
    for number, (name, trace) in enumerate(measure.traces()):
        look = {"color": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)], "markersize": 3.5}
        losses = np.array([step.loss for step in trace.steps])
        beside = steps + 0.08 * (number - 4.5)  # ten markers on one point would hide each other
        ax.plot(beside, losses, linestyle="", label=name, **look)
        apart = np.abs(losses - right) / right
        below.plot(beside, np.maximum(apart, unit / 4), linestyle="", **look)
    ax.set(ylabel="loss, nats a token")
    ax.set_title("Loss of every technique (side by side at each step) over that of one device")
    ax.legend(ncols=2, fontsize=8, loc="upper right")
    below.set_yscale("log")
    below.axhline(unit, color=BLACK, linewidth=0.8, linestyle=":")
    below.text(len(steps) - 0.55, unit, "$2^{-53}$", ha="left", va="center", fontsize=8)
    below.set(xlabel="step", ylabel="relative difference")
    below.set_title("Its difference from one device (none is drawn at the bottom); all but fp16 compute in float64")
    below.set_xticks(steps)
    return fig


def error() -> Figure:
    """The largest error of every technique, and of every mistake, over what it may be."""
    techniques, made = measure.errors(), measure.mistaken()
    rows = [*techniques.items(), *sorted(made.items(), key=lambda item: item[1])]
    fig, ax = figure(0.9 + 0.165 * len(rows))
    least = 1e-3
    for y, (name, ratio) in enumerate(rows):
        right = name in techniques
        look = {"color": BLUE, "marker": "o"} if right else {"color": RED, "marker": "x"}
        ax.plot([max(ratio, least)], [y], linestyle="", markersize=5, **look)
    ax.axvline(1, color=BLACK, linewidth=1)
    ax.text(0.7, -0.75, "allowed", ha="right", va="bottom", fontsize=8)
    ax.text(1.5, -0.75, "not allowed", ha="left", va="bottom", fontsize=8)
    ax.axhline(len(techniques) - 0.5, color=GREY, linewidth=0.6)
    ax.set_xscale("log")
    ax.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7.5)
    ax.set(ylim=(len(rows) - 0.4, -0.8), xlabel="largest error, in units of its bound (exact results at the left edge)")
    ax.set_title("Error over bound: techniques (●), mistakes made on purpose (×); float64", pad=14)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#EEEEEE")
    return fig


PICTURES: Mapping[str, Callable[[], Figure]] = {
    "memory": memory,
    "ring": ring,
    "pipeline": pipeline,
    "run": run,
    "fp16": fp16,
    "loss": loss,
    "error": error,
}
