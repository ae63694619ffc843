"""``refpar memory`` and ``refpar plan``: from options to tables.

Each returns 0 where something fits (or no size was given to fit into), and 1 where nothing does. Bad input is a
``ValueError`` of one line.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from refpar.plan import cautions, choose, inference, memory, repairs, speed
from refpar.plan.choose import Rung
from refpar.plan.ledger import ALWAYS, PARTS, Line, RankMemory
from refpar.plan.models import PRESETS, Bare, Model, Transformer, gpt2, llama
from refpar.plan.plans import MOMENT_WORDS, Plan
from refpar.plan.recipes import RECIPES, Recipe
from refpar.plan.repairs import Change
from refpar.plan.setups import Setup, check
from refpar.plan.speed import Hardware
from refpar.plan.units import count, gb, gib, seconds
from refpar.screen import Screen

FITS, DOES_NOT_FIT = 0, 1
WIDTH = 100
UNLIMITED = 10**30
GROUPS = ("dp", "tp", "pp")


# What the options say


def named(what: str, name: str, known: Mapping[str, Any]) -> Any:
    """Return what is called so.

    Raises
    ------
    ValueError
        Where nothing is, with the nearest name.
    """
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise ValueError(f"no {what} is called {name!r}: {hint}")


def model_of(options: argparse.Namespace) -> Model:
    """Return the model that the options name."""
    sizes = {
        name: getattr(options, name) for name in ("layers", "width", "heads", "kv_heads", "mlp_width", "vocabulary")
    }
    given = [name for name, value in sizes.items() if value is not None]
    if (options.model is not None) + (options.params is not None) + bool(given) != 1:
        raise ValueError("which model? give one of --model, --params, or --layers with --width and --heads")
    if options.model is not None:
        found: Transformer = named("model", options.model, PRESETS)
        return found
    if options.params is not None:
        return Bare(options.params)
    for name in ("layers", "width", "heads"):
        if sizes[name] is None:
            raise ValueError(f"--{name} is missing: a model given by its sizes needs layers, width and heads")
    L, h, a = sizes["layers"], sizes["width"], sizes["heads"]
    if options.family == "gpt":
        made = gpt2(L, h, a, sizes["vocabulary"] or 50257, options.sequence or 1024)
        return replace(made, kv_heads=sizes["kv_heads"] or a, mlp_width=sizes["mlp_width"] or 4 * h)
    wide = sizes["mlp_width"] or -(-8 * h // 3 // 256) * 256
    return llama(L, h, a, sizes["kv_heads"] or a, wide, sizes["vocabulary"] or 32000, options.sequence or 4096)


def setup_of(options: argparse.Namespace, model: Model, zero: int) -> Setup:
    """Return the layout that the options of ``refpar memory`` give."""
    others = options.tp * options.pp * options.cp
    devices = options.gpus or (options.dp or 1) * others
    if devices % others:
        raise ValueError(f"--gpus {devices} is not a multiple of tp x pp x cp = {others}")
    dp = options.dp or devices // others
    if dp * others != devices:
        raise ValueError(f"dp x tp x pp x cp is {dp * others}: --gpus is {devices}")
    M = options.micro_batches or (4 * options.pp if options.pp > 1 else 1)
    if options.batch and not options.micro_batches:
        M = max(1, -(-options.batch // (dp * options.micro_batch)))
    batch = options.batch or dp * M * options.micro_batch
    try:
        stages = tuple(int(n) for n in options.stages.split("+")) if options.stages else ()
    except ValueError:
        raise ValueError(f"--stages is {options.stages!r}: write units of each stage, such as 7+6+6+7") from None
    setup = Setup(dp, options.tp, options.pp, options.cp, zero, batch, M, options.schedule, options.chunks,
                  options.recompute, options.sequence_parallel, stages, options.bucket, options.prefetch,
                  options.accounting, options.flash, options.sequence or 0)  # fmt: skip
    check(model, setup)
    return setup


# refpar memory


def memory_verb(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Print what ``refpar memory`` prints, on standard error where JSON takes standard output."""
    console = console_of(options)
    model = model_of(options)
    if options.inference:
        return serve(options, model, console)
    recipe: Recipe = named("recipe", options.recipe, RECIPES)
    hardware = Hardware(options.device_memory or UNLIMITED, reserve=options.reserve)
    first = setup_of(options, model, options.zero or 0)
    stages = range(4) if options.zero is None and first.sharing > 1 else [first.zero]
    plans = [Plan(model, replace(first, zero=zero), recipe, hardware) for zero in stages]
    setup = plans[0].setup
    console.print(heading(options, model, setup, recipe), soft_wrap=True)
    console.print()
    console.print(by_zero(plans, options.device_memory))
    if isinstance(model, Bare):
        console.print(
            "\nActivations are not counted: they need a shape. Give --model, or --layers, --width and --heads."
        )
    elif options.accounting == "paper":
        eager = Plan(model, replace(plans[-1].setup, accounting="eager"), recipe, hardware).memory.peak
        console.print(f"\nAn eager framework keeps more than fused kernels: count on up to {gb(eager)} GB "
                      f"in the last row (--accounting eager).")  # fmt: skip
    if setup.pp > 1:
        console.print()
        console.print(stage_table(memory.by_stage(model, plans[-1].setup, recipe)))
    if options.lines:
        for plan in plans:
            rank = plan.memory
            console.print(f"\n{title(plan)}: every line of rank {rank.rank} at its peak, {MOMENT_WORDS[rank.moment]}")
            console.print(line_table(line for line in rank.lines if rank.moment in line.alive))
    fixes: list[Change] = []
    if options.device_memory:
        best = next((plan for plan in plans if plan.fits), min(plans, key=lambda plan: plan.memory.peak))
        console.print()
        fixes = verdict(console, best)
        for text in cautions.warnings(best):
            console.print(f"[yellow]careful[/]: {text}")
    fits = any(plan.fits for plan in plans)
    report = {
        "schema": 1,
        "model": facts(model),
        "recipe": recipe.name,
        "device_memory": options.device_memory,
        "fits": fits if options.device_memory else None,
        "setups": [plan_facts(plan) for plan in plans],
        "changes": [change_facts(change) for change in fixes],
    }
    return (FITS if fits or not options.device_memory else DOES_NOT_FIT), report


