"""The members of a run with their states, and the numbered views that follow from them.

Pure. Views fence sessions, not gradients: the sums of a member that leaves still count, unless its
weights were not yet known to be the run's (`Round.lose`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import Final

from coordinator.run.outputs.actions import Dismiss, Report
from coordinator.run.outputs.events import Change, MemberInfo, ViewChanged
from protocol.base.errors import ExitCode
from protocol.wire.messages import Ready

_IDLE_STEPS: Final = 16
"""After this many steps without work, a worker gets one microbatch: it may have become faster."""
_PASSES_BEFORE_ASIDE: Final = 3
"""A worker that is passed over this many times is set aside."""
_ASIDE_STEPS: Final = 16
_MAX_DOUBLINGS: Final = 6
_TIMELY_ANSWERS: Final = 16
"""Timely answers after which earlier lateness no longer counts."""
_MEASUREMENTS_KEPT: Final = 9
"""The speed is the median of this many measurements: one slow subtree must not move work."""


class MemberState(Enum):
    """The states of a member.

    Attributes:
        IDLE: An evaluator before training, not yet asked to build the task.
        PREPARING: Builds the task.
        READY: Has built the task, and waits for the start.
        LOADING: Receives the state and missed steps.
        ACTIVE: Computes.
        DRAINING: Finishes its work and leaves.
        FOLLOWING: An evaluator that has the state and receives broadcasts.
        EVALUATING: An evaluator that has parts to evaluate.
    """

    IDLE = "idle"
    PREPARING = "preparing"
    READY = "ready"
    LOADING = "loading"
    ACTIVE = "active"
    DRAINING = "draining"
    FOLLOWING = "following"
    EVALUATING = "evaluating"


COMPUTING: Final = (MemberState.ACTIVE, MemberState.DRAINING)
"""States with subtrees to compute and answers to commits."""


@dataclass(slots=True)
class Member:
    """One worker in one run."""

    name: str
    state: MemberState = MemberState.PREPARING
    admitted_by: str = ""
    """The credentials that admitted the worker: the join token, or its own key."""
    evaluates: bool = False
    """Whether the worker evaluates while others train, and computes no gradients."""
    host: str = ""
    """The address from which the worker connects; empty on the coordinator's machine."""
    backend: str = ""
    device: str = ""
    devices: int = 1
    """Number of devices; the member counts as that many workers."""
    exclusion_reason: str = ""
    """Why other devices of the machine take no part; empty if all do."""
    initial_digest: str = ""
    step: int = 0
    """Step of the state that the worker had when it became ready; for an evaluator, of its newest
    state."""
    state_digest: str = ""
    has_caught_up: bool = False
    """Whether an evaluator has received the run's state, and keeps up with the commits."""
    numerics_profile: str = ""
    numerics_text: str = ""
    microbatches: int = 0
    """Number of microbatches that the worker has computed in this run."""
    idle_steps: int = 0
    """Number of consecutive steps without work."""
    is_replaying: bool = False
    """Whether the worker is still receiving missed steps, and gets no broadcasts yet."""
    confirmed_step: int | None = None
    """The step after which the worker's state matched the run's, while the worker was receiving
    missed steps."""
    is_released: bool = False
    """Whether the worker asked to leave, and may leave now."""
    is_late: bool = False
    """Whether the worker has been silent for longer than its measured speed explains."""
    _measured_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS_KEPT))
    _answers_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS_KEPT))
    _gaps_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS_KEPT))
    _longest_gap_ms: float | None = None
    aside_until: int = 0
    """The step before which the worker takes no part, after it was passed over too often."""
    times_passed_over: int = 0
    """How often the worker was passed over; reset after a series of timely answers."""
    _timely_answers: int = 0
    """Number of consecutive timely answers."""

    def become_ready(self, message: Ready) -> None:
        """Copy the fields of the message that the worker sends once its task is built."""
        self.state = MemberState.READY
        self.backend, self.device = message.backend, message.device
        self.devices, self.exclusion_reason = message.devices, message.left_out
        self.initial_digest = message.initial_digest
        self.step, self.state_digest = message.step, message.state_digest
        self.numerics_profile, self.numerics_text = message.signature, message.signature_text

    def release(self) -> Dismiss:
        """Dismiss a worker that asked to leave; nothing waits for it."""
        self.is_released = True
        return Dismiss(self.name, "drained", ExitCode.OK)

    def add_measurement(self, ms_per_microbatch: float) -> None:
        """Add a measured time of a microbatch."""
        self._measured_ms.append(ms_per_microbatch)

    def note_timely_answer(self, ms: float) -> None:
        """Add the time of an answer that came in time."""
        self.add_answer_time(ms)
        self.is_late = False
        self._timely_answers += 1
        if self._timely_answers >= _TIMELY_ANSWERS:
            self.times_passed_over = 0

    def add_answer_time(self, ms: float) -> None:
        """Add the time that an answer took, or a lower bound of it."""
        self._answers_ms.append(ms)

    def note_passed_over(self, step: int) -> bool:
        """Note that the other workers continued without this one's answer.

        Returns:
            Whether the worker is set aside: each time for twice as many steps, since each step that
            waits for it costs all others a lease.
        """
        self.is_late, self._timely_answers = True, 0
        self.times_passed_over += 1
        excess = self.times_passed_over - _PASSES_BEFORE_ASIDE
        if excess < 0:
            return False
        self.aside_until = step + (_ASIDE_STEPS << min(excess, _MAX_DOUBLINGS))
        return True

    def note_silence(self, gap_ms: float) -> None:
        """Note how long the worker was silent in a step."""
        self._longest_gap_ms = max(self._longest_gap_ms or 0.0, gap_ms)

    def expected_work_ms(self, microbatches: int) -> float | None:
        """Return how long the worker may be silent while it computes this many microbatches; None
        before its first measurement."""
        speed = self.ms_per_microbatch
        if speed is None:
            return None
        gap_ms = median(self._gaps_ms) if self._gaps_ms else 0.0
        return max(speed * microbatches, gap_ms)

    @property
    def expected_gap_ms(self) -> float | None:
        """The longest silence to expect in a step; None before the worker's first step is over."""
        return median(self._gaps_ms) if self._gaps_ms else None

    @property
    def expected_answer_ms(self) -> float | None:
        """How long the worker takes to answer a commit; None without measurements."""
        return median(self._answers_ms) if self._answers_ms else None

    def begin_replay(self) -> None:
        """Note that the worker is being sent the state, or missed steps."""
        self.is_replaying, self.confirmed_step = True, None

    def begin_following(self) -> None:
        """Note that an evaluator has the run's state and receives broadcasts."""
        self.state, self.has_caught_up = MemberState.FOLLOWING, True

    def note_share(self, microbatches: int) -> None:
        """Note the worker's share of a step; measurements expire after a long idle time."""
        if self._longest_gap_ms is not None:
            self._gaps_ms.append(self._longest_gap_ms)
            self._longest_gap_ms = None
        self.idle_steps = 0 if microbatches else self.idle_steps + 1
        if self.is_overdue:
            self._measured_ms.clear()

    @property
    def is_overdue(self) -> bool:
        """Whether the worker was idle for so long that its speed must be measured again."""
        return self.idle_steps >= _IDLE_STEPS

    @property
    def ms_per_microbatch(self) -> float | None:
        """Measured time of a microbatch; None before the first subtree."""
        return median(self._measured_ms) if self._measured_ms else None


