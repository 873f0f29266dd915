"""A device without a model: it yields scripted gradients at a set speed, without torch.

It serves tests, simulations and benchmarks of everything except the device, and sleeps instead of
computing. Forward takes a third of a microbatch's time, then blocks follow at equal intervals, last
block first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np

from backends.base import draws
from backends.base.inner_steps import InnerState, SchedulePosition
from backends.base.interface import (
    Array,
    Batch,
    BlockGradient,
    CaptureResult,
    DeviceInfo,
    Leaf,
    Loss,
    Program,
    Sums,
    Trainable,
)
from backends.base.subtree_gradients import HostSummedProgram, Microbatch
from protocol.base.errors import SamestepError
from protocol.exact.subnormals import subnormals_are_kept
from protocol.exact.update import moment_count
from protocol.spec.manifest import Block
from protocol.spec.sections.optimizer import OptimizerSpec

FORWARD_SHARE = 1.0 / 3.0
"""Share of a microbatch's time before the first block: backward costs twice as much as forward."""


class ScriptedBackend:
    """A device that takes `microbatch_ms` milliseconds for every microbatch of any model."""

    def __init__(self, microbatch_ms: float = 0.0) -> None:
        self.microbatch_ms = microbatch_ms

    @property
    def info(self) -> DeviceInfo:
        """The device's description; the name contains the speed."""
        reason = "for tests and measurements; computes nothing"
        return DeviceInfo("scripted", f"scripted, {self.microbatch_ms:g} ms", True, reason)

    def numerics_profile(self, threads: int) -> Mapping[str, str]:
        """Return a constant profile: neither speed nor threads change a bit."""
        del threads
        return {"device": "scripted"}

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        other_batches: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> Program:
        """Compile the task's blocks; its model and loss are ignored."""
        del example, other_batches, evaluations
        return ScriptedProgram(trainable, self.microbatch_ms)


class ScriptedProgram(HostSummedProgram):
    """Gradients that are a function of (seed, block, element).

    A microbatch's time starts at the first `next`; a slow receiver does not slow the device down.
    """

    def __init__(self, trainable: Trainable, microbatch_ms: float) -> None:
        super().__init__(trainable.blocks)
        self._patterns = [
            draws.symmetric_uniforms(draws.derive_key("scripted", number), block.elements, 1.0)
            for number, block in enumerate(trainable.blocks)
        ]
        self._microbatch_s = microbatch_ms / 1e3
        self.parameters: list[Array] = [np.zeros_like(pattern) for pattern in self._patterns]

    def _load(self, parameters: list[Array]) -> None:
        """Copy the parameters; gradients do not depend on them."""
        for own_block, new_block in zip(self.parameters, parameters, strict=True):
            np.copyto(own_block, new_block)

    def _begin(self, leaf: int, batch: Batch, seed: int) -> Microbatch:
        del leaf
        closed = threading.Event()
        return Microbatch(self._run(batch, seed, closed), closed.set)

    def _run(
        self, batch: Batch, seed: int, closed: threading.Event
    ) -> Iterator[BlockGradient | Loss]:
        start_s = time.perf_counter()
        count = len(self._patterns)
        for block_count, block in enumerate(reversed(range(count)), start=1):
            share = FORWARD_SHARE + (1.0 - FORWARD_SHARE) * block_count / count
            factor = 0.5 + draws.uniforms(draws.derive_key(seed, block), 1)[0]
            values = self._patterns[block] * np.float32(factor)
            if not _wait_until(start_s + share * self._microbatch_s, closed):
                return
            yield BlockGradient(block, values)
        mean = float(draws.uniforms(draws.derive_key(seed, "loss"), 1)[0])
        if not closed.is_set():
            yield Loss(mean * batch.weight, batch.weight)

    def inner_steps(self, optimizer: OptimizerSpec) -> ScriptedInnerSteps:
        """Return inner steps that take time and change one element per block."""
        return ScriptedInnerSteps(self._blocks, moment_count(optimizer), self._microbatch_s)

    def evaluate(self, batch: Batch) -> Sums:
        """Return the numbers of samples and parts, after the time of a forward pass."""
        time.sleep(FORWARD_SHARE * self._microbatch_s)
        return {"samples": batch.weight, "parts": 1}

    def capture_rows(self, batch: Batch) -> CaptureResult:
        """Refuse to capture.

        Raises:
            SamestepError: Always.
        """
        del batch
        raise SamestepError("the scripted backend computes no logits; use a cpu worker")

    def keeps_subnormals(self) -> bool:
        """Check the calling thread, which adds the gradients."""
        return subnormals_are_kept()

    def close(self) -> None:
        """Nothing to free."""


class ScriptedInnerSteps:
    """Inner steps that each change one element of every block, as a function of the seeds.

    A step takes the same time for every model size.

    Args:
        blocks: The manifest's blocks.
        moments: Number of the optimizer's moments, which do not change.
        microbatch_s: Duration of a microbatch in seconds.
    """

    def __init__(self, blocks: tuple[Block, ...], moments: int, microbatch_s: float) -> None:
        self._blocks = blocks
        self._moment_count = moments
        self._microbatch_s = microbatch_s
        self._parameters: list[Array] = []
        self._moments: list[list[Array]] = []

    def begin(self, state: InnerState) -> None:
        """See `backends.base.inner_steps.InnerSteps`."""
        assert len(state.moments) == self._moment_count
        self._parameters = [values.copy() for values in state.parameters]
        self._moments = [[values.copy() for values in moment] for moment in state.moments]

    def step(
        self, leaves: Sequence[Leaf], position: SchedulePosition
    ) -> Generator[None, None, Loss]:
        """See `backends.base.inner_steps.InnerSteps`."""
        total, changes = 0.0, []
        for batch, seed in leaves:
            time.sleep(self._microbatch_s)
            yield
            total += float(draws.uniforms(draws.derive_key(seed, "loss"), 1)[0]) * batch.weight
            changes += [
                draws.uniforms(draws.derive_key(seed, n), 1)[0] for n in range(len(self._blocks))
            ]
        for number, change in enumerate(changes):
            values = self._parameters[number % len(self._blocks)]
            if values.size:
                values[position.step % values.size] -= np.float32(change / 100)
        return Loss(total, sum(batch.weight for batch, _ in leaves))

    def state(self) -> InnerState:
        """See `backends.base.inner_steps.InnerSteps`."""
        moments = [[values.copy() for values in moment] for moment in self._moments]
        return InnerState(self.parameters(), moments)

    def parameters(self) -> list[Array]:
        """See `backends.base.inner_steps.InnerSteps`."""
        return [values.copy() for values in self._parameters]


def _wait_until(deadline_s: float, closed: threading.Event) -> bool:
    """Wait until a time of `time.perf_counter`; return False if closed earlier."""
    left_s = deadline_s - time.perf_counter()
    if left_s > 0:
        closed.wait(left_s)
    return not closed.is_set()
