"""Models as the planner sees them: for each kind of unit what it holds, keeps, multiplies and sums (``tensors.py``).

What is *kept* depends on who runs the network, so three accountings are known:

========  ======================================================================================
paper     Korthikanti et al. 2022, section 4: what careful fused kernels keep, 34 + 5as/h bytes
          for each hidden element of a GPT block; without dropout, with grouped queries, gates
          and flash attention as they follow from the same rules
eager     the same and a surplus, as measured in an eager framework: 28 copies of the hidden state
          for a block of Llama-3.1-8B (56 bytes) where careful accounting has 34. The second figure
          known, LLaMA-7B at 45.6 GB against 29 GB, has the ratio 1.57
refpar    what this package's own layers keep, held to runs as exact integers
========  ======================================================================================

Where papers disagree: ZeRO section 3.2 gives 12 hidden elements a layer for "total activations"
(24 bytes in fp16). Careful accounting of the same GPT-2 XL has 114, of which 80 are the attention matrices
that flash attention does not keep: the constant is a measurement of one setup, and Korthikanti's is the one
to plan with. Korthikanti section 4.3 calls what is kept outside the layers of the 22B model below 0.01 %
of the total; its own formula gives 0.6 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from refpar.nn.models import GPT, MLP
from refpar.plan.tensors import Grid, Kind, Network, Tensor, Unit

Accounting = Literal["paper", "eager", "refpar"]
ACCOUNTINGS = ("paper", "eager", "refpar")
EAGER = 56 / 34


@dataclass(frozen=True)
class Transformer:
    """A decoder of the GPT or the Llama family.

    Attributes
    ----------
    layers, width, heads, vocabulary, context : sizes
    kv_heads : heads of keys and values; by default as many as ``heads``
    head_dim : by default ``width // heads``
    mlp_width : by default ``4 * width``
    gated : SwiGLU, three matrices instead of two
    bias : whether linear layers have one, and norms
    learned_positions : a vector for each place; rotary positions and ALiBi hold no parameters
    tied : whether embedding and head share one weight
    embedding_norm : a norm behind the embedding (BLOOM)
    dropout : whether there is any, and masks have to be kept
    activation : of the MLP
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int = 0
    head_dim: int = 0
    mlp_width: int = 0
    gated: bool = False
    bias: bool = True
    learned_positions: bool = True
    tied: bool = True
    embedding_norm: bool = False
    dropout: bool = False
    activation: str = "gelu"

    def __post_init__(self) -> None:
        for name, default in (
            ("kv_heads", self.heads),
            ("head_dim", self.width // self.heads if self.heads else 0),
            ("mlp_width", 4 * self.width),
        ):
            object.__setattr__(self, name, getattr(self, name) or default)
        for name in ("width", "heads", "vocabulary", "context", "kv_heads", "head_dim", "mlp_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.layers < 0:
            raise ValueError(f"layers is {self.layers}: it must be at least 0")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}: it must divide heads, {self.heads}")

    @property
    def size(self) -> int:
        """Number of parameters."""
        return network(self).size

    def padded(self, tp: int, multiple: int = 128) -> Transformer:
        """Return it with the vocabulary rounded up to a multiple of ``multiple * tp``, as Megatron does.

        GPT-2's 50,257 becomes 51,200 for tp = 8: that is where the 51,200 in NVIDIA's papers comes from.
        """
        step = multiple * tp
        return replace(self, vocabulary=-(-self.vocabulary // step) * step)


@dataclass(frozen=True)
class Bare:
    """A model of which only the number of parameters is known."""

    size: int


Model = Transformer | GPT | MLP | Bare


def gpt2(layers: int, width: int, heads: int, vocabulary: int = 50257, context: int = 1024) -> Transformer:
    """Return a GPT-2 or GPT-3: biases, learned positions, tied head, dropout."""
    return Transformer(layers, width, heads, vocabulary, context, dropout=True)


def llama(
    layers: int, width: int, heads: int, kv_heads: int, mlp_width: int, vocabulary: int, context: int
) -> Transformer:
    """Return a Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, untied head, no bias, no dropout."""
    return Transformer(layers, width, heads, vocabulary, context, kv_heads, 0, mlp_width,
                       gated=True, bias=False, learned_positions=False, tied=False)  # fmt: skip


PRESETS: Mapping[str, Transformer] = {
    "gpt2": gpt2(12, 768, 12),
    "gpt2-medium": gpt2(24, 1024, 16),
    "gpt2-large": gpt2(36, 1280, 20),
    "gpt2-xl": gpt2(48, 1600, 25),
    "gpt3-175b": gpt2(96, 12288, 96, context=2048),
    "megatron-22b": gpt2(48, 6144, 64, 51200, 2048),
    "megatron-530b": gpt2(105, 20480, 128, 51200, 2048),
    "megatron-1t": gpt2(128, 25600, 160, 51200, 2048),
    "bloom": Transformer(70, 14336, 112, 250880, 2048, learned_positions=False, embedding_norm=True),
    "llama2-7b": llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2-70b": llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama3-8b": llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3-70b": llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama3-405b": llama(126, 16384, 128, 8, 53248, 128256, 8192),
}


@lru_cache(maxsize=256)
def network(model: Model, accounting: Accounting = "paper", flash: bool = False) -> Network:
    """Return the units of a model.

    Parameters
    ----------
    accounting : who runs it, see the module's docstring
    flash : whether attention keeps the log-sum-exp of its scores in place of the probabilities

    Raises
    ------
    ValueError
        Where refpar's own accounting is asked for what refpar cannot run.
    """
    match model:
        case Bare():
            return bare(model)
        case MLP():
            return perceptron(model)
        case GPT():
            model = of_gpt(model)
        case Transformer():
            pass
    if accounting == "refpar" and (model.gated or model.kv_heads != model.heads or flash or not model.bias):
        raise ValueError("accounting refpar is of this package's own layers: a GPT, without flash attention")
    block = _block(model, accounting, flash)
    blocks = (Unit(f"blocks.{i}", block) for i in range(model.layers))
    units = (Unit("embedding", _embedding(model, accounting)), *blocks, Unit("head", _head(model, accounting)))
    return Network(units, *_loss(model, accounting))


def of_gpt(model: GPT) -> Transformer:
    """Return what the planner sees of refpar's own GPT."""
    return Transformer(model.layers, model.width, model.heads, model.vocabulary, model.context,
                       mlp_width=model.mlp_width or 0, tied=model.tied, dropout=model.dropout > 0,
                       activation=model.activation)  # fmt: skip


def bare(model: Bare) -> Network:
    """Return one unit that is all parameters."""
    return Network((Unit("model", Kind("model", (Tensor("parameters", (model.size,), 0),), None, ())),), ())


def perceptron(model: MLP) -> Network:
    """Return the units of an MLP: column-parallel and row-parallel in turn, an odd last one whole."""
    pairs = list(zip(model.widths, model.widths[1:], strict=False))
    last = len(pairs) - 1
    units = []
    for i, (inputs, outputs) in enumerate(pairs):
        column = i % 2 == 0 and i < last
        row = i % 2 == 1
        axis = 1 if column else 0 if row else None
        x = Tensor("*.input", ("b", inputs), 1 if row else None, "activation")
        relu = Tensor("*.relu.positive", ("b", outputs), 1 if column else None, "bool")
        weight = Tensor("*.weight", (inputs, outputs), axis)
        units.append(
            Unit(
                f"layers.{i}",
                Kind(
                    f"layers.{i}",
                    (weight, Tensor("*.bias", (outputs,), 0 if column else None)),
                    x,
                    (relu,) if i < last else (),
                    (Tensor("*", ("b", inputs, outputs), axis if axis is None else axis + 1),),
                    (Tensor("*", ("b", outputs), dtype="sum"),) if row else (),
                    (Tensor("*", ("b", inputs), dtype="sum"),) if column else (),
                ),
            )
        )
    return Network(tuple(units), (Tensor("loss.error", ("b", model.widths[-1]), dtype="sum"),))


# The parts of a transformer. Activations are named after the layer whose input they are.

HIDDEN = ("b", "s")


def _hidden(name: str, width: int, dtype: str = "activation") -> Tensor:
    return Tensor(name, (*HIDDEN, width), None, dtype, sequence=True)


def _norm(model: Transformer, name: str) -> list[Tensor]:
    parameters = [Tensor(f"{name}.weight", (model.width,))]
    return [*parameters, Tensor(f"{name}.bias", (model.width,))] if model.bias else parameters


def _statistics(name: str, accounting: Accounting) -> list[Tensor]:
    if accounting != "refpar":
        return []
    return [Tensor(f"{name}.{what}", (*HIDDEN, 1), None, "sum") for what in ("mean", "scale")]


def _mask(name: str, model: Transformer) -> list[Tensor]:
    return [_hidden(f"{name}.dropout", model.width, "bool")] if model.dropout else []


def _linear(
    name: str, model: Transformer, shape: tuple[int, ...], axis: int, inputs: int = 1, short: bool = False
) -> list[Tensor]:
    weight = Tensor(f"{name}.weight", shape, axis, short=short)
    bias = Tensor(f"{name}.bias", shape[inputs:], axis - inputs if axis >= inputs else None, short=short)
    return [weight, bias] if model.bias else [weight]


def _block(model: Transformer, accounting: Accounting, flash: bool) -> Kind:
    h, a, k, d, f = model.width, model.heads, model.kv_heads, model.head_dim, model.mlp_width
    norm1, norm2, attention, mlp = "*.norm1", "*.norm2", "*.attention", "*.mlp"
    together = a == k and not model.gated

    parameters = _norm(model, norm1)
    if together:
        parameters += _linear(f"{attention}.qkv", model, (h, 3, a, d), 2)
    else:
        for name, heads in (("q", a), ("k", k), ("v", k)):
            parameters += _linear(f"{attention}.{name}", model, (h, heads, d), 1, short=heads < a)
    parameters += _linear(f"{attention}.proj", model, (a, d, h), 0, inputs=2)
    parameters += _norm(model, norm2)
    if model.gated:
        parameters += _linear(f"{mlp}.gate_up", model, (h, 2, f), 2)
    else:
        parameters += _linear(f"{mlp}.up", model, (h, f), 1)
    parameters += _linear(f"{mlp}.down", model, (f, h), 0)

    kept = _statistics(norm1, accounting)
    kept.append(_hidden(f"{attention}.qkv.input", h))
    if together:
        kept.append(Tensor(f"{attention}.qkv.output", (*HIDDEN, 3, a, d), 3, "activation"))
    else:
        for name, heads in (("q", a), ("k", k), ("v", k)):
            kept.append(Tensor(f"{attention}.{name}", (*HIDDEN, heads, d), 2, "activation", short=heads < a))
    kept += _attention(model, attention, accounting, flash)
    kept.append(Tensor(f"{attention}.proj.input", (*HIDDEN, a, d), 2, "activation"))
    kept += _mask(attention, model)
    kept.append(_hidden(f"{norm2}.input", h))
    kept += _statistics(norm2, accounting)
    kept.append(_hidden(f"{mlp}.up.input", h))
    if model.activation == "relu":
        kept.append(Tensor(f"{mlp}.relu.positive", (*HIDDEN, f), 2, "bool"))
    else:
        for name in ("gate.output", "up.output") if model.gated else ("gelu.input",):
            kept.append(Tensor(f"{mlp}.{name}", (*HIDDEN, f), 2, "activation"))
    kept.append(Tensor(f"{mlp}.down.input", (*HIDDEN, f), 2, "activation"))
    kept += _mask(mlp, model)
    if accounting == "eager":
        kept.append(Tensor("*.eager surplus", (*HIDDEN, round((EAGER - 1) * careful(kept, h))), 2, "bool"))

    products = [
        Tensor(f"{attention}.q", (*HIDDEN, h, a, d), 3),
        Tensor(f"{attention}.k", (*HIDDEN, h, k, d), 3, short=k < a),
        Tensor(f"{attention}.v", (*HIDDEN, h, k, d), 3, short=k < a),
        Tensor(f"{attention}.scores", ("b", a, "s", "s", d), 1, core=True),
        Tensor(f"{attention}.mixed", ("b", a, "s", "s", d), 1, core=True),
        Tensor(f"{attention}.proj", (*HIDDEN, a, d, h), 2),
        *(Tensor(f"{mlp}.{name}", (*HIDDEN, h, f), 3) for name in (("gate", "up") if model.gated else ("up",))),
        Tensor(f"{mlp}.down", (*HIDDEN, f, h), 2),
    ]
    sums = tuple(Tensor(name, (*HIDDEN, h), dtype="sum") for name in (attention, mlp))
    return Kind("block", tuple(parameters), _hidden("*.norm1.input", h), tuple(kept), tuple(products), sums, sums)


def _attention(model: Transformer, name: str, accounting: Accounting, flash: bool) -> list[Tensor]:
    """Return what softmax(q k^T) v keeps: all of it is what selective recomputation drops."""
    square = ("b", model.heads, "s", "s")
    if flash:
        return [Tensor(f"{name}.log_sum_exp", ("b", model.heads, "s"), 1, "float32")]
    kept = [Tensor(f"{name}.probabilities", square, 1, "activation", core=True)]
    if model.dropout:
        # refpar draws the mask of all heads, so that it does not depend on tp, and keeps a view of it.
        kept.append(Tensor(f"{name}.mask", square, None if accounting == "refpar" else 1, "bool", core=True))
        if accounting != "refpar":
            kept.append(Tensor(f"{name}.dropped", square, 1, "activation", core=True))
    return kept


def careful(kept: Sequence[Tensor], h: int) -> float:
    """Return the bytes for each token that careful accounting has of a block, its input included, at 2 bytes each,
    without the attention matrices (which no framework keeps twice)."""
    grid = Grid(1, 1)
    widths = {"activation": 2, "bool": 1, "float32": 4}
    return 2 * h + sum(t.elements(grid) * widths[t.dtype] for t in kept if not t.core)


def _embedding(model: Transformer, accounting: Accounting) -> Kind:
    h = model.width
    parameters = [Tensor("*.token.weight", (model.vocabulary, h), 0)]
    if model.learned_positions:
        parameters.append(Tensor("*.position.weight", (model.context, h)))
    if model.embedding_norm:
        parameters += _norm(model, "*.norm")
    kept = []
    if accounting == "refpar":
        kept.append(Tensor("*.ids", HIDDEN, None, "int64"))
        kept.append(Tensor("*.here", HIDDEN, None, "bool", parallel=True))
    if model.embedding_norm:
        kept.append(_hidden("*.norm.input", h))
    kept += _mask("*", model)
    return Kind("embedding", tuple(parameters), None, tuple(kept), (), (Tensor("*", (*HIDDEN, h), dtype="sum"),))


def _head(model: Transformer, accounting: Accounting) -> Kind:
    h, words = model.width, model.vocabulary
    weight = Tensor("embedding.token.weight" if model.tied else "*.weight", (words, h), 0)
    kept = [*_statistics("*.norm", accounting), _hidden("*.input", h)]
    product = Tensor("*.logits", (*HIDDEN, h, words), 3)
    sums = (Tensor("*", (*HIDDEN, h), dtype="sum"),)
    return Kind(
        "head", (*_norm(model, "*.norm"), weight), _hidden("*.norm.input", h), tuple(kept), (product,), (), sums
    )


def _loss(model: Transformer, accounting: Accounting) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    logits = (*HIDDEN, model.vocabulary)
    sums = Tensor("loss.maximum", (*HIDDEN, 1), dtype="sum"), Tensor("loss.sums", (*HIDDEN, 2), dtype="sum")
    if accounting == "refpar":
        kept = [
            Tensor("loss.probabilities", logits, 2, "sum"),
            Tensor("loss.targets", HIDDEN, None, "int64"),
            Tensor("loss.mask", HIDDEN, None, "bool"),
            Tensor("loss.here", HIDDEN, None, "bool", parallel=True),
        ]
    else:
        kept = [Tensor("loss.logits", logits, 2, "float32")]
    if accounting == "eager":  # both are alive at once: 6 bytes a logit
        kept.append(Tensor("loss.logits before the cast", logits, 2, "activation"))
    return tuple(kept), sums