class Membership:
    """The members of a run by name.

    Attributes:
        view: Number of changes of the active workers, within the coordinator's term.
    """

    def __init__(self, term: int = 0) -> None:
        self.view = 0
        self._term = term
        self._reported_view = 0
        self._members: dict[str, Member] = {}  # sorted
        self._former_microbatches: dict[str, int] = {}

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
        """Add a worker that builds the task; an evaluator does so later."""
        state = MemberState.IDLE if evaluates else MemberState.PREPARING
        member = Member(name, state, admitted_by, evaluates, host, devices=devices)
        self._members[name] = member
        self._members = dict(sorted(self._members.items()))
        return member

    def remove(self, name: str) -> Member | None:
        """Remove a worker; the view changes if it was active."""
        member = self._members.pop(name, None)
        if member is not None and member.microbatches:
            self._former_microbatches[name] = (
                self._former_microbatches.get(name, 0) + member.microbatches
            )
        if member is not None and member.state in COMPUTING:
            self.view += 1
        return member

    def activate(self, member: Member) -> None:
        """Let a worker, which has the run's state, compute from the next step on."""
        member.state = MemberState.ACTIVE
        self.view += 1

    def deactivate(self, member: Member) -> None:
        """Stop a worker from computing, because its state differs from the run's or may differ."""
        member.state = MemberState.LOADING
        self.view += 1

    def report_view_change(
        self, step: int, change: Change, worker: str | None = None, reason: str = ""
    ) -> list[Report]:
        """Report the workers that compute from now on, and the reason, if the view has changed."""
        if self.view == self._reported_view:
            return []
        self._reported_view = self.view
        computing = tuple(
            MemberInfo(
                name=m.name,
                backend=m.backend,
                device=m.device,
                signature=m.numerics_profile,
                admitted_by=m.admitted_by,
            )
            for m in self
            if m.state in COMPUTING
        )
        event = ViewChanged(
            term=self._term, step=step, view=self.view, change=change, worker=worker,
            reason=reason[:2000], members=computing,
        )  # fmt: skip
        return [Report(event)]

    def names(self, *states: MemberState) -> list[str]:
        """Return the names of the members in one of these states, sorted."""
        return [member.name for member in self if member.state in states]

    def speeds(self) -> dict[str, float | None]:
        """Return milliseconds per microbatch of the active members."""
        return {
            member.name: member.ms_per_microbatch
            for member in self
            if member.state is MemberState.ACTIVE
        }

    def devices(self, name: str) -> int:
        """Return how many devices a member computes with."""
        member = self._members.get(name)
        return 1 if member is None else member.devices

    def microbatches(self) -> dict[str, int]:
        """Return how many microbatches each member has computed in this run, including members
        that have left."""
        counts = dict(self._former_microbatches)
        for member in self:
            counts[member.name] = counts.get(member.name, 0) + member.microbatches
        return dict(sorted(counts.items()))

    @property
    def former_members(self) -> set[str]:
        """Names of workers that have computed in this run and are not members now."""
        return self._former_microbatches.keys() - self._members.keys()

    @property
    def numerics_profiles(self) -> set[str]:
        """The distinct numerics profiles of the computing members."""
        return {member.numerics_profile for member in self if member.state in COMPUTING}
