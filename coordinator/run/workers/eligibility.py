"""Workers that cannot take part in a run, and whether the run still waits for others. Pure.

After a rejection, a run still waits for connected workers that were not rejected, for workers that
have computed and are away, and for expected workers that are missing, unless the cause rejects all
workers. Without any of these it ends after `OTHERS_COME_WITHIN_MS`, in which a worker from before a
restart may come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from coordinator.run.workers.membership import Member, Membership

OTHERS_COME_WITHIN_MS: Final = 30_000
"""How long a run waits for another worker after it has rejected all connected ones."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a worker cannot take part, and how the run ends unless another worker can.

    Attributes:
        reason: Why the worker cannot take part.
        exit_code: The exit code with which the run ends unless another worker can take part.
        rejects_all: Whether the cause rejects every worker.
        since_ms: Time of the first tick at which no other worker could come; None before that.
    """

    reason: str
    exit_code: int
    rejects_all: bool
    since_ms: float | None = None


class Eligibility:
    """The newest verdict, and the rejected workers with the reason for each.

    Attributes:
        unfit: Workers that cannot take part, with the reason.
        verdict: The newest verdict that may end the run.
    """

    def __init__(self, members: Membership, expect_workers: int) -> None:
        self.unfit: dict[str, str] = {}
        self.verdict: Verdict | None = None
        self._devices: dict[str, int] = {}
        self._members = members
        self._expect_workers = expect_workers

    def reject(self, member: Member, reason: str) -> None:
        """Note why a worker cannot take part; the worker may return after a change."""
        if not member.evaluates:
            self.unfit[member.name] = reason
            self._devices[member.name] = member.devices

    def judge(
        self, member: Member, reason: str, exit_code: int, *, rejects_all: bool = False
    ) -> None:
        """Note that a worker cannot take part at all: the run ends if no other worker comes
        soon."""
        if not member.evaluates:
            reason = f"worker {member.name!r}: {reason}"
            self.verdict = Verdict(reason, exit_code, rejects_all)

    @property
    def others_may_come(self) -> bool:
        """Whether another worker is connected, or may still come."""
        has_trainer = any(not member.evaluates for member in self._members)
        former_members = self._members.former_members - self.unfit.keys()
        unfit_devices = sum(self._devices[name] for name in self.unfit)
        rejects_all = self.verdict is not None and self.verdict.rejects_all
        return (
            has_trainer
            or bool(former_members)
            or (unfit_devices < self._expect_workers and not rejects_all)
        )

    def find_expired(self, now_ms: float) -> Verdict | None:
        """Return the verdict that ends the run now, if no other worker has come in time."""
        if self.verdict is None:
            return None
        if self.others_may_come:
            self.verdict = None
        elif self.verdict.since_ms is None:
            self.verdict = replace(self.verdict, since_ms=now_ms)
        elif now_ms - self.verdict.since_ms >= OTHERS_COME_WITHIN_MS:
            return self.verdict
        return None
