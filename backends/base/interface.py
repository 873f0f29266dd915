"""The interface between tasks and devices.

A task describes itself as a `Trainable`; a `Backend` compiles it for an example batch into a
`Program`. For each subtree of the reduction tree the program yields gradient *sums* (over samples
or tokens, never means), block by block in reverse order while the backward of earlier blocks still
runs, and then the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from protocol.base.errors import DataError
from protocol.spec.manifest import Block, EmbeddingLayout
from protocol.spec.sections.model import ArithmeticSpec, BaseDtype, ComputePrecision
from protocol.spec.sections.tasks import Unit

if TYPE_CHECKING:
    import torch

NATIVE_ARITHMETIC: Final = ArithmeticSpec()
EMBEDDING_GRADIENT: Final = "gradient of embeddings "
PARAMETER_GRADIENT: Final = "gradient of parameter "
"""Prefixes of the names of arrays that carry the gradient of a coupled loss."""

Array = NDArray[np.float32]
Sums = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch on the host.

    Attributes:
        arrays: Inputs of the model and the loss, by name.
        weight: The batch's part of the divisor of the gradient sum: the number of samples or
            tokens, or the sum of their weights. Zero is valid.
    """

    arrays: Mapping[str, NDArray[Any]]
    weight: float


class LossFailed(DataError):
    """The model or its loss failed on a batch; the device is not at fault.

    Attributes:
        batch: The batch.
        row: Row of the sample in the batch's arrays; None if unknown.
    """

    def __init__(self, text: str, batch: Batch, row: int | None = None) -> None:
        super().__init__(text)
        self.batch = batch
        self.row = row


class CounterMismatch(DataError):
    """Microbatches of one step have changed a counter by different amounts."""

    def __init__(self, name: str, first_count: int, second_count: int) -> None:
        super().__init__(
            f"expected all microbatches of a step to change the counter {name!r} equally, got "
            f"changes by {first_count} and by {second_count}; count microbatches, not samples, or "
            "keep it out of the module"
        )


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """The result of one microbatch of a capture.

    Attributes:
        rows: Captured data, uint8, shape (samples, bytes per sample).
        loss_sum: The loss, summed over samples or tokens.
    """

    rows: NDArray[np.uint8]
    loss_sum: float


@dataclass(frozen=True, slots=True)
class CoupledLoss:
    """A loss that couples all samples of a step, through one embedding per sample.

    Attributes:
        embed: Takes the module and a microbatch's arrays as device tensors; returns fields by name,
            each of shape (samples, ...). A row depends only on its own sample.
        loss: Takes the module and the fields of all samples of the step; returns a loss for each
            sample, shape (samples,).
        layout: The fields.
        samples: Number of samples of a full step; 0 if unknown.
    """

    embed: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
    loss: Callable[[Any, Mapping[str, Any]], Any]
    layout: EmbeddingLayout
    samples: int = 0


@dataclass(frozen=True, slots=True)
class StepLoss:
    """A coupled loss of one step, and its gradients.

    Attributes:
        losses: The loss of each sample, float32.
        embedding_gradients: By field, the gradient with respect to the embeddings: float32,
            (samples, ...).
        parameter_gradients: By name, the gradient with respect to parameters that the loss itself
            reads, such as a learned temperature.
    """

    losses: Array
    embedding_gradients: Mapping[str, Array]
    parameter_gradients: Mapping[str, Array]

    def add_gradients_to(self, batch: Batch, samples: slice, *, is_first: bool) -> Batch:
        """Return a microbatch with the gradients that its backward needs, as further arrays.

        Args:
            batch: The microbatch.
            samples: The microbatch's samples among those of the step.
            is_first: Whether this is the step's first microbatch, which also carries the gradients
                of the loss's own parameters.
        """
        arrays = dict(batch.arrays)
        arrays |= {
            EMBEDDING_GRADIENT + name: g[samples] for name, g in self.embedding_gradients.items()
        }
        if is_first:
            arrays |= {PARAMETER_GRADIENT + name: g for name, g in self.parameter_gradients.items()}
        return Batch(arrays, batch.weight)


@dataclass(frozen=True, slots=True)
class Trainable:
    """A task as a backend compiles it.

    Attributes:
        blocks: Trainable tensors by block, in forward order; names as in `named_parameters`.
        module: The torch module on the CPU, with its weights; frozen parameters need no grad. None
            for the scripted backend.
        loss: Takes the module and a batch's arrays as device tensors; returns the loss *summed*
            over samples or tokens, a scalar tensor. With `unit` "microbatch" it returns a mean,
            which the backend multiplies by the batch's weight.
        unit: The unit on which the loss and the changes of buffers depend: one sample, or the
            microbatch.
        evaluate: Takes the same arguments; returns evaluation sums by name (counts are integers).
        capture_rows: Takes the same arguments; returns captured data. None for a task that trains.
        coupled: A loss over all samples of a step. If set, `loss` is the loss of
            `backends.losses.coupled_loss`, which carries its gradient into each microbatch.
        seed: The run's seed; `gradients` takes a seed for each microbatch.
        threads: CPU threads.
        precision: Type in which forward may compute; parameters, gradients and sums are float32.
        base_dtype: Storage type of frozen weights; see `backends.quantization.frozen_base`.
        arithmetic: Native or canonical. The bits of canonical arithmetic do not depend on
            `Backend.numerics_profile`.
        keeps_module: Whether the module is used after the run, so the host keeps its frozen
            weights.
        evaluation_parts: Names of the submodules that the loss puts into evaluation mode.
    """

    blocks: tuple[Block, ...]
    module: torch.nn.Module | None = None
    loss: Callable[[Any, Mapping[str, Any]], Any] | None = None
    evaluate: Callable[[Any, Mapping[str, Any]], Sums] | None = None
    capture_rows: Callable[[Any, Mapping[str, Any]], CaptureResult] | None = None
    coupled: CoupledLoss | None = None
    unit: Unit = "sample"
    seed: int = 0
    threads: int = 1
    precision: ComputePrecision = "float32"
    base_dtype: BaseDtype = "float32"
    arithmetic: ArithmeticSpec = NATIVE_ARITHMETIC
    keeps_module: bool = False
    evaluation_parts: frozenset[str] = frozenset()


