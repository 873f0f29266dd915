"""Who takes part in a run, in which state, and the numbered views that follow from it.

Pure. Views fence sessions, not gradients: what a member has delivered stays when others leave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Final

from coordinator.run.outputs.actions import Dismiss, Report
from coordinator.run.outputs.facts import Change, ComputingWorker, ViewBegins
from protocol.base.errors import ExitCode
from protocol.wire.messages import Ready

_IDLE_STEPS: Final = 16
"""After so many steps without work a worker is given one microbatch: it may be quick again."""
_TIMES_PASSED: Final = 3
"""One that is passed over so often is put aside."""
_ASIDE_STEPS: Final = 16
_DOUBLINGS: Final = 6
_IN_TIME: Final = 16
"""After so many answers in time it has never been passed over."""
_MEASUREMENTS_KEPT: Final = 9
"""The speed is the median of so many: one slow node must not move work about."""


class MemberState(Enum):
    """IDLE is not asked, or not yet: an evaluator before training; PREPARING builds the task; READY
    has, and waits for the start; LOADING receives the trainable state and every broadcast; ACTIVE
    computes; DRAINING finishes and leaves. An evaluator is FOLLOWING where it has the state and
    hears broadcasts, and EVALUATING where it has held-out parts to do."""

    IDLE = "idle"
    PREPARING = "preparing"
    READY = "ready"
    LOADING = "loading"
    ACTIVE = "active"
    DRAINING = "draining"
    FOLLOWING = "following"
    EVALUATING = "evaluating"


COMPUTING: Final = (MemberState.ACTIVE, MemberState.DRAINING)
"""Those who have nodes, and answer to commits."""


@dataclass(slots=True)
class Member:
    """One worker in one run."""

    name: str
    state: MemberState = MemberState.PREPARING
    admitted_by: str = ""
    """What it proved itself with."""
    evaluates: bool = False
    """Whether it evaluates while others train, and computes no node."""
    host: str = ""
    """Where it connects from; empty from the coordinator's machine."""
    backend: str = ""
    device: str = ""
    devices: int = 1
    """Of its host: as many workers as that counts for."""
    left_out: str = ""
    """Why other devices of its host take no part; empty if all do."""
    initial_digest: str = ""
    step: int = 0
    """Of the state that it had when it became ready; of an evaluator, of its newest."""
    state_digest: str = ""
    caught_up: bool = False
    """Of an evaluator: whether it has had the run's state, and keeps up with the commits."""
    signature: str = ""
    signature_text: str = ""
    microbatches: int = 0
    """Computed in this run."""
    idle_steps: int = 0
    """Steps in a row in which it was given nothing."""
    replaying: bool = False
    """Whether it is being sent what it lacks, and does not hear broadcasts yet."""
    right_at: int | None = None
    """After how many steps its state was found to be the run's, meanwhile."""
    released: bool = False
    """Whether it wanted to leave, and was let go."""
    late: bool = False
    """Whether it was silent for longer than its measured speed explains, and is so still."""
    _measured_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS_KEPT))
    _answers_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS_KEPT))
    _gaps_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS_KEPT))
    _longest_gap_ms: float | None = None
    aside_until: int = 0
    """It takes no part before this step: it was passed over too often."""
    times_passed: int = 0
    """How often it was passed over, since it last answered in time for long."""
    _answers_in_time: int = 0

    def now_ready(self, message: Ready) -> None:
        """Its task is built."""
        self.state = MemberState.READY
        self.backend, self.device = message.backend, message.device
        self.devices, self.left_out = message.devices, message.left_out
        self.initial_digest = message.initial_digest
        self.step, self.state_digest = message.step, message.state_digest
        self.signature, self.signature_text = message.signature, message.signature_text

    def release(self) -> Dismiss:
        """Let it go: it wanted to leave, and nobody waits for it."""
        self.released = True
        return Dismiss(self.name, "drained", ExitCode.OK)

    def measured(self, ms_per_microbatch: float) -> None:
        """Take in a measured time."""
        self._measured_ms.append(ms_per_microbatch)

    def answered(self, ms: float) -> None:
        """It has applied a step and said so, in time; take in how long that took."""
        self.measured_answer(ms)
        self.late = False
        self._answers_in_time += 1
        if self._answers_in_time >= _IN_TIME:
            self.times_passed = 0

    def measured_answer(self, ms: float) -> None:
        """Take in how long an answer took, or at least took."""
        self._answers_ms.append(ms)

    def passed_over(self, step: int) -> bool:
        """Others went on without its answer.

        Returns:
            Whether that was once too often: it is put aside for some steps, each time for twice
            as many, since each step that waits for it costs all others a lease.
        """
        self.late, self._answers_in_time = True, 0
        self.times_passed += 1
        again = self.times_passed - _TIMES_PASSED
        if again < 0:
            return False
        self.aside_until = step + (_ASIDE_STEPS << min(again, _DOUBLINGS))
        return True

    def gave_sign(self, gap_ms: float) -> None:
        """Take in how long nothing was heard of it in a step."""
        self._longest_gap_ms = max(self._longest_gap_ms or 0.0, gap_ms)

    def expected_work_ms(self, microbatches: int) -> float | None:
        """How long it may be silent while it computes a node of so many microbatches."""
        speed = self.ms_per_microbatch
        if speed is None:
            return None
        gap_ms = median(self._gaps_ms) if self._gaps_ms else 0.0
        return max(speed * microbatches, gap_ms)

    @property
    def expected_gap_ms(self) -> float | None:
        """How long it was silent at most in a step; None before the first one's end."""
        return median(self._gaps_ms) if self._gaps_ms else None

    @property
    def expected_answer_ms(self) -> float | None:
        """How long it takes to apply a step."""
        return median(self._answers_ms) if self._answers_ms else None

    def gets_state(self) -> None:
        """It is being sent the state, or steps that it has missed; then it hears broadcasts."""
        self.replaying, self.right_at = True, None

    def follows(self) -> None:
        """An evaluator has the run's state, and hears broadcasts."""
        self.state, self.caught_up = MemberState.FOLLOWING, True

    def planned(self, microbatches: int) -> None:
        """Note its part of a step; what was measured before a long idle time counts no more."""
        if self._longest_gap_ms is not None:
            self._gaps_ms.append(self._longest_gap_ms)
            self._longest_gap_ms = None
        self.idle_steps = 0 if microbatches else self.idle_steps + 1
        if self.overdue:
            self._measured_ms.clear()

    @property
    def overdue(self) -> bool:
        """Whether it has had nothing for so long that its speed is to be measured again."""
        return self.idle_steps >= _IDLE_STEPS

    @property
    def ms_per_microbatch(self) -> float | None:
        """Measured time of a microbatch; None before the first node."""
        return median(self._measured_ms) if self._measured_ms else None


