"""The state in a checkpoint, read in pieces for a replica or a worker.

The files are opened once, so the state stays readable if the checkpoint is removed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple, Self

import numpy as np

from coordinator.disk.safetensors_file import SafetensorsFile
from coordinator.storage.states.checkpoint import STATE_FILE, Checkpoint
from protocol.base.errors import StorageDamaged
from protocol.exact.reduction.average import Array
from protocol.exact.replica import (
    MISSED_UPDATES,
    PartKind,
    Replica,
    part_shape,
    part_slices,
    state_kinds,
    tensor_slices,
)
from protocol.spec.manifest import Manifest, TensorSpec
from protocol.spec.sections.optimizer import OptimizerSpec


class StatePiece(NamedTuple):
    """Identifies a chunk of a state."""

    kind: PartKind
    block: int
    chunk: int


class CheckpointState:
    """The state in a checkpoint; leaving its context closes it.

    Attributes:
        step: Number of steps taken.
        optimizer_step: Number of updates among these steps.

    Args:
        checkpoint: The checkpoint.
        manifest: The run's manifest.
        optimizer: The optimizer, which decides which moments exist.

    Raises:
        StorageDamaged: A tensor is missing, or has another shape.
        StorageFailed: The state cannot be read.
    """

    def __init__(
        self, checkpoint: Checkpoint, manifest: Manifest, optimizer: OptimizerSpec
    ) -> None:
        self.step, self.optimizer_step = checkpoint.info.step, checkpoint.info.optimizer_step
        self._blocks, self._export = manifest.blocks, manifest.export
        self._kinds = state_kinds(optimizer)
        if self.optimizer_step > self.step:
            raise StorageDamaged(str(checkpoint.path), "", "it counts more updates than steps")
        weights = checkpoint.path / self._export.directory / self._export.weights_file
        with ExitStack() as stack:
            self._parameters = stack.enter_context(SafetensorsFile(weights))
            self._moments = stack.enter_context(SafetensorsFile(checkpoint.path / STATE_FILE))
            # Missed updates are stored only if there are any.
            if any(name.startswith(f"{MISSED_UPDATES}/") for name in self._moments.shapes):
                self._kinds = (*self._kinds, MISSED_UPDATES)
            self._check(checkpoint)
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def pieces(self) -> Iterator[StatePiece]:
        """Yield all pieces of the state, in a fixed order."""
        for kind in self._kinds:
            for number, block in enumerate(self._blocks):
                for chunk in range(len(part_slices(kind, block))):
                    yield StatePiece(kind, number, chunk)

    def read(self, piece: StatePiece) -> Array:
        """Read the flat values of a piece.

        Raises:
            StorageDamaged: A file was truncated.
            StorageFailed: The state cannot be read.
        """
        part = part_slices(piece.kind, self._blocks[piece.block])[piece.chunk]
        values = np.empty(part.stop - part.start, np.float32)
        self._fill(piece.kind, piece.block, part, values)
        return values

    def fill(self, replica: Replica) -> None:
        """Load the state into a replica; raises like `read`."""
        replica.clear_missed()
        for kind in self._kinds:
            for block, values in enumerate(replica.arrays(kind)):
                self._fill(kind, block, slice(0, values.size), values)
        replica.set_counters(self.step, self.optimizer_step)

    def _fill(self, kind: PartKind, block: int, part: slice, out: Array) -> None:
        for tensor, extent in tensor_slices(kind, self._blocks[block]):
            lo, hi = max(extent.start, part.start), min(extent.stop, part.stop)
            if lo < hi:
                file, name = self._location(kind, tensor)
                file.read_into(name, lo - extent.start, out[lo - part.start : hi - part.start])

    def _location(self, kind: PartKind, tensor: TensorSpec) -> tuple[SafetensorsFile, str]:
        if kind == "parameters":
            return self._parameters, self._export.names.get(tensor.name, tensor.name)
        return self._moments, f"{kind}/{tensor.name}"

    def _check(self, checkpoint: Checkpoint) -> None:
        for kind in self._kinds:
            for block in self._blocks:
                for tensor in block.tensors:
                    file, name = self._location(kind, tensor)
                    shape = part_shape(kind, tensor)
                    if file.shapes.get(name) != shape:
                        reason = f"expected {kind} of {tensor.name!r} as float32 {shape}"
                        raise StorageDamaged(str(checkpoint.path), "", reason)


def load_replica(checkpoint: Checkpoint, manifest: Manifest, optimizer: OptimizerSpec) -> Replica:
    """Load the replica in a checkpoint.

    Raises:
        StorageDamaged: The state's digest differs from the recorded one, or a tensor is missing.
        StorageFailed: The state cannot be read.
    """
    replica = Replica(manifest.blocks, optimizer)
    with CheckpointState(checkpoint, manifest, optimizer) as checkpoint_state:
        checkpoint_state.fill(replica)
    if not replica.has_digest(checkpoint.info.state_digest):
        raise StorageDamaged(
            str(checkpoint.path), "", "the digest of the state differs from the recorded one"
        )
    return replica
