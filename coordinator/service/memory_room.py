"""Whether the coordinator's machine has the memory that a run takes, asked before it begins.

    (1 + moments) P   the replica: parameters, and as many moments as the optimizer has
    2 P               averaged gradients: of the step in progress, and of the one being applied
    max(P/2, 64 MiB)  gradients that wait for others to be added to
    24 MiB            for each worker: what is on its way to it and from it

A run with K replicas holds more, for a stretch that has been computed is not to be computed again:

    K/2 P + P         differences that wait for others to be added to, in float32
    K S               what replicas have of their own, until it is on disk: S is as many times P as
                      the inner optimizer has moments, if they are carried, and P more with topk
    64 MiB            boundaries that wait for the disk, if any are sent within a round

P is four bytes for each trained parameter. So with AdamW it is 5.5 P, whatever the number of
workers, of those that join, and of those that read slowly. Nothing else is as large as P: a
checkpoint is written out of the replica, and a joiner is sent what is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.run.outputs.own_state import own_state_bytes
from protocol.base import limits
from protocol.base.byte_size import byte_size
from protocol.base.errors import RunFailed
from protocol.exact.update import moment_count
from protocol.host.allocator import give_back_freed_memory
from protocol.host.memory import read_memory
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec

_AVERAGES: Final = 2


@dataclass(frozen=True, slots=True)
class NeededMemory:
    """In bytes.

    Attributes:
        parameters: P of the module's text.
        replica: Parameters and moments.
        gradients: Averaged, and waiting to be added.
        workers: Of all connections.
    """

    parameters: int
    replica: int
    gradients: int
    workers: int

    @property
    def total(self) -> int:
        return self.replica + self.gradients + self.workers

    @classmethod
    def of(cls, spec: RunSpec, manifest: Manifest, workers: int) -> NeededMemory:
        """Of a run with so many workers."""
        parameters = manifest.elements * 4
        # Read into one body, another is summed; a chunk follows what the transport has taken.
        connection = 2 * limits.BODY_BYTES + limits.WRITE_HIGH_WATER_BYTES + limits.BODY_BYTES
        waiting = max(parameters // 2, limits.PARTIAL_SUMS_BYTES)
        if spec.replicas is not None:
            own = spec.replicas.count * own_state_bytes(spec, manifest)
            waiting = -(-spec.replicas.count // 2) * parameters + parameters + own
            waiting += limits.BOUNDARIES_BYTES if spec.replicas.boundary_every else 0
        return cls(
            parameters=parameters,
            replica=parameters * (1 + moment_count(spec.update)),
            gradients=_AVERAGES * parameters + waiting,
            workers=workers * (connection + limits.SEND_AHEAD_BYTES),
        )


def check_memory(spec: RunSpec, manifest: Manifest, workers: int, *, goes_on: bool = False) -> None:
    """See that a run with so many workers fits into what is free of this machine's memory.

    Args:
        spec: The run.
        manifest: What its workers have agreed on.
        workers: So many.
        goes_on: Whether it was begun before: its run spec is what it is.

    Raises:
        RunFailed: It does not; how much is missing, and what to set instead.
    """
    needed = NeededMemory.of(spec, manifest, workers)
    try:
        if needed.total <= _free_bytes():
            return
        give_back_freed_memory()  # an earlier run's
        free = _free_bytes()
    except (OSError, ValueError):
        return  # another system than Linux
    if needed.total <= free:
        return
    instead = "" if spec.update.name == "sgd" else "set optimizer.name=sgd (--set), "
    if spec.replicas is not None:
        instead = "set replicas.inner_state=reset and a lower replicas.count (--set), "
    instead += "train fewer parameters (LoRA), or "
    raise RunFailed(
        f"the coordinator has no memory for this run: {byte_size(needed.parameters)} of trained "
        f"parameters take {byte_size(needed.total)} ({byte_size(needed.replica)} with moments, "
        f"{byte_size(needed.gradients)} of gradients, {byte_size(needed.workers)} for "
        f"connections), {byte_size(free)} are free; {'' if goes_on else instead}"
        f"run the coordinator on a machine with {byte_size(needed.total - free)} more"
    )


def _free_bytes() -> int:
    memory = read_memory()
    return memory.free if memory.bound is None else min(memory.free, memory.bound)