class Membership:
    """The members of a run by name. `view` counts changes of who is active."""

    def __init__(self) -> None:
        self.view = 0
        self._told_view = 0
        self._members: dict[str, Member] = {}  # sorted
        self._departed: dict[str, int] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter([*self._members.values()])

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __len__(self) -> int:
        return len(self._members)

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def add(
        self,
        name: str,
        admitted_by: str = "",
        host: str = "",
        *,
        devices: int = 1,
        evaluates: bool = False,
    ) -> Member:
        """A worker is asked to build the task; an evaluator will be."""
        state = MemberState.IDLE if evaluates else MemberState.PREPARING
        member = Member(name, state, admitted_by, evaluates, host, devices=devices)
        self._members[name] = member
        self._members = dict(sorted(self._members.items()))
        return member

    def remove(self, name: str) -> Member | None:
        """A worker has left; the view changes if it was active."""
        member = self._members.pop(name, None)
        if member is not None and member.microbatches:
            self._departed[name] = self._departed.get(name, 0) + member.microbatches
        if member is not None and member.state in COMPUTING:
            self.view += 1
        return member

    def activate(self, member: Member) -> None:
        """A worker's state is the run's: it may compute, from the next step on."""
        member.state = MemberState.ACTIVE
        self.view += 1

    def deactivate(self, member: Member) -> None:
        """A worker's state is not the run's, or not known to be: it computes no more."""
        member.state = MemberState.LOADING
        self.view += 1

    def view_begins(
        self, step: int, change: Change, worker: str | None = None, reason: str = ""
    ) -> list[Report]:
        """Who computes from now on, and why that changed, unless it has not."""
        if self.view == self._told_view:
            return []
        self._told_view = self.view
        computing = tuple(
            ComputingWorker(m.name, m.backend, m.device, m.signature, m.admitted_by)
            for m in self
            if m.state in COMPUTING
        )
        return [Report(ViewBegins(step, self.view, change, worker, reason, computing))]

    def names(self, *states: MemberState) -> list[str]:
        """Names of the members in one of these states, sorted."""
        return [member.name for member in self if member.state in states]

    def speeds(self) -> dict[str, float | None]:
        """Milliseconds per microbatch of the active members."""
        return {
            member.name: member.ms_per_microbatch
            for member in self
            if member.state is MemberState.ACTIVE
        }

    def devices(self, name: str) -> int:
        """How many a member computes with."""
        member = self._members.get(name)
        return 1 if member is None else member.devices

    def microbatches(self) -> dict[str, int]:
        """How many each has computed in this run, those that have left included."""
        counts = dict(self._departed)
        for member in self:
            counts[member.name] = counts.get(member.name, 0) + member.microbatches
        return dict(sorted(counts.items()))

    @property
    def departed(self) -> set[str]:
        """Names of those that have computed in this run, and are not here."""
        return self._departed.keys() - self._members.keys()

    @property
    def signatures(self) -> set[str]:
        """The distinct numeric signatures of members that compute."""
        return {member.signature for member in self if member.state in COMPUTING}
