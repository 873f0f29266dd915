"""The coordinator's own replica, updated in a thread of its own: off the critical path."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Self, TypeVar

import numpy as np

from coordinator.storage.recovery import Recovery
from protocol.exact.replica import Replica
from protocol.exact.update import Array, StepScalars
from protocol.host.machine import Machine
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import StateChunk

T = TypeVar("T")


class ReplicaState(NamedTuple):
    """The replica has taken `step` steps; `not_finite` as in `protocol.exact.replica.Digests`."""

    step: int
    state_digest: str
    weights_digest: str
    not_finite: str = ""


class HeldReplica:
    """The replica itself, which nobody changes before `release`: no second state in memory."""

    def __init__(self, replica: Replica, turn: asyncio.Lock) -> None:
        self.replica = replica
        self._turn: asyncio.Lock | None = turn

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """It may change from now on; in the event loop, once or more."""
        if self._turn is not None:
            self._turn.release()
            self._turn = None


class ReplicaKeeper:
    """Owns the replica; its methods run one after the other, in the order of the calls.

    Attributes:
        manifest: The run's.
    """

    def __init__(self, manifest: Manifest, spec: RunSpec, thread: Executor | None = None) -> None:
        self.manifest = manifest
        self._replica = Replica(manifest.blocks, spec.update)
        self._thread = thread or Machine().thread("replica")
        self._turn = asyncio.Lock()

    def fill(self, message: StateChunk, values: Array) -> None:
        """Take a chunk of the parameters of state 0, before the first step."""
        piece = self.manifest.blocks[message.block].chunk_slice(message.chunk)
        np.copyto(self._replica.parameters[message.block][piece], values)

    async def catch_up(self, recovery: Recovery) -> ReplicaState:
        """Take the state that a recovery leads to; other calls wait for it.

        Raises:
            StorageDamaged: The files do not lead to the state they led to.
            StorageFailed: They cannot be read.
        """

        def work() -> ReplicaState:
            self._replica = recovery.replica()
            return self._digests()

        return await self._in_thread(work)

    async def digests(self) -> ReplicaState:
        """Where the replica is now."""
        return await self._in_thread(self._digests)

    async def apply(self, averages: Sequence[Array], scalars: StepScalars | None) -> ReplicaState:
        """Take one step, or skip it; the averages are left as they are."""

        def work() -> ReplicaState:
            if scalars is None:
                self._replica.skip()
            else:
                self._replica.apply(averages, scalars)
            return self._digests()

        return await self._in_thread(work)

    async def hold(self) -> HeldReplica:
        """The replica, as of all steps applied by calls before this one; later ones wait."""
        await self._turn.acquire()
        return HeldReplica(self._replica, self._turn)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _digests(self) -> ReplicaState:
        digests = self._replica.digests()
        return ReplicaState(self._replica.step, *digests)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._turn:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
