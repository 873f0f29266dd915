"""What a device must offer, and what it is given.

A task describes itself as a `Trainable`; a `Backend` compiles it for an example batch into a
`Program`. For each node of the reduction tree the program gives the gradient *sums* (over samples
or tokens, never means) of one block after the other in reverse order, while the backward of earlier
blocks still runs, and then the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from protocol.base.errors import DataError
from protocol.spec.arithmetic_spec import ArithmeticSpec
from protocol.spec.manifest import Block
from protocol.spec.run_spec import BaseDtype, ComputePrecision

if TYPE_CHECKING:
    import torch

NATIVE: Final = ArithmeticSpec()

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


class LossRaised(DataError):
    """The model or its loss raised, or cannot compute with the batch: no fault of the device.

    Attributes:
        batch: What it was computing.
        row: Of the batch's arrays, where it is that of one sample and known.
    """

    def __init__(self, text: str, batch: Batch, row: int | None = None) -> None:
        super().__init__(text)
        self.batch = batch
        self.row = row


@dataclass(frozen=True, slots=True)
class Captured:
    """What one microbatch of a capture gives.

    Attributes:
        rows: What is kept of each sample, (samples, bytes of one), uint8.
        loss_sum: The loss summed over the batch's weight.
    """

    rows: NDArray[np.uint8]
    loss_sum: float


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
        rows: Of a task that trains nothing: takes the same, gives what is kept.
        seed: The run's seed; `gradients` is given a seed of its own for each microbatch.
        threads: CPU threads.
        precision: What forward may compute in; parameters, gradients and sums are float32.
        base_dtype: What frozen weights are stored in; see `backends.base.frozen_base`.
        arithmetic: By whose rules it is computed; where it is canonical, that and the results of a
            probe decide the bits, and nothing of `Backend.signature`.
        given_back: The module is used after the run, so the host keeps its frozen weights, too.
        in_evaluation: Names of the module's parts that the loss puts into evaluation mode.
    """

    blocks: tuple[Block, ...]
    module: torch.nn.Module | None = None
    loss: Callable[[Any, Mapping[str, Any]], Any] | None = None
    evaluate: Callable[[Any, Mapping[str, Any]], Sums] | None = None
    rows: Callable[[Any, Mapping[str, Any]], Captured] | None = None
    seed: int = 0
    threads: int = 1
    precision: ComputePrecision = "float32"
    base_dtype: BaseDtype = "float32"
    arithmetic: ArithmeticSpec = NATIVE
    given_back: bool = False
    in_evaluation: frozenset[str] = frozenset()


Leaf = tuple[Batch, int]
"""A microbatch, and what seeds every random draw (dropout) of it."""


@dataclass(frozen=True, slots=True)
class BlockGradient:
    """The gradient sum of one block over a node: flat float32, the manifest's layout.

    That of a tensor that no microbatch of the node has reached is absent.

    The array is the receiver's own: the program does not touch it again.
    """

    block: int
    values: Array


@dataclass(frozen=True, slots=True)
class Loss:
    """Last item of a node: the loss summed over its samples or tokens, and its weight."""

    loss_sum: float
    weight: float


@dataclass(frozen=True, slots=True)
class BlockAdded:
    """A microbatch's gradient of a block is in its node's sum, which more are to come to."""

    block: int


NodeItem = BlockGradient | BlockAdded | Loss


class NodeGradients(Protocol):
    """What a node gives, as it comes.

    For each microbatch every block, last block first: `BlockAdded`, or with the node's last
    microbatch the node's sum as a `BlockGradient`; after them the node's `Loss`.
    """

    def __iter__(self) -> Iterator[NodeItem]: ...

    def close(self) -> None:
        """Abandon the rest; the program stays usable. Any thread may call it."""


class Program(Protocol):
    """A compiled task on one device."""

    loss_scale: float
    """What the loss is multiplied by before backward, and gradients are divided by after it: a
    power of two, 1 unless the task computes in float16."""

    @property
    def memory(self) -> str:
        """What it needs of the device's memory, in words; empty where that is not known."""

    @property
    def parity(self) -> str:
        """How far its gradients are from torch's own, in words; empty where torch computes them."""

    def load(self, parameters: list[Array]) -> None:
        """Take these values of all trainable tensors: one flat array per block, copied."""

    def gradients(self, leaves: Sequence[Leaf]) -> NodeGradients:
        """Forward and backward of one node's microbatches, one after the other.

        Their gradients are added in float32 along the tree, wherever that is; losses and weights
        in float64. The gradient of a tensor that a microbatch does not reach is absent
        (`protocol.exact.absent`). One node is in work at a time.

        Args:
            leaves: At least one; shapes as in the example batches, or fewer samples.
        """

    def evaluate(self, batch: Batch) -> Sums:
        """Evaluation sums over one batch, in evaluation mode."""

    def rows(self, batch: Batch) -> Captured:
        """What a task that trains nothing keeps of one microbatch, in evaluation mode.

        Raises:
            SamestepError: The task captures nothing, or this device cannot.
        """

    def keeps_subnormals(self) -> bool:
        """Whether the threads that compute just now keep subnormal numbers: part of the signature,
        see `protocol.exact.subnormals`."""

    def close(self) -> None:
        """Free the device's memory and threads."""


@runtime_checkable
class ComputesInPlace(Protocol):
    """A program whose device reads main memory: it can do without weights of its own."""

    def share(self, parameters: list[Array]) -> None:
        """Compute from now on with the values in these arrays, one for each block, as they are
        then; `load` copies what cannot be shared. Nobody changes them while a microbatch runs."""


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
        """What decides the bits of a gradient here: device kind, library versions, driver, threads,
        instruction set, a card's name. A `processor` is named for people, and decides nothing."""

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
