"""Whether every sample of each epoch was covered exactly once, from plans and commits alone.

Which samples a step has follows from the seed; where a run has replicas, which samples each inner
step of each of them has, and all of their batches together are one order. A commit says whose nodes
make up its sums: each way must hold every microbatch once, of workers that were given them. Where
it does not say so, it counts if its plans gave every microbatch to someone, along nodes of the tree
(a sum over the tree counts each leaf once, however often one was computed). A skipped step covers
its samples too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coordinator.audit.history import Attempt, History
from coordinator.storage.directory.journal_records import Committed, Nodes, Planned
from protocol.exact.samples import RowGroups, SampleOrder
from protocol.exact.stretches import StretchOrder, order_of_steps
from protocol.exact.tree import Node, is_node
from protocol.spec.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class Coverage:
    """What was covered.

    Attributes:
        epochs: For each epoch begun: samples covered once, samples there are, samples of skipped
            steps among those covered.
        unplanned: Steps taken over from the gradient log after a crash, of which no plan is left.
        faults: Where the proof fails.
    """

    epochs: tuple[tuple[int, int, int], ...]
    unplanned: int
    faults: tuple[str, ...]


def cover_samples(
    history: History, spec: RunSpec, train_samples: int, row_groups: RowGroups = ()
) -> Coverage:
    """Count how often each sample was covered, and see that plans account for every commit."""
    order = order_of_steps(spec, train_samples, row_groups)
    faults: list[str] = []
    unplanned = 0
    for number, commit in history.commits:
        problem = _account_for(history, commit, order.microbatch_count(commit.step))
        if problem is None:
            unplanned += 1
        elif problem:
            faults.append(f"line {number}, step {commit.step}: {problem}")
    epochs: list[tuple[int, int, int]] = []
    a_step = order.replicas * order.inner_steps if isinstance(order, StretchOrder) else 1
    batches = order.order if isinstance(order, StretchOrder) else order
    taken = len(history.commits) * a_step
    for first in range(0, taken, batches.steps_per_epoch):
        part = range(first, min(first + batches.steps_per_epoch, taken))
        times, skipped = _count(history, batches, part, train_samples, a_step)
        whole = len(part) == batches.steps_per_epoch
        if times.max() > 1 or (whole and times.min() < 1):
            faults.append(
                f"epoch {len(epochs)}: {int((times > 1).sum())} samples more than once, "
                f"{int((times < 1).sum())} never"
            )
        epochs.append((int((times == 1).sum()), train_samples, skipped))
    return Coverage(tuple(epochs), unplanned, tuple(faults))


def _count(
    history: History, order: SampleOrder, batches: range, train_samples: int, a_step: int
) -> tuple[np.ndarray, int]:
    """How often each sample is in these batches, of which a step has so many; and how many
    samples are in steps that were skipped."""
    times = np.zeros(train_samples, np.int64)
    skipped = 0
    for batch in batches:
        samples = [sample for part in order.microbatches(batch) for sample in part]
        np.add.at(times, samples, 1)
        commit = history.commit_of(batch // a_step)
        skipped += len(samples) if commit is not None and commit.skipped else 0
    return times, skipped


def _account_for(history: History, commit: Committed, microbatches: int) -> str | None:
    """What is wrong with a commit's plans, empty if nothing is; None if there are none to see."""
    if commit.skipped:
        return ""
    plans = history.plans.get(Attempt(commit.epoch, commit.step, commit.attempt), [])
    if any(plan.microbatches != microbatches for plan in plans):
        return f"planned for another number of microbatches than {microbatches}"
    planned = {node for plan in plans for node in plan.planned()}
    counted = {node for way in commit.counted or () for node in _nodes(way)}
    odd = next((n for n in (*planned, *counted) if not is_node(n, microbatches)), None)
    if odd is not None:
        return f"{odd} is no node of a tree over {microbatches} microbatches"
    for way in commit.counted or ():
        leaves = sorted(leaf for node in _nodes(way) for leaf in range(node.lo, node.hi))
        if leaves != list(range(microbatches)):
            return "the sums that were counted do not hold every microbatch once"
    if not plans:
        known = "" if commit.counted else None
        return known if commit.recovered else "committed without a plan"
    missing = set(range(microbatches)).difference(*(range(node.lo, node.hi) for node in planned))
    if missing:
        return f"microbatches {', '.join(map(str, sorted(missing)))} were given to nobody"
    return "" if commit.recovered else _strays(commit, plans)


def _strays(commit: Committed, plans: list[Planned]) -> str:
    """Nodes that were counted of a worker that had never been given them."""
    given = {(name, node) for plan in plans for name, mine in plan.nodes.items() for node in mine}
    for way in commit.counted or ():
        for name, nodes in way.items():
            for lo, hi in nodes:
                if (name, (lo, hi)) not in given:
                    return (
                        f"node [{lo},{hi}) of worker {name!r} is counted, and was not given to it"
                    )
    return ""


def _nodes(way: Nodes) -> Iterator[Node]:
    for nodes in way.values():
        for lo, hi in nodes:
            yield Node(lo, hi)
