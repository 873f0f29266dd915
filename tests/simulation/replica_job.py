"""A job with replicas, and the results of its undisturbed run, computed by inner steps in order.

As naive as `Job`: no inner phases, leases or inner checkpoints. It uses the product's codecs;
`tests/protocol/exact/test_codecs.py` checks them against another definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

import numpy as np
from blake3 import blake3

from backends.base.interface import Array
from protocol.exact.digest import weights_digest
from protocol.exact.reduction.average import average as scale_to_average
from protocol.exact.reduction.average import square_sum
from protocol.exact.reduction.codecs import project
from protocol.exact.replica import Replica
from protocol.exact.samples import microbatch_seed
from protocol.exact.update import global_norm, step_scalars
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import Codec, ExchangeSpec, OuterSpec, ReplicasSpec
from tests.simulation.job import STEPS, ExpectedStep, Job, along_tree

_FEEDBACK: Final = np.float32(0.95)
_REPLICAS: Final = (
    ReplicasSpec(count=3, inner_steps=2),
    ReplicasSpec(count=2, inner_steps=3, codec="int8", inner_state="carry", averages="int4"),
    ReplicasSpec(count=5, inner_steps=3, codec="topk", boundary_every=1),
    ReplicasSpec(count=3, inner_steps=4, inner_state="carry", boundary_every=2),
    ReplicasSpec(count=1, inner_steps=2, codec="bfloat16", averages="bfloat16"),
    ReplicasSpec(
        count=4, inner_steps=5, codec="topk", inner_state="carry", boundary_every=3,
        outer=OuterSpec(lr=1.0, momentum=0.5, nesterov=False),
    ),
    ReplicasSpec(count=7, inner_steps=1, codec="int4", outer=OuterSpec(lr=1.0, momentum=0.0)),
)  # fmt: skip
REPLICA_VARIANTS: Final = 84


@dataclass
class ReplicaState:
    """The state of one logical replica between rounds.

    Attributes:
        moments: Moments of the inner optimizer, if they are carried.
        rest: Remainder of the codec topk, one array per block.
        missed: Missed updates of the tensors, if moments are carried.
    """

    moments: list[Array] = field(default_factory=list)
    rest: list[Array] = field(default_factory=list)
    missed: list[Array] = field(default_factory=list)


class ReplicaJob(Job):
    """One of a few run specs with a section `replicas`; `variant` is below `REPLICA_VARIANTS`."""

    def __init__(self, variant: int, steps: int = STEPS) -> None:
        super().__init__(variant, steps)
        self.replicas = _REPLICAS[variant % len(_REPLICAS)]
        self.spec = self.spec.model_copy(
            update={"replicas": self.replicas, "exchange": ExchangeSpec()}
        )
        batches = steps * self.replicas.inner_steps * self.replicas.count
        self._positions = {
            microbatch_seed(self.spec.seed, batch, leaf): (batch, leaf)
            for batch in range(batches)
            for leaf in range(self.order.microbatch_count(batch))
        }
        self._expected_steps = {}

    def coverage(self, step: int) -> Array | None:
        """Return None: a difference of weights does not count microbatches."""
        del step
        return None

    def step_from(self, before: Replica, *, skip: bool) -> ExpectedStep:
        """Compute one more round of the undisturbed run."""
        replica, spec, count = before.copy(), self.spec, self.replicas.count
        states: list[ReplicaState] = getattr(before, "replica_states", None) or [
            ReplicaState() for _ in range(count)
        ]
        if skip:
            replica.skip()
            vars(replica)["replica_states"] = states
            return ExpectedStep(replica, replica.state_digest(), float("nan"), "0" * 64, None)
        rounds = [self._round(before, k, states[k]) for k in range(count)]
        averages = []
        for number, block in enumerate(self.blocks):
            average = along_tree(count, partial(_difference, rounds, number))
            scale_to_average(average, float(count), out=average)
            averages.append(self._coded(average, block, self.replicas.averages))
        loss = along_tree(count, lambda k: rounds[k][1]) / count
        norm = global_norm([square_sum(values) for values in averages])
        scalars = step_scalars(
            spec.step_optimizer, replica.optimizer_step + 1, replica.step, spec.steps, norm
        )
        digests = [
            weights_digest({
                tensor.name: values[part].reshape(tensor.shape) for tensor, part in block.slices()
            })
            for block, values in zip(self.blocks, averages, strict=True)
        ]  # fmt: skip
        digest = blake3("".join(digests).encode()).hexdigest()
        replica.apply(averages, scalars)
        vars(replica)["replica_states"] = [state for _, _, state in rounds]
        return ExpectedStep(replica, replica.state_digest(), loss, digest, scalars)

    def _round(
        self, before: Replica, k: int, state: ReplicaState
    ) -> tuple[list[Array], float, ReplicaState]:
        """Return replica k's encoded differences, its mean loss, and its state after the round."""
        spec, steps = self.spec, self.replicas.inner_steps
        carries = self.replicas.inner_state == "carry"
        inner = Replica(self.blocks, spec.optimizer)
        inner.load_parameters(before.parameters)
        moments = [part.values for part in inner.parts() if part.kind != "parameters"]
        for moment, stored in zip(moments, state.moments, strict=False):
            np.copyto(moment, stored)
        for moment, stored in zip(inner.missed, state.missed, strict=False):
            np.copyto(moment, stored)
        losses = 0.0
        for h in range(steps):
            batch = (before.step * steps + h) * self.replicas.count + k
            updates = h + 1 + (before.optimizer_step * steps if carries else 0)
            losses += self._inner_step(inner, batch, updates, before.step * steps + h)
        differences = [np.subtract(a, b) for a, b in zip(
            before.parameters, inner.parameters, strict=True
        )]  # fmt: skip
        rest = state.rest
        if self.replicas.codec == "topk":
            remainder = rest or [np.zeros_like(values) for values in differences]
            differences = [d + r * _FEEDBACK for d, r in zip(differences, remainder, strict=True)]
        encoded_differences = [
            self._coded(values.copy(), block, self.replicas.codec)
            for values, block in zip(differences, self.blocks, strict=True)
        ]
        if self.replicas.codec == "topk":
            rest = [d - s for d, s in zip(differences, encoded_differences, strict=True)]
        carried_moments = [moment.copy() for moment in moments] if carries else []
        missed_counts = [counts.copy() for counts in inner.missed] if carries else []
        return (
            encoded_differences,
            losses / steps,
            ReplicaState(carried_moments, rest, missed_counts),
        )

    def _inner_step(self, inner: Replica, batch: int, updates: int, step: int) -> float:
        count, total = self.order.microbatch_count(batch), self.total_weight(batch)
        gradients = []
        for number in range(len(self.blocks)):
            leaf = partial(self._gradient_of, inner.parameters, batch, number)
            values = along_tree(count, leaf)
            scale_to_average(values, total, out=values)
            gradients.append(values)
        loss = along_tree(count, partial(self._loss_of, inner.parameters, batch))
        norm = global_norm([square_sum(values) for values in gradients])
        length = self.spec.steps * self.replicas.inner_steps
        inner.optimizer_step = updates - 1
        inner.apply(gradients, step_scalars(self.spec.optimizer, updates, step, length, norm))
        return loss / total if total else 0.0

    def _loss_of(self, parameters: list[Array], batch: int, microbatch: int) -> float:
        return self.loss(parameters, batch, microbatch)

    def _coded(self, values: Array, block: Block, codec: Codec) -> Array:
        for chunk in range(block.chunks):
            chunk_slice = block.chunk_slice(chunk)
            values[chunk_slice] = project(values[chunk_slice].copy(), codec)
        return values


def _difference(
    rounds: Sequence[tuple[list[Array], float, ReplicaState]], number: int, k: int
) -> Any:
    return rounds[k][0][number]


@cache
def replica_job_of(variant: int, steps: int = STEPS) -> ReplicaJob:
    """Return a job, the same object each time."""
    return ReplicaJob(variant, steps)
