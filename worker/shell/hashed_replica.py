"""Change a worker's replica, and hash it in a separate thread while the next step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from backends.base.interface import Array
from protocol.exact.replica import Replica, StatePart
from protocol.machine.machine import Machine
from worker.logic import actions as act
from worker.logic import events


class HashedReplica:
    """Applies changes to a replica; each change waits for the digest of the previous state.

    Args:
        machine: Threads and clock.
        on_digest: Called with step and digest, in the hashing thread.
        on_failure: Called with an exception of the hashing, in the hashing thread.
    """

    def __init__(
        self,
        machine: Machine,
        on_digest: Callable[[int, str], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._on_digest, self._on_failure = on_digest, on_failure
        self._thread = machine.thread("digest")
        self._digest: Future[None] | None = None

    def change(self, replica: Replica, action: act.ReplicaAction) -> None:
        """Apply or skip a step, or load a chunk of another replica's state or its counters."""
        self.await_digest()
        match action:
            case act.Apply(scalars=None):
                replica.skip()
            case act.Apply():
                assert action.scalars is not None
                replica.apply(action.averages, action.scalars, should_hash=True)
            case act.LoadChunk():
                replica.load_piece(action.kind, action.block, action.chunk, action.values)
            case act.Restore():
                replica.set_counters(action.step, action.optimizer_step)
                if not action.optimizer_step:
                    replica.clear_moments()

    def reset(self, replica: Replica, parameters: Sequence[Array]) -> None:
        """Reset the replica to these initial parameters."""
        self.await_digest()
        replica.reset(parameters)

    def start_hashing(self, replica: Replica) -> None:
        """Start hashing the replica."""

        def work() -> None:
            try:
                self._on_digest(replica.step, replica.state_digest())
            except Exception as error:  # noqa: BLE001 -- the session must learn of every failure
                self._on_failure(error)

        self._digest = self._thread.submit(work)

    def await_digest(self) -> None:
        """Wait until the replica may change."""
        if self._digest is not None:
            self._digest.result()
            self._digest = None

    def close(self) -> None:
        """Stop hashing."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def copy_state(replica: Replica) -> events.StateCopied:
    """Copy the replica's arrays, without moments before the first update, when they are zeros."""
    parts = [
        StatePart(part.kind, part.block, part.values.copy())
        for part in replica.parts()
        if replica.optimizer_step or part.kind == "parameters"
    ]
    return events.StateCopied(parts, replica.step, replica.optimizer_step)
