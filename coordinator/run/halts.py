"""Halts: their announcement, and the work that remains when the run continues. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.run.outputs.actions import Action, Broadcast, Report
from coordinator.run.outputs.events import Halted, RunContinued
from coordinator.run.progress import Progress
from coordinator.run.workers.admission import seed
from coordinator.run.workers.membership import Membership, MemberState
from protocol.base.fields import cut_text
from protocol.exact.reduction.reducer import NonFinite
from protocol.exact.reduction.tree import Subtree
from protocol.wire.messages import Continue, Halt


class Failures:
    """Workers that failed in the step in progress, and their unfinished microbatches.

    If a second worker fails with the same microbatches, these are the likely cause: every other
    worker would fail with them too. A single failure is ascribed to the machine.
    """

    def __init__(self) -> None:
        self._microbatches: list[tuple[str, frozenset[int]]] = []

    def note(self, worker: str, subtrees: Iterable[Subtree]) -> str:
        """Note a worker whose device failed before these subtrees were finished.

        Returns:
            If this is the second failure with the same microbatches: text that names both workers
            and the microbatches. Otherwise empty.
        """
        leaves = frozenset(leaf for subtree in subtrees for leaf in range(subtree.lo, subtree.hi))
        for other, earlier_leaves in self._microbatches:
            if common_leaves := sorted(leaves & earlier_leaves):
                return (
                    f"workers {other!r} and {worker!r} failed in turn, each while computing "
                    f"microbatches {common_leaves[0]} to {common_leaves[-1]}"
                )
        self._microbatches.append((worker, leaves))
        return ""

    def clear(self) -> None:
        """Forget all failures: the step is committed, or the run halts because of them."""
        self._microbatches.clear()


class Halts:
    """The state that outlasts a halt.

    Attributes:
        mismatched: Workers whose state differs from the run's; reseeded when the run continues.
        should_skip_step: Whether the operator wants the halted step skipped.
        has_new_commit: Whether a commit became durable during the halt: the run plans the next step
            only when it continues.
        failures: Workers that failed in this step.
    """

    def __init__(self, members: Membership) -> None:
        self.mismatched: set[str] = set()
        self.should_skip_step = False
        self.has_new_commit = False
        self.failures = Failures()
        self._members = members

    def announce(
        self, progress: Progress, reason: str, fault: NonFinite | None = None
    ) -> list[Action]:
        """Tell all workers to stop, and report the halt; for a non-finite value with its
        location."""
        step_id = progress.next_step_id()
        block = None if fault is None else fault.block
        name = None if block is None else progress.blocks[block].name
        halted = Halted(
            **step_id,
            reason=reason[:2000],
            microbatches=None if fault is None else (fault.subtree.lo, fault.subtree.hi),
            worker=None if fault is None else fault.worker,
            block=name,
        )
        return [Broadcast(Halt(**step_id, reason=cut_text(reason))), Report(halted)]

    def end(self, progress: Progress, *, skip_step: bool) -> list[Action]:
        """Tell all workers that the run continues.

        A new attempt begins, unless the halted step is being committed or already is.
        """
        if not (progress.is_persisting or self.has_new_commit):
            progress.attempt += 1
        step_id = progress.next_step_id()
        continued = RunContinued(**step_id, skip_step=skip_step)
        return [Broadcast(Continue(**step_id)), Report(continued), *progress.release()]

    def reseed(self, progress: Progress) -> list[Action]:
        """Send the replica's state to the workers whose state differs from it."""
        actions: list[Action] = []
        for name in sorted(self.mismatched.difference(self._members.names(MemberState.DRAINING))):
            progress.agreement.lose(name)
            if (member := self._members.get(name)) is not None:
                self._members.deactivate(member)
                actions.append(seed(member))
        self.mismatched.clear()
        return actions + self._members.report_view_change(progress.step, "reseeded")
