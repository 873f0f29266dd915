"""Check that the coordinator's machine has the memory for a run, before the run begins.

    (1 + moments) P   the replica: parameters and the optimizer's moments
    2 P               averaged gradients: of the step in progress, and of the one being applied
    max(P/2, 64 MiB)  gradients that wait for their siblings in the tree
    24 MiB            for each worker: send and receive buffers

A run with K replicas needs more, because an inner phase must not be computed twice:

    K/2 P + P         differences that wait for their siblings in the tree, in float32
    K S               per-replica state until it is on disk; S is P for each carried moment of the
                      inner optimizer, plus P with topk
    64 MiB            inner checkpoints that wait for the disk, if a round has any

P is four bytes for each trained parameter. So AdamW needs 5.5 P, whatever the number of workers,
joiners and slow readers. Nothing else is as large as P: a checkpoint is written from the replica,
and a joiner is sent the state on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.run.outputs.side_outputs import replica_state_bytes
from protocol.base import limits
from protocol.base.errors import RunFailed
from protocol.base.limits import byte_size
from protocol.base.option_names import option
from protocol.exact.update import state_arrays
from protocol.machine.allocator import give_back_freed_memory
from protocol.machine.memory import read_memory
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec

_AVERAGES: Final = 2


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that a run needs, in bytes.

    Attributes:
        parameters: P in the module's docstring.
        replica: Parameters and moments.
        gradients: Averaged gradients, and gradients that wait for siblings.
        workers: Buffers of all connections.
    """

    parameters: int
    replica: int
    gradients: int
    workers: int

    @property
    def total(self) -> int:
        return self.replica + self.gradients + self.workers

    @classmethod
    def of(cls, spec: RunSpec, manifest: Manifest, workers: int) -> MemoryBudget:
        """Compute the memory budget of a run with this many workers."""
        parameters = manifest.elements * 4
        # One body is read while another is summed; a third follows the transport's buffer.
        connection = 2 * limits.BODY_BYTES + limits.WRITE_HIGH_WATER_BYTES + limits.BODY_BYTES
        partial_sum_bytes = max(parameters // 2, limits.PARTIAL_SUMS_BYTES)
        if spec.replicas is not None:
            replica_bytes = spec.replicas.count * replica_state_bytes(spec, manifest)
            partial_sum_bytes = (
                -(-spec.replicas.count // 2) * parameters + parameters + replica_bytes
            )
            partial_sum_bytes += (
                limits.INNER_CHECKPOINTS_BYTES if spec.replicas.boundary_every else 0
            )
        return cls(
            parameters=parameters,
            replica=parameters * state_arrays(spec.step_optimizer),
            gradients=_AVERAGES * parameters + partial_sum_bytes,
            workers=workers * (connection + limits.SEND_AHEAD_BYTES),
        )


def check_memory(
    spec: RunSpec, manifest: Manifest, workers: int, *, is_resumed: bool = False
) -> None:
    """Check that a run fits into this machine's free memory.

    Args:
        spec: The run spec.
        manifest: The run's manifest.
        workers: Number of workers.
        is_resumed: Whether the run is resumed: the keys of its run spec that save memory can then
            no longer change.

    Raises:
        RunFailed: The run does not fit. The message says how much is missing, and what to set
            instead.
    """
    budget = MemoryBudget.of(spec, manifest, workers)
    try:
        if budget.total <= _free_bytes():
            return
        give_back_freed_memory()  # the memory of an earlier run
        free = _free_bytes()
    except (OSError, ValueError):
        return  # not Linux
    if budget.total <= free:
        return
    alternatives = (
        "" if spec.step_optimizer.name == "sgd" else f"set optimizer.name=sgd ({option('--set')}), "
    )
    if spec.replicas is not None:
        key = "replicas.inner_state=reset and a lower replicas.count"
        alternatives = f"set {key} ({option('--set')}), "
    alternatives += "train fewer parameters (LoRA), or "
    raise RunFailed(
        f"the coordinator lacks memory for this run: {byte_size(budget.parameters)} of trained "
        f"parameters take {byte_size(budget.total)} ({byte_size(budget.replica)} with moments, "
        f"{byte_size(budget.gradients)} of gradients, {byte_size(budget.workers)} for "
        f"connections), {byte_size(free)} are free; {'' if is_resumed else alternatives}"
        f"run the coordinator on a machine with {byte_size(budget.total - free)} more"
    )


def _free_bytes() -> int:
    memory = read_memory()
    return memory.free if memory.limit is None else min(memory.free, memory.limit)
