"""Which copies of a parameter exist: the answer to "how many bytes a parameter?" is a list, not a constant.

Adam in mixed precision is said to take 8, 10, 16, 18 or 20 bytes a parameter. Each is right for another set
of copies::

                          weights   gradients    master   moments    sum
    mixed-adam            fp16 2    fp16 2       fp32 4   fp32 8     16    ZeRO, figure 1
    bf16-fp32-grads       bf16 2    fp32 4       fp32 4   fp32 8     18    Megatron-LM; Korthikanti's figure 1
    bf16-both-grads       bf16 2    bf16 2 + 4   fp32 4   fp32 8     20    DeepSpeed's ZeRO-2; Ultra-Scale playbook
    bf16-no-master        bf16 2    bf16 2       -        fp32 8     12    10 without gradients (scaling-book)
    pure-bf16             bf16 2    bf16 2       -        bf16 4     8

DeepSpeed's documentation still gives ZeRO-2 as 4 + 16/N bytes; its code has counted 2 + 18/N since
deepspeed#5099. With gradients owned from the first reduction on, the code is right. GPipe's table 1 has the
parameter and the activation memory of Transformer-naive-1 the wrong way round: 282.2 M parameters at that table's
12 bytes are 3.15 GiB, which it prints as activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from refpar.optim import SGD, Adam
from refpar.plan.units import BITS
from refpar.precision import Precision


@dataclass(frozen=True, eq=False)
class Recipe:
    """The copies of every parameter.

    Attributes
    ----------
    name : of the recipe
    weights : type of the copy that the layers compute with
    gradients : by copy, its type
    optimizer : by copy, its type; the float32 master weights belong here, as in ZeRO's K
    activations : type of activations, and of their gradients on their way
    reduce : type in which partial sums of gradients travel; that of the first gradient copy by default
    overhead : further bytes a parameter in the optimizer (block scales of 8-bit states)
    """

    name: str
    weights: str
    gradients: Mapping[str, str]
    optimizer: Mapping[str, str]
    activations: str = ""
    reduce: str = ""
    overhead: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "activations", self.activations or self.weights)
        object.__setattr__(self, "reduce", self.reduce or self.travels)

    @property
    def travels(self) -> str:
        """The type in which finished gradients travel and are kept: the widest copy."""
        return max(self.gradients.values(), key=BITS.__getitem__)

    @property
    def accumulator(self) -> str:
        """The type of sums of activations."""
        return self.activations if BITS[self.activations] >= 32 else "float32"

    @property
    def bytes_per_parameter(self) -> tuple[float, float, float]:
        """Bytes of weights, gradients and optimizer for each parameter: ZeRO's 2, 2 and K."""
        gradients = sum(BITS[dtype] for dtype in self.gradients.values()) / 8
        return BITS[self.weights] / 8, gradients, sum(BITS[d] for d in self.optimizer.values()) / 8 + self.overhead

    @property
    def scaled(self) -> bool:
        """Whether gradients in float16 need a loss scale."""
        return "float16" in (self.weights, *self.gradients.values())


def _recipe(name: str, weights: str, gradients: str, optimizer: str, overhead: float = 0.0) -> Recipe:
    def copies(text: str) -> dict[str, str]:
        return dict(part.split(":") for part in text.split()) if text else {}

    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8", "int8": "int8"}
    return Recipe(
        name,
        short[weights],
        {key: short[value] for key, value in copies(gradients).items()},
        {key: short[value] for key, value in copies(optimizer).items()},
        activations="bfloat16" if weights == "fp8" else "",
        overhead=overhead,
    )


ADAM = "master:fp32 m:fp32 v:fp32"
BLOCK_SCALES = 2 * 4 / 2048  # a float32 for each 2,048 elements of m, and of v

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe("mixed-adam", "fp16", "gradients:fp16", ADAM),
        _recipe("mixed-momentum", "fp16", "gradients:fp16", "master:fp32 momentum:fp32"),
        _recipe("mixed-sgd", "fp16", "gradients:fp16", "master:fp32"),
        _recipe("bf16-adam", "bf16", "gradients:bf16", ADAM),
        _recipe("bf16-fp32-grads", "bf16", "main_gradients:fp32", ADAM),
        _recipe("bf16-both-grads", "bf16", "gradients:bf16 main_gradients:fp32", ADAM),
        _recipe("bf16-no-master", "bf16", "gradients:bf16", "m:fp32 v:fp32"),
        _recipe("pure-bf16", "bf16", "gradients:bf16", "m:bf16 v:bf16"),
        _recipe("fp32-sgd", "fp32", "gradients:fp32", ""),
        _recipe("fp32-momentum", "fp32", "gradients:fp32", "momentum:fp32"),
        _recipe("fp32-adam", "fp32", "gradients:fp32", "m:fp32 v:fp32"),
        _recipe("8bit-adam", "bf16", "gradients:bf16", "master:fp32 m:int8 v:int8", overhead=BLOCK_SCALES),
        _recipe("8bit-no-master", "bf16", "gradients:bf16", "m:int8 v:int8", overhead=BLOCK_SCALES),
        _recipe("fp8-adam", "fp8", "gradients:bf16", ADAM),
    )
}


def of(optimizer: SGD | Adam, types: Precision) -> Recipe:
    """Return the copies that refpar itself keeps for a case."""
    master = {} if types.master == types.compute else {"master": types.master}
    states = dict.fromkeys(optimizer.state_names, types.master)
    return Recipe("refpar", types.compute, {"gradients": types.gradients}, {**master, **states}, reduce=types.reduce)
