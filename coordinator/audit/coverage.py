"""Check from plans and commits alone that every sample of each epoch was used exactly once.

The samples of a step follow from the seed; in a run with replicas, so do those of each inner step
of each replica, and the batches of all replicas form one order. A commit lists the workers and
subtrees in its sums: each combination must contain every microbatch once, computed by workers to
which it was assigned. A commit without a list is accepted if its plans assign every microbatch to a
worker, along subtrees of the tree (a sum over the tree counts each leaf once, however often it was
computed). A skipped step uses its samples too.
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
    """The use of samples in each epoch.

    Attributes:
        epochs: For each epoch that has begun: how many samples (or draws) were used once, how many
            there are, and how many were used in skipped steps.
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

    Sampling with replacement may use a sample several times: then each draw must be used once.
    """
    order = order_of_steps(spec, train_samples, row_groups, sampling)
    faults: list[str] = []
    unplanned = 0
    for number, commit in history.commits:
        problem = _find_fault(history, commit, order.microbatch_count(commit.step))
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
        epoch_batches = range(first, min(first + batches.steps_per_epoch, batches_used))
        uses, skipped = _count_uses(
            history, batches, epoch_batches, train_samples, batches_per_step
        )
        is_whole_epoch = len(epoch_batches) == batches.steps_per_epoch
        if sampling is not None:
            problem = _check_draws(uses, sampling, is_whole_epoch=is_whole_epoch)
            epochs.append((int(uses.sum()), sampling.draws, skipped))
        else:
            problem = _check_once(uses, is_whole_epoch=is_whole_epoch)
            epochs.append((int((uses == 1).sum()), train_samples, skipped))
        if problem:
            faults.append(f"epoch {len(epochs) - 1}: {problem}")
    return Coverage(tuple(epochs), unplanned, tuple(faults))


def _check_once(uses: np.ndarray, *, is_whole_epoch: bool) -> str:
    """Describe the samples of an epoch that were not used once; empty if there are none."""
    if uses.max() > 1 or (is_whole_epoch and uses.min() < 1):
        return f"{int((uses > 1).sum())} samples more than once, {int((uses < 1).sum())} never"
    return ""


def _check_draws(uses: np.ndarray, sampling: Sampling, *, is_whole_epoch: bool) -> str:
    """Describe the fault in an epoch's draws; empty if there is none."""
    total, weights = int(uses.sum()), sampling.weights
    if total > sampling.draws or (is_whole_epoch and total < sampling.draws):
        return f"{total} samples instead of {sampling.draws} draws"
    if weights is not None and uses[weights == 0].any():
        return "a sample of weight 0 was used"
    if not sampling.replacement and uses.max() > 1:
        return f"{int((uses > 1).sum())} samples more than once"
    return ""


def _count_uses(
    history: History, order: SampleOrder, batches: range, train_samples: int, batches_per_step: int
) -> tuple[np.ndarray, int]:
    """Return how often each sample is in these batches, and how many are in skipped steps."""
    uses = np.zeros(train_samples, np.int64)
    skipped = 0
    for batch in batches:
        samples = [sample for microbatch in order.microbatches(batch) for sample in microbatch]
        np.add.at(uses, samples, 1)
        commit = history.commit_of(batch // batches_per_step)
        skipped += len(samples) if commit is not None and commit.skipped else 0
    return uses, skipped


def _find_fault(history: History, commit: Committed, microbatches: int) -> str | None:
    """Describe the fault in a commit's plans; empty if there is none, None if there are no
    plans."""
    if commit.skipped:
        return ""
    plans = history.plans.get(Attempt(commit.term, commit.step, commit.attempt), [])
    if any(plan.microbatches != microbatches for plan in plans):
        return f"planned for a different number of microbatches than {microbatches}"
    planned_subtrees = {subtree for plan in plans for subtree in plan.assigned_subtrees()}
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
            return "the committed sums do not contain every microbatch exactly once"
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
    stray_fault = _find_stray_subtree(commit.counted or (), plans)
    if stray_fault or commit.embedded is None:
        return stray_fault
    # The attempt before that of the gradients collects the embeddings.
    previous_attempt = Attempt(commit.term, commit.step, commit.attempt - 1)
    stray_fault = _find_stray_subtree(
        (commit.embedded.of,), history.plans.get(previous_attempt, [])
    )
    return f"embeddings: {stray_fault}" if stray_fault else ""


def _find_stray_subtree(combinations: tuple[Subtrees, ...], plans: list[Planned]) -> str:
    """Describe a subtree that was counted for a worker that had not been assigned it."""
    assignments = {
        (name, subtree)
        for plan in plans
        for name, worker_subtrees in plan.nodes.items()
        for subtree in worker_subtrees
    }
    for combination in combinations:
        for name, subtrees in combination.items():
            for lo, hi in subtrees:
                if (name, (lo, hi)) not in assignments:
                    return f"subtree [{lo},{hi}) of {name!r} is counted, but was not assigned to it"
    return ""


def _subtrees(combination: Subtrees) -> Iterator[Subtree]:
    for subtrees in combination.values():
        for lo, hi in subtrees:
            yield Subtree(lo, hi)
