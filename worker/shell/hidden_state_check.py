"""Replay a microbatch after training to detect hidden state in a task.

Any worker may compute any microbatch, so gradients must depend on weights, samples and seed alone.
A teacher that forward updates, a memory bank or a generator in the loss makes them depend on
earlier computations of this process. So the digest of one microbatch's gradients at the initial
weights is recorded, and compared again after some steps. Gradients decide whether there is hidden
state; digests of frozen tensors and a walk over the user's objects find the culprit.

One comparison costs a microbatch, two loads of the trained weights, and one read of all frozen
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from blake3 import blake3

from backends.base.interface import Array, Batch, LossFailed, Program
from protocol.base.errors import DataError
from protocol.spec.run_spec import RunSpec
from worker.shell.numerics_profile import probe_digest, rows_probe
from worker.tasks.base.task import HasUserObjects, Task

if TYPE_CHECKING:
    from worker.tasks.checks.reachable_state import Digests, State

_FIRST_STEPS: Final = 2
_NUDGE: Final = np.float32(1 + 2**-6), np.float32(2**-10)
"""Factor and summand that turn initial weights into similar ones, like those after some steps."""
_IN_TRAINING: Final = "during training"
_BETWEEN_CALLS: Final = "from one call to the next"
_IN_TRIAL: Final = "in a trial at other weights"
_GRADIENT: Final = "the gradient of the same microbatch at the same weights"
_GRADIENT_OF_BUILT_IN_TASK: Final = f"{_GRADIENT} (check this machine with worker doctor)"
_REMEDY: Final = (
    "remove state that one call passes to the next (a moving average, a memory bank, a queue, a "
    "separate generator)"
)
_INITIAL: Final = "the values that initial_parameters() returns"
_COPIES: Final = (
    "return copies that were made when the task was built, not arrays that training uses"
)


@dataclass(frozen=True, slots=True)
class _Observation:
    """Digests of a task's outputs and state after one microbatch at the initial weights."""

    gradients: str
    batch: str
    frozen: Digests
    reachable: State


