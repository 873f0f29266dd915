"""A worker's device: the job's scripted numbers, at a scripted speed, with scripted faults.

The engine, its sums along the tree, the replica and its digests are the product's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from backends.base.interface import (
    EMBEDDING_GRADIENT,
    Array,
    Batch,
    BlockGradient,
    CaptureResult,
    DeviceInfo,
    GradientItem,
    Leaf,
    Loss,
    StepLoss,
    Sums,
    Trainable,
)
from backends.base.subtree_gradients import Microbatch, SubtreeGradients, sum_on_host
from protocol.base.errors import DataError
from protocol.exact.replica import Replica
from protocol.spec.run_spec import RunSpec
from tests.simulation.job import Job, Rows

_HOST_MS = 1.0


@dataclass
class Flaws:
    """Faults of a worker."""

    microbatch_ms: float
    pace_ms: float
    """Time per microbatch without disturbances."""
    cannot_build: bool = False
    evaluates: bool = False
    """Whether the worker only evaluates; this is not a fault."""
    flavor: int = 0
    nonfinite_once: set[tuple[int, int]] = field(default_factory=set)
    """(step, block) of the next gradient that is not finite."""
    flips: set[int] = field(default_factory=set)
    """Steps after which a bit of the replica flips."""
    dies_after_flip: bool = False
    """Whether the worker crashes when it sends results that it computed after a bit flipped."""


@dataclass(frozen=True)
class DeviceEnvironment:
    """The interface of the simulation to a device.

    Attributes:
        rng: The generator of the seed.
        job: Returns the job of a run spec.
        poison: (step, microbatch, block) whose gradient is not finite on any device.
        charge: Lets time pass for a computation.
        replica: Returns the worker's replica, if it has one.
        flip: Chooses the bit that flips now, and records the flip.
    """

    rng: Random
    job: Callable[[RunSpec], Job]
    poison: set[Any]
    charge: Callable[[float], None]
    replica: Callable[[], Replica | None]
    flip: Callable[[], int]


class SimulatedDevice:
    """The backend factory of one engine, and its backend and program in one."""

    info = DeviceInfo("scripted", "simulated", usable=True, reason="simulated")
    memory = ""
    parity = ""
    loss_scale = 1.0

    def __init__(self, flaws: Flaws, environment: DeviceEnvironment) -> None:
        self._flaws = flaws
        self._environment = environment
        self._job: Job | None = None
        self._parameters: list[Array] = []
        self._loaded_bytes: list[bytes] = []
        self._embedding_rows: list[Rows] = []

    # worker.shell.engine.BackendFactory

    def backend(self) -> SimulatedDevice:
        return self

    def task(self, spec: RunSpec) -> Any:
        self._environment.charge(self._environment.rng.choice((5.0, 50.0, 300.0)))
        if self._flaws.cannot_build:
            raise DataError("scripted to fail")
        self._job = self._environment.job(spec)
        return _FlavoredTask(self._job, self._flaws.flavor)

    # backends.base.interface.Backend

    def numerics_profile(self, threads: int) -> Mapping[str, str]:
        del threads
        return {"device": "simulated", "flavour": str(self._flaws.flavor)}

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        others: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> SimulatedDevice:
        del trainable, example, others, evaluations
        return self

    # backends.base.interface.Program

    def keeps_subnormals(self) -> bool:
        return True

    def capture_rows(self, batch: Batch) -> CaptureResult:
        job = self._job
        assert job is not None
        self._environment.charge(self._flaws.microbatch_ms)
        samples = batch.arrays["sample_ids"].tolist()
        return CaptureResult(job.rows(samples), job.captured_loss(samples))

    def embed(self, leaves: Sequence[Leaf]) -> Generator[Rows, None, None]:
        job = self._job
        assert job is not None
        for _, seed in leaves:
            self._environment.charge(self._flaws.microbatch_ms / 3)
            step, microbatch = job.step_and_microbatch(seed)
            rows = job.embedding_rows(self._parameters, step, microbatch)
            if self._is_nonfinite(step, microbatch, -1):
                rows[0, :4].view(np.float32)[0] = np.nan
            yield rows

    def step_loss(self, rows: Rows, seed: int) -> StepLoss:
        del seed
        assert self._job is not None
        return self._job.step_loss(rows)

    def take_embeddings(self) -> list[Rows]:
        rows, self._embedding_rows = self._embedding_rows, []
        return rows

    def load(self, parameters: list[Array]) -> None:
        replica, flaws = self._environment.replica(), self._flaws
        if replica is not None and parameters[0] is replica.parameters[0]:
            # From here on digests report this state. A bit that flips later, for example before
            # an evaluation, shows only in the next digest.
            is_unchanged = self._loaded_bytes == [values.tobytes() for values in parameters]
            if not is_unchanged and replica.step in flaws.flips:
                flaws.flips.discard(replica.step)
                replica.arrays("parameters")[1].view(np.uint32)[0] ^= self._environment.flip()
            self._loaded_bytes = [values.tobytes() for values in parameters]
        self._environment.charge(_HOST_MS)
        self._parameters = [values.copy() for values in parameters]

    def gradients(self, leaves: Sequence[Leaf]) -> SubtreeGradients:
        assert self._job is not None
        return sum_on_host(leaves, self._microbatch, len(self._job.blocks))

    def _microbatch(self, leaf: int, batch: Batch, seed: int) -> Microbatch:
        del leaf
        return Microbatch(self._items(batch, seed), lambda: None)

    def _items(self, batch: Batch, seed: int) -> Iterator[GradientItem]:
        job, rng = self._job, self._environment.rng
        assert job is not None
        step, microbatch = job.step_and_microbatch(seed)
        is_probe = not seed
        has_embedding_gradient = EMBEDDING_GRADIENT + "embedding" in batch.arrays
        if has_embedding_gradient:
            self._embedding_rows.append(job.embedding_rows(self._parameters, step, microbatch))
        for block in reversed(range(len(job.blocks))):
            values = job.gradient(self._parameters, step, microbatch, block, batch.arrays)
            if not is_probe:
                if block == len(job.blocks) - 1:
                    self._environment.charge(self._flaws.microbatch_ms)
                elif rng.random() < 0.3:
                    self._environment.charge(self._flaws.microbatch_ms / 8)
                if self._is_nonfinite(step, microbatch, block):
                    values[0] = np.nan
            yield BlockGradient(block, values)
        loss = job.loss(self._parameters, step, microbatch)
        if not is_probe and not has_embedding_gradient and self._is_nonfinite(step, microbatch, -1):
            loss = float("inf")
        yield Loss(loss, batch.weight)

    def _is_nonfinite(self, step: int, microbatch: int, block: int) -> bool:
        if (step, microbatch, block) in self._environment.poison:
            return True
        if (step, block) in self._flaws.nonfinite_once:
            self._flaws.nonfinite_once.discard((step, block))
            return True
        return False

    def evaluate(self, batch: Batch) -> Sums:
        assert self._job is not None
        self._environment.charge(self._flaws.microbatch_ms)
        return self._job.sums(self._parameters, int(batch.weight))

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class _FlavoredTask:
    """The job's task; on machines of another flavor it starts from other weights."""

    def __init__(self, job: Job, flavor: int) -> None:
        self._job = job
        self._flavor = flavor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def initial_parameters(self) -> list[Array]:
        return self._job.initial(self._flavor)
