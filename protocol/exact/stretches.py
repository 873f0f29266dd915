"""Which samples a replica takes in which inner step, and with which rate.

A *stretch* is what is given out where a run has replicas: (round, replica, inner steps). It is a
function of the parameters at the round's start, the replica's own state if it has one, and the run
spec. So whoever computes it, and however often, its bits are the same.

The inner steps of all replicas share one order of samples: inner step h of replica k in round r
takes what a run without replicas would take in step (r H + h) K + k. So replicas never meet the
same sample in an epoch, every epoch covers each sample exactly once, and with K = 1 it is the very
order of a run without replicas.
"""

from __future__ import annotations

from protocol.exact.samples import RowGroups, SampleOrder, microbatch_seed
from protocol.spec.run_spec import RunSpec


class StretchOrder:
    """The inner steps of a run with replicas.

    Attributes:
        replicas: K.
        inner_steps: H.
        total: Inner steps of each replica in the whole run: the length of their schedule.

    Args:
        spec: The run's, with a section `replicas`.
        samples: How many training samples there are.
        row_groups: As in `SampleOrder`.
    """

    def __init__(self, spec: RunSpec, samples: int, row_groups: RowGroups = ()) -> None:
        assert spec.replicas is not None
        self.replicas, self.inner_steps = spec.replicas.count, spec.replicas.inner_steps
        self.total = spec.steps * self.inner_steps
        self._seed = spec.seed
        self.order = SampleOrder(spec.seed, samples, spec.batch, row_groups)

    def microbatch_count(self, step: int) -> int:
        """Leaves of a round's tree: one for each replica."""
        del step
        return self.replicas

    def global_step(self, round_: int, inner: int) -> int:
        """Inner steps that a replica has taken before this one, in all rounds."""
        return round_ * self.inner_steps + inner

    def batch(self, round_: int, replica: int, inner: int) -> int:
        """The batch of an inner step: its number in the order of samples."""
        return self.global_step(round_, inner) * self.replicas + replica

    def batches(self, round_: int) -> range:
        """All batches of a round."""
        first = self.batch(round_, 0, 0)
        return range(first, first + self.inner_steps * self.replicas)

    def microbatches(self, round_: int, replica: int, inner: int) -> tuple[tuple[int, ...], ...]:
        """The sample numbers of each microbatch of an inner step."""
        return self.order.microbatches(self.batch(round_, replica, inner))

    def seeds(self, round_: int, replica: int, inner: int) -> list[int]:
        """What seeds the draws of each of these microbatches."""
        batch = self.batch(round_, replica, inner)
        leaves = range(self.order.microbatch_count(batch))
        return [microbatch_seed(self._seed, batch, leaf) for leaf in leaves]


Steps = SampleOrder | StretchOrder


def order_of_steps(spec: RunSpec, samples: int, row_groups: RowGroups = ()) -> Steps:
    """What the steps of a run are made of: microbatches, or stretches."""
    if spec.replicas is not None:
        return StretchOrder(spec, samples, row_groups)
    return SampleOrder(spec.seed, samples, spec.batch, row_groups, grouped=spec.grouped)