def heading(options: argparse.Namespace, model: Model, setup: Setup, recipe: Recipe) -> str:
    """Return the lines that say what is counted."""
    w, g, k = recipe.bytes_per_parameter
    name, devices, rows = name_of(options), f"{setup.ranks} device{'s' * (setup.ranks > 1)}", ""
    if not isinstance(model, Bare):
        tokens = setup.tokens or getattr(model, "context", 1)
        rows = (
            f"\n{setup.micro_batches} micro-batch{'es' * (setup.micro_batches > 1)} of {setup.largest_micro_batch} x "
            f"{tokens:,} tokens on each replica"
        )
    return (
        f"[bold]{name}[/]: {model_size(model):,} parameters on {devices} ({setup})\n"
        f"{recipe.name}: weights {w:g} + gradients {g:g} + optimizer {k:g} = {w + g + k:g} bytes a parameter{rows}"
    )


def name_of(options: argparse.Namespace) -> str:
    """Return what to call the model."""
    if options.model is None and options.layers is not None:
        return f"{options.family} of {options.layers} x {options.width}"
    return options.model or "a model"


def model_size(model: Model) -> int:
    """Return the number of parameters."""
    assert isinstance(model, Transformer | Bare)
    return model.size


def by_zero(plans: Sequence[Plan], limit: int | None) -> Table:
    """Return the table of what the most loaded rank of each setup holds."""
    table = table_of("GB a device", "weights", "gradients", "optimizer", "buffers", "activations", "peak", "in GiB")
    if limit:
        table.add_column(f"in {gb(limit, 0)} GB", justify="right", no_wrap=True)
    for plan in plans:
        parts = plan.memory.parts()
        row = [title(plan), *(gb(parts[part]) if parts[part] else "-" for part in PARTS), gb(plan.memory.peak)]
        row.append(gib(plan.memory.peak))
        if limit:
            row.append("[green]fits[/]" if plan.fits else f"[red]short {gb(plan.short)}[/]")
        table.add_row(*row)
    return table


def title(plan: Plan) -> str:
    """Return the name of a row."""
    if plan.setup.zero:
        return f"ZeRO {plan.setup.zero}"
    return "data parallel" if plan.setup.dp > 1 else "one replica"


