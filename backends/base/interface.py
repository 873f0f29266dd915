"""What a device must offer, and what it is given.

A task describes itself as a `Trainable`; a `Backend` compiles it for an example batch into a
`Program`. For each microbatch the program yields the gradient *sums* (over samples or tokens,
never means) of one block after the other in reverse order, while the backward of earlier blocks
still runs, and then the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.spec.manifest import Block
from protocol.spec.run_spec import BaseDtype, Precision

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float32]
Sums = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch on the host, of the same shapes for every full microbatch of a run.

    Attributes:
        arrays: What the model and the loss read, by name.
        weight: What the gradient sum is divided by in the end: samples or tokens, or the sum of
            their weights. Zero is legal.
    """

    arrays: Mapping[str, NDArray[Any]]
    weight: float


@dataclass(frozen=True, slots=True)
class Trainable:
    """What a backend compiles.

    Attributes:
        blocks: Trainable tensors by block, in forward order; names as in `named_parameters`.
        module: The torch module on the CPU, weights loaded, frozen parameters frozen. None for
            the scripted backend.
        loss: Takes the module and a batch's arrays as device tensors; gives the loss *summed*
            over samples or tokens, a scalar tensor.
        evaluate: Takes the same; gives evaluation sums by name (counts are whole numbers).
        seed: The run's seed; `gradients` is given a seed of its own for each microbatch.
        threads: CPU threads.
        precision: What forward may compute in; parameters, gradients and sums are float32.
        base_dtype: What frozen weights are stored in; see `backends.base.frozen_base`.
    """

    blocks: tuple[Block, ...]
    module: torch.nn.Module | None = None
    loss: Callable[[Any, Mapping[str, Any]], Any] | None = None
    evaluate: Callable[[Any, Mapping[str, Any]], Sums] | None = None
    seed: int = 0
    threads: int = 1
    precision: Precision = "float32"
    base_dtype: BaseDtype = "float32"


@dataclass(frozen=True, slots=True)
class BlockGradient:
    """The gradient sum of one block over one microbatch: flat float32, the manifest's layout.

    The array is the receiver's own: the program does not touch it again.
    """

    block: int
    values: Array


@dataclass(frozen=True, slots=True)
class Loss:
    """Last item of a microbatch: the loss summed over its samples or tokens, and its weight."""

    loss_sum: float
    weight: float


@dataclass(frozen=True, slots=True)
class BlockAdded:
    """A microbatch's gradient of a block is in its node's sum, which more are to come to."""

    block: int


MicrobatchItem = BlockGradient | Loss
NodeItem = BlockGradient | BlockAdded | Loss


class Gradients(Protocol):
    """What one microbatch gives, as it comes: blocks in reverse order, then the loss."""

    def __iter__(self) -> Iterator[MicrobatchItem]: ...

    def close(self) -> None:
        """Abandon the rest; the program stays usable."""


class NodeGradients(Protocol):
    """What one microbatch of a node gives, as it comes."""

    def __iter__(self) -> Iterator[NodeItem]: ...

    def close(self) -> None:
        """Abandon the rest, and the node; the program stays usable."""


class NodeSum(Protocol):
    """The gradient sums of one node of the reduction tree: those of its microbatches, added in
    float32 along the tree, wherever that is; losses and weights in float64."""

    def add(self, batch: Batch, seed: int) -> NodeGradients:
        """Forward and backward of the node's next microbatch; arguments as for `gradients`.

        Gives for each block, last block first, `BlockAdded`, or with the node's last microbatch
        the node's sum as a `BlockGradient`; after it the node's `Loss`. One microbatch is done
        before the next is added.
        """


class Program(Protocol):
    """A compiled task on one device."""

    @property
    def memory(self) -> str:
        """What it needs of the device's memory, in words; empty where that is not known."""

    def load(self, parameters: list[Array]) -> None:
        """Take these values of all trainable tensors: one flat array per block, copied."""

    def gradients(self, batch: Batch, seed: int) -> Gradients:
        """Forward and backward of one microbatch; see the module's text.

        Every block comes exactly once, last block first; a tensor without a gradient counts as
        zeros. Closing the iterator early abandons the microbatch and leaves the program usable.

        Args:
            batch: Shapes as in the example batch, or fewer samples.
            seed: Seeds every random draw (dropout) of this microbatch.
        """

    def node_sum(self, leaves: int) -> NodeSum:
        """Start on a node of so many microbatches; one node is in work at a time."""

    def evaluate(self, batch: Batch) -> Sums:
        """Evaluation sums over one batch, in evaluation mode."""

    def close(self) -> None:
        """Free the device's memory and threads."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One row of `worker devices`.

    Attributes:
        backend: The kind of device.
        name: As its driver calls it.
        usable: Whether it can be used.
        reason: Why not.
        index: Its number among those of its kind.
        memory_bytes: Its own memory; 0 where it is not known or is the host's.
        software: Whether it is one in name only and computes on the CPU.
    """

    backend: str
    name: str
    usable: bool
    reason: str
    index: int = 0
    memory_bytes: int = 0
    software: bool = False


class Backend(Protocol):
    """One device of one kind."""

    @property
    def info(self) -> DeviceInfo:
        """Which device this is."""

    def signature(self, threads: int) -> Mapping[str, str]:
        """What decides the bits of a gradient here: device kind, library versions, threads,
        instruction set."""

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        others: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """Make the task ready on the device.

        Args:
            trainable: The task.
            example: A microbatch.
            others: Microbatches of other shapes; what takes time for each shape is done now, and
                what a shape would be refused for is found now.
            evaluations: Held-out parts, one of each shape.

        Raises:
            SamestepError: It cannot be, with the reason.
        """


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The registry's answer: a backend, and why it was this one."""

    backend: Backend
    reason: str
    passed_over: tuple[DeviceInfo, ...] = field(default=())
