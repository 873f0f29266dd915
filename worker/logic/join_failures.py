"""Count joins without a step, so that a worker does not reconnect forever. Pure."""

from __future__ import annotations

from typing import Final

from worker.logic.session import SessionPhase, WorkerSession

FRUITLESS_JOINS: Final = 3
"""After this many fruitless joins in a row, joining no longer restarts the `--retry-for` time."""
_PHASE_TEXTS: Final = {
    SessionPhase.PREPARING: "while the run's files were fetched or its task was built",
    SessionPhase.READY: "within a step",
}


class JoinFailures:
    """Count the connections in a row that were lost after a join and before any step.

    Attributes:
        count: Consecutive joins without a step.
    """

    def __init__(self) -> None:
        self.count = 0
        self._steps: dict[str, int] = {}

    def connection_lost(self, session: WorkerSession, *, is_return_requested: bool) -> bool:
        """Count a lost connection; return whether the `--retry-for` time restarts.

        Args:
            session: The session of the lost connection, after its handshake.
            is_return_requested: Whether the coordinator asked the worker to come back.
        """
        run_id = session.run_id
        has_stepped = session.step > self._steps.get(run_id, 0)
        if has_stepped or is_return_requested or not session.is_busy:
            self.count = 0
            self._steps = {run_id: session.step}
            return True
        self.count += 1
        return self.count < FRUITLESS_JOINS

    def warning(self, session: WorkerSession, reason: str) -> str:
        """Return a warning for the operator after every third fruitless join; otherwise empty."""
        if self.count < FRUITLESS_JOINS or self.count % FRUITLESS_JOINS:
            return ""
        return (
            f"joined and lost the connection {self.count} times in a row "
            f"{_PHASE_TEXTS[session.phase]}: {reason}; if small messages arrive and large ones do "
            "not, lower the MTU of this machine's link or tunnel (ip link set DEV mtu 1400); see "
            "also: worker doctor"
        )