def stage_table(ranks: Sequence[RankMemory]) -> Table:
    """Return the table of stages, those alike in a row left out."""
    table = table_of("stage", "first rank", "states", "activations", "peak GB", "in GiB", "moment")
    worst = max(ranks, key=lambda rank: rank.peak)
    shown = ranks if len(ranks) <= 16 else [*ranks[:6], *ranks[-6:]]
    for rank in shown:
        mark = " <- most loaded" if rank is worst else ""
        table.add_row(f"{rank.place.p}{mark}", str(rank.rank), gb(rank.states), gb(rank.activations), gb(rank.peak),
                      gib(rank.peak), rank.moment)  # fmt: skip
        if len(shown) < len(ranks) and rank is shown[5]:
            table.add_row("…", "", "", "", "", "", "")
    return table


def line_table(given: Iterable[Line]) -> Table:
    """Return the table of a ledger, with a heading for each copy and each lifetime."""
    table = table_of("tensor", "shape", "type", "copies", "split by", "GB")
    table.columns[0].no_wrap = False
    for column in (table.columns[1], table.columns[2], table.columns[4]):
        column.justify = "left"
    sections: dict[str, list[Line]] = {}
    lines = list(given)
    for part in (*PARTS, "cache"):
        for line in lines:
            if line.part == part and line.bytes:
                words = line.copy if line.copy not in ("", part) else line.lifetime if line.alive != ALWAYS else ""
                sections.setdefault(f"{part}, {words}" if words else part, []).append(line)
    for heading, chosen in sections.items():
        table.add_row(f"[bold]{heading}[/]", "", "", "", "", f"[bold]{gb(sum(line.bytes for line in chosen))}[/]")
        for line in chosen:
            shape = "x".join(map(str, line.shape))
            table.add_row(f"  {line.tensor}", shape, line.dtype, str(line.copies), line.sharded, gb(line.bytes, 3))
    return table


def verdict(console: Console, plan: Plan) -> list[Change]:
    """Print whether a plan fits; what to change where it does not, what could grow where it does."""
    name = f"{title(plan)} ({plan.setup})"
    if plan.fits:
        console.print(f"[green]fits[/]: {name}: {plan.why()}")
        spare = repairs.room(plan)
        if spare:
            words = {
                "micro_batch": "a micro-batch of {}",
                "sequence": "a sequence of {} tokens",
                "layers": "a model of {} blocks",
            }
            more = "; ".join(
                words[key].format(f"{value:,}" + " or more" * (value >= repairs.MOST[key]))
                for key, value in spare.items()
            )
            console.print(f"each by itself would still fit: {more}")
        return []
    console.print(f"[red]does not fit[/]: {name}: {plan.why()}")
    fixes = repairs.repairs(plan)
    console.print(changes_table(fixes))
    return fixes


def changes_table(fixes: Sequence[Change]) -> Table | str:
    """Return the table of changes that are enough."""
    if not fixes:
        return "no change of one or two things makes it fit"
    table = table_of("smallest changes that make it fit", "saves GB", "then GB", "time", "")
    table.columns[4].justify = "left"
    for change in fixes:
        table.add_row(
            change.what,
            gb(change.saved) if change.saved else "-",
            gb(change.plan.memory.peak),
            time_of(change),
            change.alters,
        )
    return table


def time_of(change: Change) -> str:
    """Return what a change costs in time."""
    return "" if change.slower is None else f"{change.slower - 1:+.0%}" if abs(change.slower - 1) >= 0.005 else "same"


def serve(options: argparse.Namespace, model: Model, console: Console) -> tuple[int, dict[str, Any]]:
    """Print what inference holds."""
    found = inference.lines(model, options.inference, tp=options.tp, pp=options.pp, tokens=options.sequence or 0,
                            sequences=options.concurrent)  # fmt: skip
    total = sum(line.bytes for line in found)
    console.print(f"[bold]{name_of(options)}[/]: {model_size(model):,} parameters, inference with "
                  f"{options.inference}-bit weights, tp {options.tp}, pp {options.pp}\n")  # fmt: skip
    table = table_of("a device holds", "GB", "GiB")
    for part in ("weights", "cache"):
        nbytes = sum(line.bytes for line in found if line.part == part)
        if nbytes:
            table.add_row("keys and values" if part == "cache" else part, gb(nbytes), gib(nbytes))
    table.add_row("[bold]together[/]", gb(total), gib(total))
    console.print(table)
    if isinstance(model, Transformer):
        console.print(f"\nkeys and values take {inference.cache_bytes(model):,} bytes a token over all devices")
    if options.lines:
        console.print(line_table(found))
    limit = options.device_memory
    fits = not limit or total <= limit - options.reserve
    if limit:
        spare = limit - options.reserve - total
        console.print("[green]fits[/]" if fits else "[red]does not fit[/]",
                      f"in {gb(limit)} GB: {gb(abs(spare))} GB {'to spare' if fits else 'short'}")  # fmt: skip
    report = {
        "schema": 1,
        "model": facts(model),
        "bits": options.inference,
        "bytes": total,
        "device_memory": limit,
        "fits": fits if limit else None,
        "lines": [line_facts(line) for line in found],
    }
    return (FITS if fits else DOES_NOT_FIT), report


