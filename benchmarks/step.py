"""Forward and backward of a GPT: refpar's plain NumPy beside torch eager, one thread each, in one run.

    python benchmarks/step.py [--launches 3] [--blocks 9]

The model has 0.94 million parameters: 4 layers, width 128, 4 heads, vocabulary 512, sequence 128,
batch 16, untied, float32. Torch runs it in two ways: with attention written out, operation for
operation what refpar computes, and with its fused ``scaled_dot_product_attention``. In each block
the three take turns, so that a ratio compares neighbours in time. Before anything is timed, every
gradient is compared with torch's.

Needs the packages of the extra ``bench``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TUNED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Settings that would help one side: not set for either."""

SIZES = {"vocabulary": 512, "context": 128, "width": 128, "layers": 4, "heads": 4, "tied": False}
BATCH = 16
TARGET = 1.2
RESULTS = Path(__file__).parent / "results" / "step.txt"


def launch(blocks: int) -> dict:
    """Return times and gradient differences of one process."""
    import numpy as np
    import torch

    from refpar.nn.layer import At
    from refpar.nn.models import GPT, initial_value

    torch.set_num_threads(1)
    config = GPT(**SIZES)
    model = config.build()
    ids = np.random.default_rng(0).integers(0, config.vocabulary, (BATCH, config.context + 1))
    x, targets = ids[:, :-1], ids[:, 1:]
    mask = np.ones(x.shape, bool)
    at = At(seed=0, step=0, rows=tuple(range(BATCH)))

    def refpar_step(params: dict) -> dict:
        y, saved = model.network.forward(params, x, at)
        _, kept = model.loss.forward(y, targets, mask)
        return dict(model.network.backward(params, saved, model.loss.backward(kept, 1 / mask.sum())))

    def torch_step(params: dict, attention: Callable) -> dict:
        logits = torch_gpt(config, params, torch.from_numpy(x), attention)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    def both(dtype: str) -> tuple[dict, dict]:
        ours = {name: initial_value(0, name, spec, dtype) for name, spec in model.specs.items()}
        return ours, {name: torch.tensor(p, requires_grad=True) for name, p in ours.items()}

    differences = {}
    for dtype in ("float64", "float32"):
        ours, theirs = both(dtype)
        right = torch_step(theirs, written_out)
        differences[dtype] = max(
            float(np.abs(g - right[name].numpy()).max() / np.abs(g).max()) for name, g in refpar_step(ours).items()
        )

    steps = {
        "refpar": lambda: refpar_step(ours),
        "written out": lambda: torch_step(theirs, written_out),
        "fused": lambda: torch_step(theirs, fused),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(blocks + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {
        "times": {name: taken[1:] for name, taken in times.items()},  # the first block warms up
        "differences": differences,
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
    }


def torch_gpt(config, params: dict, ids, attention: Callable):
    """Return the logits of refpar's GPT, from refpar's parameters, by torch's own operations."""
    from torch.nn import functional as F

    width, heads = config.width, config.heads

    def norm(x, name: str):
        return F.layer_norm(x, (width,), params[f"{name}.weight"], params[f"{name}.bias"])

    def linear(x, name: str):
        weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
        return F.linear(x, weight.reshape(x.shape[-1], -1).T, bias.flatten())

    x = params["embedding.token.weight"][ids] + params["embedding.position.weight"][: ids.shape[1]]
    for i in range(config.layers):
        block = f"blocks.{i}"
        qkv = linear(norm(x, f"{block}.norm1"), f"{block}.attention.qkv")
        q, k, v = qkv.unflatten(-1, (3, heads, width // heads)).permute(2, 0, 3, 1, 4)
        x = x + linear(attention(q, k, v).transpose(1, 2).flatten(2), f"{block}.attention.proj")
        up = linear(norm(x, f"{block}.norm2"), f"{block}.mlp.up")
        x = x + linear(F.gelu(up, approximate="tanh"), f"{block}.mlp.down")
    return F.linear(norm(x, "head.norm"), params["head.weight"])


def written_out(q, k, v):
    import torch

    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def fused(q, k, v):
    from torch.nn import functional as F

    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def report(launches: list[dict]) -> str:
    """Return the table: one line a launch, and the spread."""
    from statistics import median

    lines = [
        "Forward and backward of the GPT with 0.94 million parameters, one thread, float32: milliseconds (medians),",
        "and the time of refpar over that of torch eager (median over blocks of the ratio within the block).",
        "",
        "launch   refpar   torch, attention written out   torch, attention fused",
    ]
    ratios: dict[str, list[float]] = {"written out": [], "fused": []}
    for number, result in enumerate(launches, 1):
        times = result["times"]
        cells = []
        for name, found in ratios.items():
            found.append(median(a / b for a, b in zip(times["refpar"], times[name], strict=True)))
            cells.append(f"{1e3 * median(times[name]):15.0f}  ratio {found[-1]:.2f}")
        lines.append(f"{number:6d} {1e3 * median(times['refpar']):8.0f}   {cells[0]:>28}   {cells[1]:>22}")
    lines.append("")
    for name, found in ratios.items():
        verdict = "reached" if max(found) <= TARGET else "missed"
        lines.append(
            f"ratio to torch, attention {name}: {min(found):.2f} to {max(found):.2f} over {len(found)} launches;"
            f" at most {TARGET} asked for: {verdict}"
        )
    worst = {dtype: max(result["differences"][dtype] for result in launches) for dtype in ("float64", "float32")}
    lines.append(
        "largest difference of a gradient from torch's, over the largest entry of that gradient: "
        + ", ".join(f"{value:.1e} in {dtype}" for dtype, value in worst.items())
    )
    lines.append(", ".join(f"{name} {version}" for name, version in launches[0]["versions"].items()))
    lines.append(f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=3, help="processes, one after the other")
    parser.add_argument("--blocks", type=int, default=9, help="turns of each side in a launch")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(launch(options.blocks)))
        return
    environment = {name: value for name, value in os.environ.items() if name not in TUNED} | ONE_THREAD
    command = [sys.executable, __file__, "--child", "--blocks", str(options.blocks)]
    launches = []
    for _ in range(options.launches):
        child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        launches.append(json.loads(child.stdout))
    table = report(launches)
    print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(table + "\n")


if __name__ == "__main__":
    main()
