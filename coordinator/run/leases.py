"""Until when a worker may be silent about what it owes.

Pure: the time comes with `tick`. A lease follows what was measured of the worker itself; the
constants only keep noise and first steps, which warm up, from counting as lateness.
"""

from __future__ import annotations

from typing import Final

from protocol.base import limits

_PATIENCE: Final = 3.0
"""How many times what is expected of a worker it may take."""
_LEASE_FLOOR_MS: Final = 500.0
_FIRST_LEASE_MS: Final = 5_000.0
"""For one of whom nothing was measured yet."""


class Leases:
    """The last sign of each worker that owes something.

    Attributes:
        now_ms: The time of the newest tick.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._since_ms: dict[str, float] = {}

    def tick(self, now_ms: float) -> None:
        """Time goes on. If it was not looked at for long, nobody's lease ran meanwhile."""
        gap_ms = now_ms - self.now_ms
        if gap_ms > 3 * limits.TICK_MS:
            for worker in self._since_ms:
                self._since_ms[worker] += gap_ms
        self.now_ms = now_ms

    def sign(self, worker: str) -> float:
        """It has been given something, or has delivered something.

        Returns:
            Milliseconds since its last sign.
        """
        gap_ms = self.now_ms - self._since_ms.get(worker, self.now_ms)
        self._since_ms[worker] = self.now_ms
        return gap_ms

    def forget(self, worker: str) -> None:
        """It owes nothing any more."""
        self._since_ms.pop(worker, None)

    def silent_ms(self, worker: str) -> float:
        """How long it has been silent; 0 if it owes nothing."""
        return self.now_ms - self._since_ms.get(worker, self.now_ms)

    def is_over(self, worker: str, expected_ms: float | None) -> bool:
        """Whether it is late.

        Args:
            worker: Its name.
            expected_ms: How long it should take, as measured; None if nothing was.
        """
        lease_ms = _FIRST_LEASE_MS if expected_ms is None else _PATIENCE * expected_ms
        return self.silent_ms(worker) > max(lease_ms, _LEASE_FLOOR_MS)
