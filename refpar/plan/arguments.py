"""The options of ``refpar memory`` and ``refpar plan``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from refpar.plan import units

Read = Callable[[str], Any]
MOST = 10**9
MOST_LAYERS = 1000
MOST_OF_ALL = 10**18

MEMORY = (
    "What each device has to hold: weights, gradients, optimizer, buffers, activations; for one setup, "
    "or for every ZeRO stage. Sizes are in GB (10^9 bytes) unless GiB is written."
)
PLAN = (
    "The ladder from data parallel to pipelines: what fits, what it sends, how long a step takes; "
    "why a rung does not fit, and the smallest change that makes it fit."
)


def memory(p: argparse.ArgumentParser) -> None:
    """Add the options of ``refpar memory``."""
    model(p)
    run(p)
    group = p.add_argument_group("layout")
    number(group, "--dp", "replicas (default: what the devices leave)")
    number(group, "--tp", "slices of each layer", 1)
    number(group, "--pp", "pipeline stages", 1)
    number(group, "--cp", "parts of each sequence", 1)
    group.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default: all four)")
    number(group, "--micro-batches", "micro-batches of a step (default: 1, or 4 a stage)")
    group.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b", help="of the pipeline (default: 1f1b)")
    number(group, "--chunks", "slices of the model a stage: interleaved 1F1B", 1)
    group.add_argument("--stages", metavar="N+N+…", help="units of each stage, embedding and head counted")
    group.add_argument(
        "--recompute", metavar="WHAT", default="none", help="none, selective, full, sqrt or a number of blocks"
    )
    group.add_argument("--sequence-parallel", action="store_true", help="split norms and dropouts over the tp ranks")
    number(group, "--prefetch", "units ZeRO-3 gathers ahead", 0)
    number(group, "--bucket", "elements of gradients that travel together", 25_000_000)
    group.add_argument(
        "--accounting", choices=("paper", "eager", "refpar"), default="paper",
        help="who keeps the activations: fused kernels, an eager framework, refpar itself (default: paper)",
    )  # fmt: skip
    group = p.add_argument_group("inference")
    group.add_argument(
        "--inference", type=int, choices=(16, 8, 4), metavar="BITS", help="hold weights of 16, 8 or 4 bits"
    )
    number(group, "--concurrent", "sequences in the cache at once", 1)
    group = p.add_argument_group("output")
    group.add_argument("--lines", action="store_true", help="print every line of the most loaded rank's ledger")


def plan(p: argparse.ArgumentParser) -> None:
    """Add the options of ``refpar plan``."""
    model(p)
    run(p)
    group = p.add_argument_group("hardware")
    number(group, "--gpus-per-server", "devices of a server", 8)
    size(group, "--intra", units.read_rate, "300GB/s", "rate of a device to others of its server")
    size(group, "--inter", units.read_rate, "100GB/s", "rate of a server to others, for all its devices")
    size(group, "--peak", units.read_flops, "312TFLOPS", "dense operations a second of a device")
    group.add_argument("--efficiency", metavar="X", type=float, help="share of it that matrix products reach")
    group.add_argument("--causal", action="store_true", help="count half of the attention matrix in the MFU")


def model(p: argparse.ArgumentParser) -> None:
    """Add the options that name a model."""
    group = p.add_argument_group("model: one of --model, --params, or --layers with --width and --heads")
    group.add_argument("--model", metavar="NAME", help="such as gpt2-xl or llama3-8b")
    group.add_argument(
        "--params", metavar="N", type=read(units.read_count), help="number of parameters, such as 7.5e9 or 7.5B"
    )
    group.add_argument("--family", choices=("gpt", "llama"), default="gpt", help="of a model given by its sizes")
    number(group, "--layers", "blocks", most=MOST_LAYERS)
    for name, text in (
        ("--width", "hidden features"), ("--heads", "attention heads"),
        ("--kv-heads", "heads of keys and values"), ("--mlp-width", "hidden features of the MLP"),
        ("--vocabulary", "words"),
    ):  # fmt: skip
        number(group, name, text)
    number(group, "--sequence", "tokens of a row (default: the model's context)")


def run(p: argparse.ArgumentParser) -> None:
    """Add the options that both verbs have."""
    group = p.add_argument_group("run")
    number(group, "--gpus", "devices")
    number(group, "--micro-batch", "rows of a micro-batch", 1)
    number(group, "--batch", "rows of a step, over all replicas")
    group.add_argument(
        "--recipe", metavar="NAME", default="mixed-adam", help="which copies there are (default: mixed-adam)"
    )
    group.add_argument("--flash", action="store_true", help="attention keeps no probabilities")
    size(group, "--device-memory", units.read_bytes, None, "of a device, such as 80GB or 80GiB")
    size(group, "--reserve", units.read_bytes, "1GiB", "of it not for tensors: context, fragmentation")
    group.add_argument("--json", metavar="PATH", help="write the results as JSON; - for standard output")


def number(group: Any, name: str, text: str, default: int | None = None, most: int = MOST) -> None:
    """Add a whole number."""
    least = 0 if default == 0 else 1

    def whole(given: str) -> int:
        try:
            value = int(float(given)) if float(given) == int(float(given)) else None
        except (ValueError, OverflowError):
            value = None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{given!r} is no whole number of at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{given!r} is too many: at most {most:,}")
        return value

    shown = "" if default is None else f" (default: {default:,})"
    group.add_argument(name, metavar="N", type=whole, default=default, help=text + shown)


def size(group: Any, name: str, reader: Read, default: str | None, text: str) -> None:
    """Add a number with a unit."""
    shown = f" (default: {default})" if default else ""
    group.add_argument(name, metavar="SIZE", type=read(reader), default=default and reader(default), help=text + shown)


def read(reader: Read) -> Read:
    """Return a reader whose errors argparse shows as they are."""

    def reading(text: str) -> Any:
        try:
            value = reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except OverflowError:
            value = math.inf
        if value > MOST_OF_ALL:
            raise argparse.ArgumentTypeError(f"{text!r} is too large: at most 1e18")
        return value

    return reading
