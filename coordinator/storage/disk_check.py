"""Check that the disk has room for the files of a run, before the run begins.

The log keeps every averaged gradient, four bytes per trained parameter and step, from one
checkpoint to the next; a checkpoint has parameters and moments.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from coordinator.capture.captured_files import result_bytes
from coordinator.disk.durable_file import storage_errors
from coordinator.run.outputs.side_outputs import replica_state_bytes
from coordinator.storage.states.replica_states import ROUNDS_KEPT
from protocol.base import limits
from protocol.base.errors import StorageFailed
from protocol.base.limits import byte_size
from protocol.base.option_names import option
from protocol.exact.update import moment_count, state_arrays
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """The most disk space that a run uses at any time.

    Attributes:
        step_bytes: Size of the log for each step.
        steps: The most steps that the log has at once.
        state_bytes: Size of a checkpoint.
        states: The most checkpoints that exist at once.
        result_bytes: Size of the trained or captured result.
    """

    step_bytes: int
    steps: int
    state_bytes: int
    states: int
    result_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Size of all files except the log."""
        return self.state_bytes * self.states + self.result_bytes

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return self.fixed_bytes + self.step_bytes * self.steps

    @classmethod
    def of(cls, spec: RunSpec, manifest: Manifest) -> DiskBudget:
        """Compute the budget from run spec and parameter count."""
        checkpoint_spec, parameter_bytes = spec.checkpoint, manifest.elements * 4
        steps = spec.steps_with(manifest.epoch_samples)
        every = min(checkpoint_spec.every or steps, steps)
        # A checkpoint is written before another is removed; the best and the first may stay too.
        states = (
            1
            + checkpoint_spec.keep_last
            + (checkpoint_spec.metric is not None)
            + checkpoint_spec.keep_log
        )
        return cls(
            step_bytes=parameter_bytes if spec.log == "full" else 0,
            steps=steps if checkpoint_spec.keep_log else every,
            state_bytes=parameter_bytes * state_arrays(spec.step_optimizer),
            states=min(states, 2 + (steps - 1) // every),
            result_bytes=_capture_bytes(spec, manifest)
            if manifest.capture
            else parameter_bytes + _replica_bytes(spec, manifest, states),
        )


def _replica_bytes(spec: RunSpec, manifest: Manifest, states: int) -> int:
    """Return the bytes of the per-replica states of checkpoints and the last rounds, and of the
    inner checkpoints of each replica."""
    if spec.replicas is None:
        return 0
    state_bytes = replica_state_bytes(spec, manifest) * (states + ROUNDS_KEPT)
    inner_checkpoint_bytes = manifest.elements * 4 * (1 + moment_count(spec.optimizer))
    return spec.replicas.count * (
        state_bytes + (2 * inner_checkpoint_bytes if spec.replicas.boundary_every else 0)
    )


def _capture_bytes(spec: RunSpec, manifest: Manifest) -> int:
    """Return the bytes of the captured logits, and of the file that is being written."""
    captured = result_bytes(spec, manifest)
    return captured + min(captured, limits.LOGITS_FILE_BYTES)


def check_disk_space(directory: Path, spec: RunSpec, manifest: Manifest) -> None:
    """Check that the files of the run fit on the disk.

    Raises:
        StorageFailed: The files do not fit. The message says what to set instead, or how much space
            to free.
    """
    with storage_errors("read the free space of", directory):
        free_bytes = shutil.disk_usage(directory).free
    budget = DiskBudget.of(spec, manifest)
    if budget.total_bytes > free_bytes:
        if manifest.capture is not None:
            text = (
                f"No space left for this capture: expected {byte_size(budget.total_bytes)} for "
                f"{manifest.train_samples} samples, got {byte_size(free_bytes)}; free "
                f"{byte_size(budget.total_bytes - free_bytes)} more, or lower capture.top_k, "
                "or set steps to capture a part"
            )
            raise StorageFailed("begin the run in", str(directory), text)
        text = (
            f"No space left for this run: {budget.steps} steps in the log at "
            f"{byte_size(budget.step_bytes)} each, {budget.states} checkpoints at "
            f"{byte_size(budget.state_bytes)} and the result are "
            f"{byte_size(budget.total_bytes)}, and {byte_size(free_bytes)} are free; "
            f"{_remedy(budget, spec, free_bytes)}"
        )
        raise StorageFailed("begin the run in", str(directory), text)


def _remedy(budget: DiskBudget, spec: RunSpec, free_bytes: int) -> str:
    free_more = f"free {byte_size(budget.total_bytes - free_bytes)} more"
    remaining = free_bytes - budget.fixed_bytes
    if budget.step_bytes == 0 or remaining < 0:
        return free_more
    fitting_steps = remaining // budget.step_bytes
    if fitting_steps and not spec.checkpoint.keep_log:
        return f"{free_more}, or set checkpoint.every={fitting_steps} ({option('--set')})"
    if spec.checkpoint.keep_log and fitting_steps >= (spec.checkpoint.every or budget.steps):
        return f"{free_more}, or set checkpoint.keep_log=false ({option('--set')})"
    return f"{free_more}, or set log=checkpoint ({option('--set')}), which keeps no gradients"