# refpar plan


def plan_verb(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Print what ``refpar plan`` prints."""
    console = console_of(options)
    model = model_of(options)
    recipe: Recipe = named("recipe", options.recipe, RECIPES)
    for name in ("gpus", "device_memory"):
        if getattr(options, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is missing: a plan needs to know it")
    hardware = Hardware(options.device_memory, options.gpus_per_server, options.intra, options.inter, options.peak,
                        speed.EFFICIENCY if options.efficiency is None else options.efficiency,
                        options.reserve)  # fmt: skip
    batch = options.batch or 8 * options.gpus * options.micro_batch
    base = Setup(batch=batch, flash=options.flash, tokens=options.sequence or 0)
    check(model, base)
    rungs = choose.ladder(model, recipe, hardware, options.gpus, base, options.micro_batch, options.causal)
    simplest, fastest = choose.recommend(rungs)

    console.print(plan_heading(options, model, recipe, hardware, base), soft_wrap=True)
    console.print()
    console.print(ladder_table(rungs, simplest))
    console.print()
    fixes = {id(rung): [] if rung.plan.fits else repairs.repairs(rung.plan) for rung in rungs}
    reasons(console, rungs, simplest, fastest, fixes)
    for text in dict.fromkeys(
        w for rung in rungs[:1] + [r for r in (simplest, fastest) if r] for w in cautions.warnings(rung.plan)
    ):
        console.print(f"[yellow]careful[/]: {text}")
    report = {
        "schema": 1,
        "model": facts(model),
        "recipe": recipe.name,
        "hardware": vars(hardware),
        "batch": batch,
        "rungs": [
            {"name": rung.name, **plan_facts(rung.plan), "changes": [change_facts(c) for c in fixes[id(rung)]]}
            for rung in rungs
        ],
        "recommended": simplest and rungs.index(simplest),
        "fastest": fastest and rungs.index(fastest),
    }
    return (DOES_NOT_FIT if simplest is None else FITS), report


def plan_heading(options: argparse.Namespace, model: Model, recipe: Recipe, hardware: Hardware, base: Setup) -> str:
    """Return the lines that say for what is planned."""
    tokens = base.tokens or getattr(model, "context", None)
    rows = f"{base.batch:,} rows" + (f" x {tokens:,} tokens" if tokens else "")
    return (
        f"[bold]{name_of(options)}[/]: {model_size(model):,} parameters ({count(model_size(model))}), "
        f"{recipe.name}, {sum(recipe.bytes_per_parameter):g} bytes a parameter\n"
        f"{options.gpus} devices of {gb(hardware.memory)} GB ({gib(hardware.memory)} GiB), {hardware.per_server} a "
        f"server; {gb(hardware.reserve)} GB of each kept free\n"
        f"a step is {rows}, in micro-batches of {options.micro_batch}; times assume {hardware.efficiency:.0%} of "
        f"{hardware.peak / 1e12:,.0f} TFLOPS in matrix products"
    )


def ladder_table(rungs: Sequence[Rung], chosen: Rung | None) -> Table:
    """Return the ladder; what it sends is by device and step."""
    table = table_of("", "peak GB", "sent GB dp/tp/pp", "bubble", "step", "MFU/HFU", "")
    table.columns[6].justify = "left"
    for rung in rungs:
        plan, step = rung.plan, rung.plan.step
        sent = "/".join(short(plan.sent.get(group, 0)) for group in GROUPS)
        ideal, real = speed.bubble(plan.setup.pp, plan.setup.micro_batches, plan.setup.chunks)
        idle = f"{float(ideal):.0%} ({float(real):.0%})" if plan.setup.pp > 1 else "-"
        times = (seconds(step.total), f"{step.mfu:.0%}/{step.hfu:.0%}") if step else ("", "")
        mark = "[green]fits[/]" + (" [bold]<-[/]" if rung is chosen else "") if plan.fits else "[red]no[/]"
        table.add_row(label(rung), gb(plan.memory.peak), sent, idle, *times, mark)
    return table


def label(rung: Rung) -> str:
    """Return a rung in a few words."""
    setup = rung.plan.setup
    words = [f"{axis} {getattr(setup, axis)}" for axis in ("dp", "tp", "pp") if getattr(setup, axis) > 1]
    if setup.zero:
        words.append(f"ZeRO {setup.zero}")
    if setup.recompute != "none":
        words.append({"block": "full"}.get(setup.recompute, setup.recompute))
    return " ".join(words) or "one device"


def short(nbytes: int) -> str:
    """Return GB with few digits."""
    n = nbytes / 1e9
    return "-" if not nbytes else f"{n:.0f}" if n >= 100 else f"{n:.1f}" if n >= 0.1 else f"{n:.2g}"


def reasons(
    console: Console,
    rungs: Sequence[Rung],
    chosen: Rung | None,
    fastest: Rung | None,
    fixes: Mapping[int, list[Change]],
) -> None:
    """Print why rungs do not fit, and what is recommended."""
    console.print("sent: by the most loaded device in a step; bubble: of the ideal step (of the real one)")
    if any(rung.plan.setup.tp > 1 for rung in rungs):
        console.print("with tensor parallelism, norms and dropouts are split along the sequence")
    console.print()
    for rung in rungs:
        if rung.plan.fits and rung is not chosen:
            continue
        if rung.plan.fits:
            break
        console.print(f"[bold]{label(rung)}[/] is {rung.plan.why()}")
        for change in fixes[id(rung)][:3]:
            extra = f", {change.alters}" if change.alters else ""
            cost = f", time {time_of(change)}" if change.slower is not None else ""
            saved = f"saves {gb(change.saved)} GB" if change.saved else "enough"
            console.print(Text(f"    {change.what}: {saved}{cost}{extra}"))
    console.print()
    if chosen is None:
        console.print("[red]nothing on the ladder fits[/]: take the changes above, or more devices")
        return
    spare = repairs.room(chosen.plan)
    more = (
        f"; room for micro-batches of {spare['micro_batch']}"
        if spare.get("micro_batch", 0) > chosen.plan.micro_batch
        else ""
    )
    console.print(f"[green]recommended[/]: [bold]{label(chosen)}[/], the simplest that fits: {chosen.plan.why()}{more}")
    if fastest is not None and fastest.plan.step and chosen.plan.step:
        gain = 1 - fastest.plan.step.total / chosen.plan.step.total
        console.print(f"estimated {gain:.0%} faster, and more to set up: [bold]{label(fastest)}[/]")


# Output


def console_of(options: argparse.Namespace) -> Console:
    """Return where tables go: standard error where JSON takes standard output."""
    return Screen(sys.stderr if options.json == "-" else sys.stdout, WIDTH)


def table_of(first: str, *columns: str) -> Table:
    """Return an empty table, its first column to the left."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def facts(model: Model) -> dict[str, Any]:
    """Return what JSON says of a model."""
    return {**vars(model), "parameters": model_size(model)}


def line_facts(line: Line) -> dict[str, Any]:
    """Return what JSON says of a line."""
    return {**vars(line), "bytes": line.bytes}


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return what JSON says of a plan; bytes are bytes."""
    rank, step = plan.memory, plan.step if plan.hardware.memory < UNLIMITED else None
    return {
        "setup": vars(plan.setup),
        "rank": rank.rank,
        "place": rank.place._asdict(),
        "moment": rank.moment,
        "peak_bytes": rank.peak,
        "parts": rank.parts(),
        "fits": plan.fits if plan.hardware.memory < UNLIMITED else None,
        "sent_bytes": plan.sent,
        "step": step and {**vars(step), "mfu": step.mfu, "hfu": step.hfu},
        "lines": [line_facts(line) for line in rank.lines if line.bytes],
    }


def change_facts(change: Change) -> dict[str, Any]:
    """Return what JSON says of a change."""
    return {
        "change": change.what,
        "saved_bytes": change.saved,
        "peak_bytes": change.plan.memory.peak,
        "slower": change.slower,
        "alters": change.alters,
        "setup": vars(change.plan.setup),
    }
