"""The coordinator's replica, updated in a separate thread, off the critical path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Self, TypeVar

import numpy as np

from coordinator.storage.recovery import Recovery
from protocol.exact.reduction.average import Array
from protocol.exact.replica import Replica
from protocol.exact.update import StepScalars
from protocol.machine.machine import Machine
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import StateChunk

T = TypeVar("T")


class ReplicaState(NamedTuple):
    """Step and digest of the replica's state.

    Attributes:
        step: Steps applied or skipped.
        state_digest: Digest of parameters, moments and counters.
        not_finite: Location of a value that is not finite; empty if all are finite.
    """

    step: int
    state_digest: str
    not_finite: str = ""


class LockedReplica:
    """The locked replica; nothing changes it until `release`, so readers need no copy."""

    def __init__(self, replica: Replica, lock: asyncio.Lock) -> None:
        self.replica = replica
        self._lock: asyncio.Lock | None = lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Unlock the replica, if it is locked; call this in the event loop."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class CoordinatorReplica:
    """Owns the replica; its methods run in the order of the calls.

    Attributes:
        manifest: The run's manifest.
    """

    def __init__(self, manifest: Manifest, spec: RunSpec, thread: Executor | None = None) -> None:
        self.manifest = manifest
        self._replica = Replica(manifest.blocks, spec.step_optimizer)
        self._thread = thread or Machine().thread("replica")
        self._lock = asyncio.Lock()

    def fill(self, message: StateChunk, values: Array) -> None:
        """Copy a chunk of the parameters of state 0 into the replica, before the first step."""
        piece = self.manifest.blocks[message.block].chunk_slice(message.chunk)
        np.copyto(self._replica.parameters[message.block][piece], values)

    async def catch_up(self, recovery: Recovery) -> ReplicaState:
        """Load the state of a recovery; later calls wait for it.

        Raises:
            StorageDamaged: The files do not lead to the recorded state.
            StorageFailed: The files cannot be read.
        """

        def work() -> ReplicaState:
            self._replica = recovery.load_replica()
            return self._current_state()

        return await self._in_thread(work)

    async def digest_state_0(self) -> tuple[str, ReplicaState]:
        """Return the initial digest (as in `Ready`), and step and digest of the current state."""
        return await self._in_thread(
            lambda: (self._replica.initial_digest(), self._current_state())
        )

    async def apply(self, averages: Sequence[Array], scalars: StepScalars | None) -> ReplicaState:
        """Apply one step, or skip it without scalars; the averages are not changed."""

        def work() -> ReplicaState:
            if scalars is None:
                self._replica.skip()
            else:
                self._replica.apply(averages, scalars, should_hash=True)
            return self._current_state()

        return await self._in_thread(work)

    async def lock(self) -> LockedReplica:
        """Lock the replica once all earlier calls are done; later calls wait."""
        await self._lock.acquire()
        return LockedReplica(self._replica, self._lock)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _current_state(self) -> ReplicaState:
        replica = self._replica
        return ReplicaState(replica.step, replica.state_digest(), replica.non_finite_location())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._lock:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
