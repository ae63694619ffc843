"""The single device against torch's autograd, and the recorder on real torch loops: alone, DDP, FSDP2, FSDP1."""

import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from refpar import single
from refpar.case import Batch, Case
from refpar.nn.models import GPT, MLP
from refpar.optim import SGD
from refpar.oracle import bounds, control
from refpar.oracle.cases import CASES, gpt
from refpar.oracle.dumps import open_dump

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed (extra torch)"),
]

Arrays = dict[str, np.ndarray]


# -------------------------------------------------------------------------------------------------- autograd


def torch_mlp(params, batch: Batch, widths: tuple[int, ...]):
    """Return the loss of an MLP, written with torch's own functions."""
    import torch
    from torch.nn import functional as F

    x = torch.tensor(batch.inputs)
    for i in range(len(widths) - 1):
        x = x @ params[f"layers.{i}.weight"] + params[f"layers.{i}.bias"]
        x = F.relu(x) if i < len(widths) - 2 else x
    error = (x - torch.tensor(batch.targets))[torch.tensor(batch.mask)]
    return (error**2).sum() / int(batch.mask.sum())


def torch_gpt(params, batch: Batch, model: GPT):
    """Return the loss of a GPT, written with torch's own functions."""
    import torch
    from torch.nn import functional as F

    ids = torch.tensor(batch.inputs)
    x = params["embedding.token.weight"][ids] + params["embedding.position.weight"][: ids.shape[1]]

    def norm(x, name):
        return F.layer_norm(x, (model.width,), params[f"{name}.weight"], params[f"{name}.bias"])

    for i in range(model.layers):
        block = f"blocks.{i}"
        qkv = torch.einsum("bsw,wthd->tbhsd", norm(x, f"{block}.norm1"), params[f"{block}.attention.qkv.weight"])
        qkv = qkv + params[f"{block}.attention.qkv.bias"][:, None, :, None, :]
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)  # (batch, heads, seq, head_dim)
        y = torch.einsum("bhsd,hdw->bsw", y, params[f"{block}.attention.proj.weight"])
        x = x + y + params[f"{block}.attention.proj.bias"]
        h = norm(x, f"{block}.norm2") @ params[f"{block}.mlp.up.weight"] + params[f"{block}.mlp.up.bias"]
        h = F.gelu(h, approximate="tanh") if model.activation == "gelu" else F.relu(h)
        x = x + h @ params[f"{block}.mlp.down.weight"] + params[f"{block}.mlp.down.bias"]
    head = params["embedding.token.weight" if model.tied else "head.weight"]
    logits = norm(x, "head.norm") @ head.T
    targets = torch.tensor(np.where(batch.mask, batch.targets, -100))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") / int(
        batch.mask.sum()
    )


def torch_gradients(case: Case, parameters: Arrays, batch: Batch) -> tuple[float, Arrays]:
    """Return loss and gradients by torch's autograd, in float64."""
    import torch

    params = {name: torch.tensor(p, requires_grad=True) for name, p in parameters.items()}
    if isinstance(case.model, MLP):
        loss = torch_mlp(params, batch, case.model.widths)
    else:
        loss = torch_gpt(params, batch, case.model)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in params.items()}


@pytest.mark.parametrize("name", ["mlp", "ragged", "tied", "short-pipeline"])
def test_every_gradient_is_that_of_autograd(name: str) -> None:
    """In float64, step after step, every gradient agrees with torch's within 1e-12 of its largest entry.

    The bias of the attention keys has gradient zero in theory: it is compared absolutely.
    """
    case = CASES[name].make("float64")
    start: Arrays = dict(bounds.State.initial(case).parameters)
    for batch, step in zip(case.batches, single.train(case).steps, strict=True):
        loss, gradients = torch_gradients(case, start, batch)
        assert abs(step.loss - loss) <= 1e-12 * abs(loss)
        assert set(gradients) == set(step.gradients)
        for parameter, g in step.gradients.items():
            true = gradients[parameter]
            if parameter.endswith("attention.qkv.bias"):
                assert np.abs(g[1]).max() < 1e-15
                assert np.abs(true[1]).max() < 1e-15
            assert np.abs(g - true).max() <= 1e-12 * np.abs(true).max(), parameter
        start = step.parameters


