"""Whether every sample of each epoch was used exactly once, from plans and commits alone.

The samples of a step follow from the seed; in a run with replicas, so do those of each inner step
of each replica, and all of their batches together are one order. A commit lists whose subtrees are
in its sums: each combination must hold every microbatch once, of workers that had been assigned
them. A commit without a list counts if its plans assign every microbatch to a worker, along
subtrees of the tree (a sum over the tree counts each leaf once, however often one was computed). A
skipped step uses its samples too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coordinator.audit.history import Attempt, History
from coordinator.run.outputs.events import Committed, Planned, Subtrees
from protocol.exact.inner_phases import InnerPhaseOrder, order_of_steps
from protocol.exact.reduction.tree import Subtree, is_subtree
from protocol.exact.samples import RowGroups, SampleOrder
from protocol.spec.run_spec import RunSpec
from protocol.spec.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which samples were used.

    Attributes:
        epochs: For each epoch begun: samples (or draws) used once, all of them, and those of
            skipped steps among the used ones.
        unplanned: Steps recovered from the gradient log after a crash, whose plan is lost.
        faults: Where the proof fails.
    """

    epochs: tuple[tuple[int, int, int], ...]
    unplanned: int
    faults: tuple[str, ...]


def cover_samples(
    history: History,
    spec: RunSpec,
    train_samples: int,
    row_groups: RowGroups = (),
    sampling: Sampling | None = None,
) -> Coverage:
    """Count how often each sample was used, and check that plans account for every commit.

    Draws with replacement may use a sample often: then each draw must be used once.
    """
    order = order_of_steps(spec, train_samples, row_groups, sampling)
    faults: list[str] = []
    unplanned = 0
    for number, commit in history.commits:
        problem = _account_for(history, commit, order.microbatch_count(commit.step))
        if problem is None:
            unplanned += 1
        elif problem:
            faults.append(f"line {number}, step {commit.step}: {problem}")
    epochs: list[tuple[int, int, int]] = []
    batches_per_step = (
        order.replicas * order.inner_steps if isinstance(order, InnerPhaseOrder) else 1
    )
    batches = order.order if isinstance(order, InnerPhaseOrder) else order
    batches_used = len(history.commits) * batches_per_step
    for first in range(0, batches_used, batches.steps_per_epoch):
        part = range(first, min(first + batches.steps_per_epoch, batches_used))
        times, skipped = _count(history, batches, part, train_samples, batches_per_step)
        is_whole_epoch = len(part) == batches.steps_per_epoch
        if sampling is not None:
            problem = _check_draws(times, sampling, is_whole_epoch=is_whole_epoch)
            epochs.append((int(times.sum()), sampling.draws, skipped))
        else:
            problem = _check_once(times, is_whole_epoch=is_whole_epoch)
            epochs.append((int((times == 1).sum()), train_samples, skipped))
        if problem:
            faults.append(f"epoch {len(epochs) - 1}: {problem}")
    return Coverage(tuple(epochs), unplanned, tuple(faults))


def _check_once(times: np.ndarray, *, is_whole_epoch: bool) -> str:
    """Describe the samples of an epoch that were not used once; empty if there are none."""
    if times.max() > 1 or (is_whole_epoch and times.min() < 1):
        return f"{int((times > 1).sum())} samples more than once, {int((times < 1).sum())} never"
    return ""


def _check_draws(times: np.ndarray, sampling: Sampling, *, is_whole_epoch: bool) -> str:
    """Describe the fault in an epoch's draws; empty if there is none."""
    total, weights = int(times.sum()), sampling.weights
    if total > sampling.draws or (is_whole_epoch and total < sampling.draws):
        return f"{total} samples instead of {sampling.draws} draws"
    if weights is not None and times[weights == 0].any():
        return "a sample of weight 0 was used"
    if not sampling.replacement and times.max() > 1:
        return f"{int((times > 1).sum())} samples more than once"
    return ""


def _count(
    history: History, order: SampleOrder, batches: range, train_samples: int, batches_per_step: int
) -> tuple[np.ndarray, int]:
    """Count how often each sample is in these batches, and the samples of skipped steps."""
    times = np.zeros(train_samples, np.int64)
    skipped = 0
    for batch in batches:
        samples = [sample for part in order.microbatches(batch) for sample in part]
        np.add.at(times, samples, 1)
        commit = history.commit_of(batch // batches_per_step)
        skipped += len(samples) if commit is not None and commit.skipped else 0
    return times, skipped


def _account_for(history: History, commit: Committed, microbatches: int) -> str | None:
    """Describe the fault in a commit's plans; empty if there is none, None if there are no
    plans."""
    if commit.skipped:
        return ""
    plans = history.plans.get(Attempt(commit.term, commit.step, commit.attempt), [])
    if any(plan.microbatches != microbatches for plan in plans):
        return f"planned for a different number of microbatches than {microbatches}"
    planned_subtrees = {subtree for plan in plans for subtree in plan.planned()}
    counted_subtrees = {
        subtree for combination in commit.counted or () for subtree in _subtrees(combination)
    }
    stray_subtree = next(
        (n for n in (*planned_subtrees, *counted_subtrees) if not is_subtree(n, microbatches)), None
    )
    if stray_subtree is not None:
        return f"{stray_subtree} is not a subtree over {microbatches} microbatches"
    embedded = () if commit.embedded is None else (commit.embedded.of,)
    for combination in (*(commit.counted or ()), *embedded):
        leaves = sorted(
            leaf for subtree in _subtrees(combination) for leaf in range(subtree.lo, subtree.hi)
        )
        if leaves != list(range(microbatches)):
            return "the sums that were counted do not hold every microbatch once"
    if not plans:
        verdict = "" if commit.counted else None
        return verdict if commit.recovered else "committed without a plan"
    missing = set(range(microbatches)).difference(
        *(range(subtree.lo, subtree.hi) for subtree in planned_subtrees)
    )
    if missing:
        return f"microbatches {', '.join(map(str, sorted(missing)))} were not assigned"
    if commit.recovered:
        return ""
    stray = _strays(commit.counted or (), plans)
    if stray or commit.embedded is None:
        return stray
    # Embeddings are collected by the attempt before that of the gradients.
    previous_attempt = Attempt(commit.term, commit.step, commit.attempt - 1)
    stray = _strays((commit.embedded.of,), history.plans.get(previous_attempt, []))
    return f"embeddings: {stray}" if stray else ""


def _strays(combinations: tuple[Subtrees, ...], plans: list[Planned]) -> str:
    """Describe a subtree that was counted for a worker that had not been assigned it."""
    assignments = {
        (name, subtree) for plan in plans for name, mine in plan.nodes.items() for subtree in mine
    }
    for combination in combinations:
        for name, subtrees in combination.items():
            for lo, hi in subtrees:
                if (name, (lo, hi)) not in assignments:
                    return f"subtree [{lo},{hi}) of {name!r} is counted, and was not assigned to it"
    return ""


def _subtrees(combination: Subtrees) -> Iterator[Subtree]:
    for subtrees in combination.values():
        for lo, hi in subtrees:
            yield Subtree(lo, hi)
