"""Evaluation of the held-out parts: work like any other, whoever does it.

Pure. Sums are kept by part and added in part order, so that neither the number of workers nor
the order of answers can change the figure.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.run.outputs.actions import Action, Send
from coordinator.run.workers.leases import Leases
from protocol.spec.manifest import Metric
from protocol.wire.messages import EvalPlan, EvalResult


class Evaluation:
    """Collects one evaluation of the weights after `step` steps."""

    def __init__(self, step: int, parts: int) -> None:
        self.step = step
        self._parts = parts
        self._sums: dict[int, dict[str, float]] = {}
        self._by: dict[int, str] = {}
        self._given: dict[str, set[int]] = {}
        self._known: set[str] = set()
        self._leases = Leases()
        self._longest_gap_ms: float | None = None

    def assign(self, workers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Divide the unassigned parts into one range [lo, hi) for each worker."""
        taken = set().union(*self._given.values()) if self._given else set()
        free = [p for p in range(self._parts) if p not in self._sums and p not in taken]
        ranges: dict[str, tuple[int, int]] = {}
        # A range may run over parts that are done; their answers count once.
        for index, worker in enumerate(workers):
            mine = free[index * len(free) // len(workers) : (index + 1) * len(free) // len(workers)]
            if mine:
                ranges[worker] = (mine[0], mine[-1] + 1)
                self._given.setdefault(worker, set()).update(mine)
                self._known.add(worker)
                self._leases.sign(worker)
        return ranges

    def plan(self, epoch: int, workers: Sequence[str]) -> list[Action]:
        """The unassigned parts, as messages to these workers."""
        return [
            Send(worker, EvalPlan(epoch=epoch, step=self.step, lo=lo, hi=hi))
            for worker, (lo, hi) in self.assign(workers).items()
        ]

    def result(self, worker: str, message: EvalResult) -> None:
        """Take one part's sums; the first answer counts.

        One of an older evaluation does not, nor one of a worker that was not asked: its weights
        may have been odd.
        """
        fits = message.step == self.step and message.part < self._parts
        if fits and worker in self._known:
            gap_ms = self._leases.sign(worker)
            self._longest_gap_ms = max(self._longest_gap_ms or 0.0, gap_ms)
            self._sums.setdefault(message.part, message.sums)
            self._by.setdefault(message.part, worker)

    def lose(self, worker: str, *, proven: bool) -> None:
        """The worker has left; its unanswered parts are unassigned again.

        Unless its weights are known to be the run's (`proven`), its answers do not count either.
        """
        self._given.pop(worker, None)
        self._known.discard(worker)
        if not proven:
            for part in [part for part, by in self._by.items() if by == worker]:
                del self._by[part], self._sums[part]

    def tick(self, now_ms: float) -> None:
        """Time goes on."""
        self._leases.tick(now_ms)

    def disown_late(self) -> list[str]:
        """Workers that take far longer than a part has ever taken, if others are idle.

        Their unanswered parts are unassigned after that, though their answers still count.
        """
        waiting = self.waiting_for()
        late = [w for w in waiting if self._leases.is_over(w, self._longest_gap_ms)]
        if not self._known.difference(waiting):
            return []
        for worker in late:
            del self._given[worker]
        return late

    def waiting_for(self) -> list[str]:
        """Workers that still owe parts."""
        return sorted(w for w, parts in self._given.items() if parts - self._sums.keys())

    @property
    def complete(self) -> bool:
        """Whether every part's sums are there."""
        return len(self._sums) == self._parts

    def metrics(self, metrics: Sequence[Metric]) -> dict[str, float]:
        """The figures, once complete."""
        totals: dict[str, float] = {}
        for part in range(self._parts):
            for name, value in self._sums[part].items():
                totals[name] = totals.get(name, 0.0) + value
        return {metric.name: metric.value(totals) for metric in metrics}
