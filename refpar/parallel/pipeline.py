"""Pipeline parallel: a rank runs a slice of the model's units, and micro-batches flow through the ranks.

Which stage does what, and in which order, is data (:mod:`refpar.parallel.schedule`): this file is the worker
that does what the list says, whatever list it is::

    stage 0                      stage 1                      stage 2
    Forward(m)                   RecvActivation(m)            RecvActivation(m)
    SendActivation(m)  ------->  Forward(m)                   Forward(m), loss
                                 SendActivation(m)  ------->
                                 RecvGradient(m)    <-------  Backward(m), from the loss
    RecvGradient(m)    <-------  Backward(m)                  SendGradient(m)
    Backward(m)                  SendGradient(m)

    held    about 1/K of the model (3 units on 2 stages are 2 and 1), and the activations of every micro-batch
            that has gone forward and not yet back: M of them for GPipe, min(M, K - stage) for 1F1B
    sent    for each micro-batch and boundary, rows * sequence * width elements onward, the activation, and as
            many back, its gradient. 2 rows of 4 tokens, 10 wide, in 3 micro-batches are messages of 40, 40 and 0
    idle    (K-1)/(M+K-1) of the step, at equal costs (Huang et al. 2018, section 2.3)

A stage's own gradients add up over micro-batches as they would on one device, so the schedule changes the
order of additions and nothing else. A weight that two stages hold, as embedding and head do where they are tied,
has a part of its gradient on each: :func:`refpar.parallel.hybrid.tied_sum` adds the parts up on both, once a step,
after the last backward pass. Every stage divides by the same global token count, which is known before the first
micro-batch starts; a stage that divided by its own would have none to divide by.

Messages between two stages arrive in the order in which they were sent, so they carry no tag. The receiver
has to know the shape: it travels ahead of the first activation of a step, and counts as set-up.

An instruction also names the slice ``v`` of the model that it is about. A stage here holds one slice, so it need
not look; one that held several, as interleaving does, would keep its units, inputs and gradients by ``v`` as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from refpar.arrays import Array, array_module
from refpar.case import Batch
from refpar.comm.communicator import Communicator
from refpar.nn.layer import At, Stream, live_bytes
from refpar.nn.loss import Loss
from refpar.nn.models import Units
from refpar.parallel import schedule as do

MOST_AXES = 8


class Store(Protocol):
    """Who holds weights and gradients: ``DataParallel`` of ``data.py``, or ``Zero`` of ``zero.py``."""

    weights: dict[str, Array]

    def consume(self, name: str, gradient: Array) -> None: ...

    def unit_done(self, index: int, last: bool) -> None: ...


@dataclass
class Stage:
    """One stage in the middle of a step.

    Attributes
    ----------
    comm : the stages, in order; this one is ``comm.rank``
    units : of this stage
    loss : used on the last stage
    store : holds the weights, takes the gradients
    micro_batches : the rows of each; every stage has them all, the first looks at inputs, the last at targets
    at : where each micro-batch stands
    seed : what the backward pass starts from
    dtype : of activations
    executed : what has been done, in the order in which it was
    loss_sum : of the micro-batches so far, on the last stage
    peak_bytes, peak_live : most that was alive at once for backward passes to come: bytes, and micro-batches
    """

    comm: Communicator
    units: Units
    loss: Loss
    store: Store
    micro_batches: Sequence[Batch]
    at: Sequence[At]
    seed: float
    dtype: str
    executed: list[do.Instruction] = field(default_factory=list)
    loss_sum: float = 0.0
    peak_bytes: int = 0
    peak_live: int = 0
    backwards: int = 0
    going: tuple[int, ...] | None = None
    coming: tuple[int, ...] | None = None
    inputs: dict[int, Array] = field(default_factory=dict)
    outputs: dict[int, Array] = field(default_factory=dict)
    saved: dict[int, list[Any]] = field(default_factory=dict)
    gradients: dict[int, Array] = field(default_factory=dict)

    def run(self, instructions: Sequence[do.Instruction]) -> None:
        """Do what the list says."""
        for instruction in instructions:
            match instruction:
                case do.RecvActivation(m=m):
                    self.inputs[m] = self.receive_activation(m)
                case do.Forward(m=m):
                    self.forward(m)
                case do.SendActivation(m=m):
                    self.send_activation(self.outputs.pop(m))
                case do.RecvGradient(m=m):
                    self.gradients[m] = self.receive_gradient(m)
                case do.Backward(m=m):
                    self.backward(m)
                case do.SendGradient(m=m):
                    self.comm.send(self.gradients.pop(m), self.comm.rank - 1)
                case do.ReduceGradients() | do.Step():
                    pass  # the store has reduced the last gradients as they came; the step is the caller's
            self.executed.append(instruction)

    @property
    def first(self) -> bool:
        """Whether this stage sees the inputs."""
        return self.comm.rank == 0

    @property
    def last(self) -> bool:
        """Whether this stage sees the loss."""
        return self.comm.rank == self.comm.size - 1

    def forward(self, m: int) -> None:
        """Run micro-batch ``m`` through this stage's units, to the loss on the last one."""
        x = self.micro_batches[m].inputs if self.first else self.inputs.pop(m)
        saved = self.saved[m] = []
        for _, layer in self.units:
            x, kept = layer.forward(self.store.weights, x, self.at[m])
            saved.append(kept)
        if self.last:
            loss_sum, kept = self.loss.forward(x, *labels(self.micro_batches, m))
            saved.append(kept)
            self.loss_sum += float(loss_sum)
        else:
            self.outputs[m] = x
        self.measure()

    def backward(self, m: int) -> None:
        """Run micro-batch ``m`` back through this stage's units, the gradients going to the store as they come."""
        saved = self.saved[m]
        dy = self.loss.backward(saved.pop(), self.seed) if self.last else self.gradients.pop(m)
        self.backwards += 1
        for index, (_, layer) in reversed(list(enumerate(self.units))):
            for name, gradient in (stream := Stream(layer.backward(self.store.weights, saved[-1], dy))):
                self.store.consume(name, gradient)
                self.measure()  # while what a layer has recomputed is still there
            dy = stream.dx
            saved.pop()
            self.store.unit_done(index, is_last(self.backwards, len(self.micro_batches)))
        del self.saved[m]
        if not self.first:
            self.gradients[m] = dy

    def send_activation(self, y: Array) -> None:
        """Send an activation to the next stage; ahead of the first of a step, its shape without the rows."""
        if self.going is None:
            self.going = y.shape[1:]
            header = np.zeros(MOST_AXES, np.int64)
            header[: y.ndim] = y.ndim, *self.going
            with self.comm.ledger.observing():
                self.comm.send(header, self.comm.rank + 1)
        self.comm.send(y, self.comm.rank + 1)

    def receive_activation(self, m: int) -> Array:
        """Return the activation of micro-batch ``m`` from the previous stage."""
        if self.coming is None:
            with self.comm.ledger.observing():
                axes, *shape = self.comm.recv(np.empty(MOST_AXES, np.int64), self.comm.rank - 1).tolist()
            self.coming = tuple(shape[: axes - 1])
        return self.comm.recv(self.room(m, self.coming), self.comm.rank - 1)

    def receive_gradient(self, m: int) -> Array:
        """Return the gradient of what :meth:`send_activation` sent, from the next stage."""
        assert self.going is not None
        return self.comm.recv(self.room(m, self.going), self.comm.rank + 1)

    def room(self, m: int, shape: tuple[int, ...]) -> Array:
        """Return an empty array for what comes over a boundary: in the type of activations, whichever way it goes."""
        batch = self.micro_batches[m]
        return array_module(batch.inputs).empty((len(batch), *shape), self.dtype)

    def measure(self) -> None:
        """Note how much is alive for the backward passes to come."""
        self.peak_bytes = max(self.peak_bytes, live_bytes(self.saved))
        self.peak_live = max(self.peak_live, len(self.saved))


def labels(micro_batches: Sequence[Batch], m: int) -> tuple[Array, Array]:
    """Return what the outputs of micro-batch ``m`` are held to: its own targets and mask (DeepSpeed#5729)."""
    return micro_batches[m].targets, micro_batches[m].mask


def is_last(backwards: int, micro_batches: int) -> bool:
    """Return whether gradients are complete: after as many backward passes as there are micro-batches, not before."""
    return backwards == micro_batches


def elements_sent(widths: Sequence[int], tokens: int, stage: int) -> int:
    """Return the elements that a rank of ``stage`` sends in a step: activations onward, and gradients back.

    Parameters
    ----------
    widths : for each boundary, elements that this rank sends over it for a token (a row, for the MLP)
    tokens : of all micro-batches of this replica together
    """
    onward = widths[stage] if stage < len(widths) else 0
    back = widths[stage - 1] if stage > 0 else 0
    return tokens * (onward + back)