Leaf = tuple[Batch, int]
"""A microbatch and the seed of its random draws (dropout)."""


@dataclass(frozen=True, slots=True)
class BlockGradient:
    """The gradient sum of one block over a subtree: flat float32, in the manifest's layout.

    The part of a tensor that no microbatch reached is absent
    (`protocol.exact.reduction.absent`). The receiver owns the array.
    """

    block: int
    values: Array


@dataclass(frozen=True, slots=True)
class Loss:
    """The last item of a subtree: its loss, summed over samples or tokens, and its weight."""

    loss_sum: float
    weight: float


@dataclass(frozen=True, slots=True)
class BlockAdded:
    """A microbatch's gradient of a block has been added to the subtree's sum, which still lacks
    other microbatches."""

    block: int


GradientItem = BlockGradient | BlockAdded | Loss


class GradientStream(Protocol):
    """The results of a subtree, as they become available.

    For each microbatch every block, last block first: `BlockAdded`, or for the last microbatch the
    subtree's sum as a `BlockGradient`; then the subtree's `Loss`.
    """

    def __iter__(self) -> Iterator[GradientItem]: ...

    def close(self) -> None:
        """Abandon the rest of the subtree; the program stays usable. Any thread may call this."""


class Program(Protocol):
    """A compiled task on one device."""

    loss_scale: float
    """Factor of the loss before backward, by which gradients are divided afterwards: a power of
    two, 1 unless the task computes in float16."""

    @property
    def memory(self) -> str:
        """A description of the device memory that the program needs; empty if unknown."""

    @property
    def parity(self) -> str:
        """A description of the difference from torch's gradients; empty if torch computes them."""

    def load(self, parameters: list[Array]) -> None:
        """Copy in the values of all trainable tensors: one flat array per block."""

    def gradients(self, leaves: Sequence[Leaf]) -> GradientStream:
        """Compute the gradients of one subtree's microbatches in order.

        Gradients are added along the tree in float32, on the device or the host; losses and weights
        in float64. Gradients of tensors that no microbatch reaches are absent
        (`protocol.exact.reduction.absent`). Only one subtree is computed at a time.

        Args:
            leaves: At least one microbatch, with the shapes of the example batches or fewer
                samples.
        """

    def evaluate(self, batch: Batch) -> Sums:
        """Compute evaluation sums over one batch, in evaluation mode."""

    def capture_rows(self, batch: Batch) -> CaptureResult:
        """Capture one microbatch, in evaluation mode.

        Raises:
            SamestepError: The task captures nothing, or this device cannot.
        """

    def keeps_subnormals(self) -> bool:
        """Whether the threads that compute now keep subnormal numbers: part of the numerics
        profile, see `protocol.exact.subnormals`."""

    def close(self) -> None:
        """Free the device's memory and threads."""


@runtime_checkable
class InPlaceProgram(Protocol):
    """A program whose device reads main memory and needs no copy of the parameters."""

    def share(self, parameters: list[Array]) -> None:
        """Read parameters from these arrays, one per block, from now on.

        `load` still copies what cannot be shared. The caller must not change the arrays while a
        microbatch runs.
        """


@runtime_checkable
class CoupledLossProgram(Protocol):
    """A program that trains a loss over all samples of a step: `Trainable.coupled`."""

    def embed(self, leaves: Sequence[Leaf]) -> Generator[NDArray[np.uint8], None, None]:
        """Compute the embeddings of microbatches, in training mode, with the operations that
        `gradients` uses for them.

        Yields:
            The rows of each microbatch; see `protocol.exact.embedding_rows`.
        """

    def step_loss(self, rows: NDArray[np.uint8], seed: int) -> StepLoss:
        """Compute the loss of a step and its gradients, from the rows of all its samples."""

    def take_embeddings(self) -> list[NDArray[np.uint8]]:
        """Return the rows of the microbatches that `gradients` has computed since the last call."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One row of `worker devices`.

    Attributes:
        backend: Name of the backend, such as `cuda`.
        name: The device's name, as the driver reports it.
        usable: Whether the device can be used.
        reason: Why the device cannot be used.
        index: Number of the device among devices of its backend.
        memory_bytes: Size of the device's memory; 0 if unknown or shared with the host.
        software: Whether the device is emulated on the CPU.
    """

    backend: str
    name: str
    usable: bool
    reason: str
    index: int = 0
    memory_bytes: int = 0
    software: bool = False


class Backend(Protocol):
    """One device."""

    @property
    def info(self) -> DeviceInfo:
        """The device's description."""

    def numerics_profile(self, threads: int) -> Mapping[str, str]:
        """Return the properties that determine the bits of a gradient on this device: device type,
        library versions, driver, threads, instruction set, a card's name. The value of `processor`
        is only for people."""

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        other_batches: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """Compile a task for the device.

        Args:
            trainable: The task.
            example: A microbatch.
            other_batches: Microbatches of other shapes, so that compile errors occur now.
            evaluations: Evaluation parts, one of each shape.

        Raises:
            SamestepError: The device cannot train the task, with the reason.
        """


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, and why the registry chose it."""

    backend: Backend
    reason: str
    passed_over: tuple[DeviceInfo, ...] = field(default=())
