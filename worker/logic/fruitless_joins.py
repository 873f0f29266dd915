"""Whether anything comes of joining: a worker that is lost again and again before it takes a step
must not try for ever. Pure."""

from __future__ import annotations

from typing import Final

from worker.logic.session import SessionPhase, WorkerSession

TOO_OFTEN: Final = 3
"""After so many connections in a row that led to nothing, the time to try is not begun anew."""
_PHASES: Final = {
    SessionPhase.PREPARING: "while the run's files were fetched or its task was built",
    SessionPhase.READY: "within a step",
}


class FruitlessJoins:
    """Connections that were lost after the worker had joined.

    Attributes:
        fruitless: How many in a row led to no step.
    """

    def __init__(self) -> None:
        self.fruitless = 0
        self._steps: dict[str, int] = {}

    def lost(self, session: WorkerSession, *, told: bool) -> bool:
        """A connection is over.

        Args:
            session: Its session, which had joined.
            told: Whether the coordinator said that the worker is to come back.

        Returns:
            Whether the time to try begins anew.
        """
        run_id = session.run_id
        stepped = session.step > self._steps.get(run_id, 0)
        if stepped or told or not session.owes:
            self.fruitless = 0
            self._steps = {run_id: session.step}
            return True
        self.fruitless += 1
        return self.fruitless < TOO_OFTEN

    def told(self, session: WorkerSession, reason: str) -> str:
        """A line about the connections that led to nothing; empty unless it is time for one."""
        if self.fruitless < TOO_OFTEN or self.fruitless % TOO_OFTEN:
            return ""
        return (
            f"joined and lost {self.fruitless} times in a row {_PHASES[session.phase]}: {reason}; "
            "where small messages pass and large ones do not, lower the MTU of this machine's link "
            "or tunnel (ip link set DEV mtu 1400); see also: worker doctor"
        )
