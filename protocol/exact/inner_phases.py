"""The samples and seeds of the inner steps of a run with replicas.

An *inner phase* is the unit of assignment in a run with replicas: one replica's inner steps of a
round. Its result is a function of the parameters at the start of the round, the per-replica state
if there is any, and the run spec. So every worker computes the same bits, every time.

All replicas share one order of samples: inner step h of replica k in round r takes the samples of
step (r H + h) K + k of a run without replicas. So replicas never share a sample within an epoch,
every epoch covers each sample exactly once, and with K = 1 the order is that of a run without
replicas.
"""

from __future__ import annotations

from protocol.exact.samples import RowGroups, SampleOrder, microbatch_seed
from protocol.spec.run_spec import RunSpec
from protocol.spec.sampling import Sampling


class InnerPhaseOrder:
    """The order of samples of a run with replicas.

    Attributes:
        replicas: K, the number of replicas.
        inner_steps: H, inner steps of a round.
        total: Inner steps of each replica in the whole run, which is the length of its schedule.

    Args:
        spec: The run spec, with a section `replicas`.
        samples: Number of training samples.
        row_groups: As in `SampleOrder`.
        sampling: As in `SampleOrder`.
    """

    def __init__(
        self,
        spec: RunSpec,
        samples: int,
        row_groups: RowGroups = (),
        sampling: Sampling | None = None,
    ) -> None:
        assert spec.replicas is not None
        self.replicas, self.inner_steps = spec.replicas.count, spec.replicas.inner_steps
        self.total = spec.steps * self.inner_steps
        self._seed = spec.seed
        self.order = SampleOrder(
            spec.order_seed, samples, spec.batch, row_groups, sampling=sampling
        )

    def microbatch_count(self, step: int) -> int:
        """Return the number of leaves of a round's tree: one for each replica."""
        del step
        return self.replicas

    def global_step(self, round_: int, inner: int) -> int:
        """Return the number of inner steps of a replica before this one, in all rounds."""
        return round_ * self.inner_steps + inner

    def batch(self, round_: int, replica: int, inner: int) -> int:
        """Return the number of an inner step's batch in the order of samples."""
        return self.global_step(round_, inner) * self.replicas + replica

    def batches(self, round_: int) -> range:
        """Return the numbers of a round's batches."""
        first = self.batch(round_, 0, 0)
        return range(first, first + self.inner_steps * self.replicas)

    def microbatches(self, round_: int, replica: int, inner: int) -> tuple[tuple[int, ...], ...]:
        """Return the sample numbers of each microbatch of an inner step."""
        return self.order.microbatches(self.batch(round_, replica, inner))

    def seeds(self, round_: int, replica: int, inner: int) -> list[int]:
        """Return the seed of each microbatch of an inner step."""
        batch = self.batch(round_, replica, inner)
        leaves = range(self.order.microbatch_count(batch))
        return [microbatch_seed(self._seed, batch, leaf) for leaf in leaves]


Steps = SampleOrder | InnerPhaseOrder


def order_of_steps(
    spec: RunSpec, samples: int, row_groups: RowGroups = (), sampling: Sampling | None = None
) -> Steps:
    """Return the order of a run's samples, with or without replicas."""
    if spec.replicas is not None:
        return InnerPhaseOrder(spec, samples, row_groups, sampling)
    return SampleOrder(
        spec.order_seed,
        samples,
        spec.batch,
        row_groups,
        grouped=spec.groups_by_length,
        sampling=sampling,
    )
