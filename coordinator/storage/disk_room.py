"""Whether the disk has room for what a run keeps, asked before it begins.

The log holds every averaged gradient, four bytes per trained parameter and step, from one
checkpoint to the next; a checkpoint holds parameters and moments.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from coordinator.capture.captured_files import result_bytes
from coordinator.disk.durable_file import storing
from coordinator.run.outputs.own_state import own_state_bytes
from coordinator.storage.states.replica_states import LATEST
from protocol.base import limits
from protocol.base.byte_size import byte_size
from protocol.base.errors import StorageFailed
from protocol.exact.update import moment_count
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class Needed:
    """What a run keeps at most at any time.

    Attributes:
        step_bytes: Of the log, each step.
        steps: How many of them are there at once.
        state_bytes: One checkpoint.
        states: How many of them are there at once.
        result_bytes: What was trained, or captured.
    """

    step_bytes: int
    steps: int
    state_bytes: int
    states: int
    result_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """All but the log."""
        return self.state_bytes * self.states + self.result_bytes

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.fixed_bytes + self.step_bytes * self.steps

    @classmethod
    def of(cls, spec: RunSpec, manifest: Manifest) -> Needed:
        """From the run spec and the count of parameters."""
        saving, parameter_bytes = spec.checkpoint, manifest.elements * 4
        steps = spec.steps_with(manifest.train_samples)
        every = min(saving.every or steps, steps)
        # One is written before another goes; the best by its figure and the first may stay too.
        states = 1 + saving.keep_last + (saving.metric is not None) + saving.keep_log
        return cls(
            step_bytes=parameter_bytes if spec.log == "full" else 0,
            steps=steps if saving.keep_log else every,
            state_bytes=parameter_bytes * (1 + moment_count(spec.update)),
            states=min(states, 2 + (steps - 1) // every),
            result_bytes=_captured(spec, manifest)
            if manifest.capture
            else parameter_bytes + _alone(spec, manifest, states),
        )


def _alone(spec: RunSpec, manifest: Manifest, states: int) -> int:
    """What replicas have of their own, with checkpoints and the last rounds; and a boundary of
    each, parameters and moments."""
    if spec.replicas is None:
        return 0
    own = own_state_bytes(spec, manifest) * (states + LATEST)
    boundary = manifest.elements * 4 * (1 + moment_count(spec.optimizer))
    return spec.replicas.count * (own + (2 * boundary if spec.replicas.boundary_every else 0))


def _captured(spec: RunSpec, manifest: Manifest) -> int:
    """The files of logits, and the rows of the one that is being written."""
    captured = result_bytes(spec, manifest)
    return captured + min(captured, limits.LOGITS_FILE_BYTES)


def check_room(directory: Path, spec: RunSpec, manifest: Manifest) -> None:
    """See that what the run is going to keep fits on the disk.

    Raises:
        StorageFailed: It does not; what to set instead, or how much room to make.
    """
    with storing("look at", directory):
        free_bytes = shutil.disk_usage(directory).free
    needed = Needed.of(spec, manifest)
    if needed.total_bytes > free_bytes:
        if manifest.capture is not None:
            text = (
                f"No space left for this capture: {byte_size(needed.total_bytes)} are needed for "
                f"{manifest.train_samples} samples, {byte_size(free_bytes)} are free; make room "
                f"for {byte_size(needed.total_bytes - free_bytes)} more, or lower capture.top_k, "
                "or set steps to capture a part"
            )
            raise StorageFailed("begin the run in", str(directory), text)
        text = (
            f"No space left for this run: {needed.steps} steps in the log at "
            f"{byte_size(needed.step_bytes)} each, {needed.states} checkpoints at "
            f"{byte_size(needed.state_bytes)} and the result are "
            f"{byte_size(needed.total_bytes)}, {byte_size(free_bytes)} are free; "
            f"{_remedy(needed, spec, free_bytes)}"
        )
        raise StorageFailed("begin the run in", str(directory), text)


def _remedy(needed: Needed, spec: RunSpec, free_bytes: int) -> str:
    more = f"make room for {byte_size(needed.total_bytes - free_bytes)} more"
    left = free_bytes - needed.fixed_bytes
    if needed.step_bytes == 0 or left < 0:
        return more
    fits = left // needed.step_bytes
    if fits and not spec.checkpoint.keep_log:
        return f"{more}, or set checkpoint.every={fits} (--set)"
    if spec.checkpoint.keep_log and fits >= (spec.checkpoint.every or needed.steps):
        return f"{more}, or set checkpoint.keep_log=false (--set)"
    return f"{more}, or set log=checkpoint (--set), which keeps no gradients"