class ReplayCheck:
    """Observes a task on its device when it is built and again after some steps.

    Args:
        spec: The run spec.
        task: The built task.
        program: The task compiled for the device, with the initial weights loaded.
        example: A microbatch.
        batches: Functions that rebuild the first microbatch and another one; if the task reads
            files, only one function, which returns `example`.

    Raises:
        DataError: A call, at these or other weights, changes the task's state; names the culprit.
    """

    def __init__(
        self,
        spec: RunSpec,
        task: Task,
        program: Program,
        example: Batch,
        batches: Sequence[Callable[[], Batch]],
    ) -> None:
        self._task, self._program = task, program
        self._example = example
        self._batches = batches
        self._loss_scale = program.loss_scale
        self._objects = _user_objects(spec, task)
        self._last_step = spec.steps_with(task.manifest.epoch_samples)
        self._every = [spec.checkpoint.every, spec.evaluate_every if spec.stop else 0]
        self._steps = 0
        self._initial_values_digest = self._digest_initial_values()
        self._baseline = self._observe()
        if self._objects:
            with self._blame_initial_values(_IN_TRIAL):
                self._try_other_weights()

    def begin_again(self) -> None:
        """Restart the count of steps, because another run or another state begins."""
        self._steps = 0

    def is_due(self, step: int) -> bool:
        """Count a step and return whether to compare after it; `step` is its number in the run."""
        self._steps += 1
        return (
            self._steps <= _FIRST_STEPS
            or step >= self._last_step
            or any(every and step % every == 0 for every in self._every)
        )

    def check(self, parameters: list[Array], *, reads_replica: bool) -> None:
        """Compare with the observation before training.

        Args:
            parameters: One flat float32 array per block of the replica; unchanged on return.
            reads_replica: Whether the device reads this memory, so that values are swapped in it.

        Raises:
            DataError: State has changed; names the culprit.
        """
        with self._blame_initial_values(_IN_TRAINING):
            self._replay(parameters, reads_replica=reads_replica)

    def _replay(self, parameters: list[Array], *, reads_replica: bool) -> None:
        initial_parameters = self._task.initial_parameters()
        if reads_replica:
            _swap(parameters, initial_parameters)
        self._program.load(parameters if reads_replica else initial_parameters)
        try:
            self._compare(self._observe(), _IN_TRAINING)
        except LossFailed as error:
            raise _state_error(
                f"the loss of the first microbatch, which raises: {error}"
            ) from error
        finally:
            if reads_replica:
                _swap(parameters, initial_parameters)
            self._program.load(parameters)

    def _digest_initial_values(self) -> str:
        """Digest the initial values that a user's task class returns; empty for other tasks,
        which return copies."""
        if not self._objects or isinstance(self._task, HasUserObjects):
            return ""
        hasher = blake3(max_threads=blake3.AUTO)
        for values in self._task.initial_parameters():
            hasher.update(np.ascontiguousarray(values).tobytes())
        return hasher.hexdigest()

    @contextmanager
    def _blame_initial_values(self, period: str) -> Iterator[None]:
        """Name the initial values as the culprit of an error in this context, if they changed.

        If `initial_parameters` returns arrays that training changes, a comparison runs at other
        weights, and its error is not about state in the loss.
        """
        try:
            yield
        except DataError as error:
            if self._digest_initial_values() == self._initial_values_digest:
                raise
            raise _state_error(_INITIAL, period, _COPIES) from error

    def _observe(self) -> _Observation:
        """Observe one microbatch at the loaded weights."""
        self._program.loss_scale = self._loss_scale
        batch = _batch_digest(self._batches[0]()) if self._objects else ""
        gradients = self._gradients(self._example)
        frozen: Digests = {}
        reachable: State = {}
        module = self._task.trainable.module
        if module is not None:
            from worker.tasks.checks.reachable_state import frozen_tensors  # noqa: PLC0415 -- torch

            frozen = frozen_tensors(module)
        if self._objects:
            from worker.tasks.checks.reachable_state import reachable_state  # noqa: PLC0415 -- torch

            reachable = reachable_state(self._objects)
        return _Observation(gradients, batch, frozen, reachable)

    def _gradients(self, batch: Batch) -> str:
        """Digest a microbatch's gradients, which every rank computes under torchrun."""
        if self._task.manifest.capture is not None:
            return rows_probe(self._program, [batch])
        return probe_digest(self._program, [batch], ranks=getattr(self._program, "ranks", 1))

    def _compare(self, current: _Observation, period: str) -> None:
        from worker.tasks.checks.reachable_state import (  # noqa: PLC0415 -- torch
            find_changed_state,
            find_changed_tensor,
            find_likely_cause,
        )

        baseline = self._baseline
        culprit = find_changed_tensor(baseline.frozen, current.frozen)
        culprit = culprit or find_changed_state(baseline.reachable, current.reachable)
        if culprit is None and current.batch != baseline.batch:
            culprit = "the batch of the same samples"
        if culprit is None and current.gradients != baseline.gradients:
            culprit = find_likely_cause(baseline.reachable, current.reachable)
            culprit = culprit or (_GRADIENT if self._objects else _GRADIENT_OF_BUILT_IN_TASK)
        if culprit is not None:
            raise _state_error(culprit, period)

    def _try_other_weights(self) -> None:
        """Detect, before the first step, state that depends on the weights of an earlier call.

        Another microbatch is computed at other weights, then at the initial weights. State that
        the first call leaves must not affect later gradients of either microbatch. The second
        microbatch is compared with a third call, before which the contents of dicts, lists and
        attributes are restored.
        """
        from worker.tasks.checks.reachable_state import (  # noqa: PLC0415 -- torch
            Containers,
            find_likely_cause,
            reachable_state,
            refuse_changes,
        )

        refuse_changes(self._baseline.reachable, self._observe().reachable)
        batch, contents = self._batches[-1](), Containers(self._objects)
        initial_parameters = self._task.initial_parameters()
        factor, summand = _NUDGE
        try:
            self._program.load([values * factor + summand for values in initial_parameters])
            self._gradients(batch)
        except LossFailed:
            pass  # a loss may fail at weights that do not occur in training
        finally:
            self._program.load(initial_parameters)
        state_at_other_weights = reachable_state(self._objects)
        second_result = self._gradients(batch), reachable_state(self._objects)
        self._compare(self._observe(), _IN_TRIAL)
        contents.restore()
        third_result = self._gradients(batch), reachable_state(self._objects)
        if third_result[0] != second_result[0]:
            culprit = find_likely_cause(third_result[1], second_result[1]) or find_likely_cause(
                state_at_other_weights, second_result[1]
            )
            raise _state_error(culprit or _GRADIENT, _IN_TRIAL)
        contents.restore()


def refuse_unstable_batch(spec: RunSpec, task: Task, build: Callable[[], Batch]) -> None:
    """Check that the user's code builds the same batch from the same samples twice.

    Raises:
        DataError: The batches differ; the error names the differences.
    """
    if not (objects := _user_objects(spec, task)):
        return
    from worker.tasks.checks.reachable_state import find_changed_state, reachable_state  # noqa: PLC0415 -- torch

    first_digest, state_before = _batch_digest(build()), reachable_state(objects)
    second_digest, state_after = _batch_digest(build()), reachable_state(objects)
    if first_digest != second_digest:
        culprit = find_changed_state(state_before, state_after) or "the batch of the same samples"
        raise _state_error(culprit, _BETWEEN_CALLS)


def _state_error(culprit: str, period: str = _IN_TRAINING, remedy: str = _REMEDY) -> DataError:
    return DataError(
        f"expected only the trained weights to change, but {culprit} changed {period}: the result "
        f"would depend on the assignment of microbatches to workers; {remedy}"
    )


def _user_objects(spec: RunSpec, task: Task) -> Mapping[str, object]:
    """Return the objects through which user code is reachable; empty for a built-in task."""
    if isinstance(task, HasUserObjects):
        return task.user_objects()
    return {"task": task} if ":" in spec.task else {}


def _swap(left: list[Array], right: list[Array]) -> None:
    """Exchange the contents of two lists of arrays, with a copy of one array at a time."""
    for left_values, right_values in zip(left, right, strict=True):
        copy = left_values.copy()
        left_values[:] = right_values
        right_values[:] = copy


def _batch_digest(batch: Batch) -> str:
    hasher = blake3(repr(batch.weight).encode())
    arrays: Mapping[str, Any] = batch.arrays
    for name, array in sorted(arrays.items()):
        hasher.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()