def test_relu_gpt_with_several_layers() -> None:
    """The same for another activation and depth."""
    case = gpt("float64", SGD(lr=0.25), seed=21, layers=3, heads=3)
    model = GPT(31, 7, 15, layers=3, heads=3, mlp_width=35, activation="relu")
    case = Case(model, case.optimizer, case.batches, seed=21)
    _, gradients = torch_gradients(case, dict(bounds.State.initial(case).parameters), case.batches[0])
    for parameter, g in single.train(case).steps[0].gradients.items():
        assert np.abs(g - gradients[parameter]).max() <= 1e-12 * np.abs(gradients[parameter]).max(), parameter


# -------------------------------------------------------------------------------------------------- recorder


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same two steps of training, recorded by each kind of torch program."""
    folder = tmp_path_factory.mktemp("torch")
    script = Path(__file__).with_name("torch_training.py")
    alone, together = "single,reordered", "ddp,fsdp2,fsdp1,mean,stale"
    with contextlib.ExitStack() as stack:
        running = []
        for kinds, rank, ranks in ((alone, 0, 1), (together, 0, 2), (together, 1, 2)):
            command = [sys.executable, str(script), kinds, str(rank), str(ranks), str(folder)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in running:
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, out[-2000:]
    return folder


def compare(dumps: Path, kind: str):
    reference, other, candidate = (open_dump([dumps / name]) for name in ("single", "reordered", kind))
    return control.against(reference, candidate, [other])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1"])
def test_right_programs_match_the_single_device(dumps: Path, kind: str) -> None:
    """Replicated or sharded, gradients, weights and moments are those of one device; the layout is read from torch."""
    verdict = compare(dumps, kind)
    assert verdict.ok, verdict
    assert verdict.compared == 2 * (4 + 4 * 2 + 1 + 4)
    candidate = open_dump([dumps / kind])
    sharded = candidate.values["step0/gradient/0.weight"]
    assert len(sharded.copies) == (2 if kind == "ddp" else 1)
    assert sharded.shape == (11, 7)


def test_an_average_too_many_is_named(dumps: Path) -> None:
    """DDP averages; a loss divided by the global count already is then divided by the ranks once too often."""
    verdict = compare(dumps, "mean")
    assert verdict.first is not None
    assert verdict.first.step == 0
    assert verdict.first.name == "gradient/2.bias"
    assert verdict.first.causes == ("0.5 times what is expected, everywhere: 1/ranks = 0.5",)


def test_wrong_rows_are_seen_in_the_step_they_are_in(dumps: Path) -> None:
    """A rank that repeats its rows is right in the first step and wrong in the second."""
    verdict = compare(dumps, "stale")
    assert verdict.first is not None
    assert verdict.first.step == 1
    assert verdict.first.name.startswith("gradient/")


def test_recorder_notes_and_activations(tmp_path: Path) -> None:
    """Values of one's own and outputs of named modules are recorded in the order in which they were computed."""
    import torch

    from refpar.adapters.torch import record

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with record(model, optimizer, tmp_path / "dump", activations=["1"], rename="mine.{}".format) as recorder:
        loss = model(torch.ones(4, 3)).sum()
        loss.backward()
        recorder.note("loss", loss)
        recorder.gradients()
        for p in model.parameters():
            p.grad /= 2  # clipped, say: what was recorded is what was there before
        optimizer.step()
    dump = open_dump([tmp_path / "dump"])
    assert dump.order[:2] == ["step0/activation/1/0", "step0/loss"]
    assert dump.read("step0/activation/1/0")[0].shape == (4, 2)
    before, momentum = (dump.read(f"step0/{n}")[0] for n in ("gradient/mine.0.bias", "state/mine.0.bias/momentum"))
    assert np.array_equal(before, 2 * momentum)
    with pytest.raises(ValueError, match="no such module"):
        record(model, optimizer, tmp_path, activations=["7"])
