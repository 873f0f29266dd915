"""Changes a worker's replica and hashes it in a thread of its own while the next step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from backends.base.interface import Array
from protocol.exact.replica import Replica, StatePart
from protocol.machine.machine import Machine
from worker.logic import actions as act
from worker.logic import events


class HashedReplica:
    """Applies changes to a replica; each one waits for the digest of the state before.

    Args:
        machine: Threads and clock.
        digested: Called with step and digest, in the hashing thread.
        failed: Called with an exception of the hashing, in the hashing thread.
    """

    def __init__(
        self,
        machine: Machine,
        digested: Callable[[int, str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._digested, self._failed = digested, failed
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
                replica.apply(action.averages, action.scalars, hashing=True)
            case act.LoadChunk():
                replica.load_piece(action.kind, action.block, action.chunk, action.values)
            case act.Restore():
                replica.restore(action.step, action.optimizer_step)
                if not action.optimizer_step:
                    replica.clear_moments()

    def reset(self, replica: Replica, parameters: Sequence[Array]) -> None:
        """Reset the replica to these initial parameters."""
        self.await_digest()
        replica.reset(parameters)

    def report(self, replica: Replica) -> None:
        """Start hashing the replica."""

        def work() -> None:
            try:
                self._digested(replica.step, replica.state_digest())
            except Exception as error:  # noqa: BLE001 -- the session must learn of every failure
                self._failed(error)

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
    """Copy the replica's arrays; moments are left out before the first update: they are zeros."""
    parts = [
        StatePart(part.kind, part.block, part.values.copy())
        for part in replica.parts()
        if replica.optimizer_step or part.kind == "parameters"
    ]
    return events.StateCopied(parts, replica.step, replica.optimizer_step)
