"""Replays a microbatch after training to detect hidden state in a task.

Any worker may compute any microbatch, so gradients must depend on weights, samples and seed alone.
A teacher updated in forward, a memory bank or a generator in the loss makes them depend on what
this process computed before. So the digest of one microbatch's gradients at the initial weights is
recorded, and compared again after some steps. The computed gradients decide; digests of frozen
tensors and a walk over the user's objects name the culprit.

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

from backends.base.interface import Array, Batch, LossRaised, Program
from protocol.base.errors import DataError
from protocol.spec.run_spec import RunSpec
from worker.shell.numerics_profile import probe_digest, rows_probe
from worker.tasks.base.task import HasUserObjects, Task

if TYPE_CHECKING:
    from worker.tasks.checks.reachable_state import Digests, State

_FIRST_STEPS: Final = 2
_NUDGE: Final = np.float32(1 + 2**-6), np.float32(2**-10)
"""Factor and summand that turn initial weights into others, as after some steps."""
_IN_TRAINING: Final = "during training"
_BETWEEN_CALLS: Final = "from one call to the next"
_IN_TRIAL: Final = "in a trial at other weights"
_GRADIENT: Final = "the gradient of the same microbatch at the same weights"
_GRADIENT_OF_OUR_TASK: Final = f"{_GRADIENT} (check this machine with worker doctor)"
_REMEDY: Final = (
    "remove state that one call passes to the next (a moving average, a memory bank, a queue, a "
    "separate generator)"
)
_INITIAL: Final = "the values that initial_parameters() returns"
_COPIES: Final = (
    "return copies that were made when the task was built, not arrays that training uses"
)


@dataclass(frozen=True, slots=True)
class _Observed:
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
        batches: Functions that remake the first microbatch and another one; if the task reads
            files, only one function, which returns `example`.

    Raises:
        DataError: A call, or a call at other weights, changes the task's state; names the culprit.
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
        self._initial = self._initial_digest()
        self._before = self._observe()
        if self._objects:
            with self._initial_values_named(_IN_TRIAL):
                self._try_other_weights()

    def begin_again(self) -> None:
        """Count steps from 0 again, for another run or another state."""
        self._steps = 0

    def is_due(self, step: int) -> bool:
        """Count a step; whether to compare after it. `step` is the run's step number."""
        self._steps += 1
        return (
            self._steps <= _FIRST_STEPS
            or step >= self._last_step
            or any(every and step % every == 0 for every in self._every)
        )

    def check(self, parameters: list[Array], *, in_place: bool) -> None:
        """Compare with the observation before training.

        Args:
            parameters: The replica's, one flat float32 array per block; unchanged on return.
            in_place: Whether the device reads this memory, so the initial values are swapped in.

        Raises:
            DataError: State has changed; names the culprit.
        """
        with self._initial_values_named(_IN_TRAINING):
            self._replay(parameters, in_place=in_place)

    def _replay(self, parameters: list[Array], *, in_place: bool) -> None:
        others = self._task.initial_parameters()
        if in_place:
            _swap(parameters, others)
        self._program.load(parameters if in_place else others)
        try:
            self._compare(self._observe(), _IN_TRAINING)
        except LossRaised as error:
            raise _state_error(
                f"the loss of the first microbatch, which raises: {error}"
            ) from error
        finally:
            if in_place:
                _swap(parameters, others)
            self._program.load(parameters)

    def _initial_digest(self) -> str:
        """Digest of the initial values that a user's task class returns; empty for other tasks,
        which return copies."""
        if not self._objects or isinstance(self._task, HasUserObjects):
            return ""
        hasher = blake3(max_threads=blake3.AUTO)
        for values in self._task.initial_parameters():
            hasher.update(np.ascontiguousarray(values).tobytes())
        return hasher.hexdigest()

    @contextmanager
    def _initial_values_named(self, when: str) -> Iterator[None]:
        """Name the initial values as the culprit of an error within, if they have changed.

        A comparison loads them: if they are the arrays that training changes, it is made at other
        weights, and what it finds is no state of the loss.
        """
        try:
            yield
        except DataError as error:
            if self._initial_digest() == self._initial:
                raise
            raise _state_error(_INITIAL, when, _COPIES) from error

    def _observe(self) -> _Observed:
        """Observe one microbatch at the weights that are loaded."""
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
        return _Observed(gradients, batch, frozen, reachable)

    def _gradients(self, batch: Batch) -> str:
        """Digest of a microbatch's gradients; under torchrun every rank computes it."""
        if self._task.manifest.capture is not None:
            return rows_probe(self._program, [batch])
        return probe_digest(self._program, [batch], ranks=getattr(self._program, "ranks", 1))

    def _compare(self, now: _Observed, when: str) -> None:
        from worker.tasks.checks.reachable_state import (  # noqa: PLC0415 -- torch
            moved_state,
            moved_tensor,
            unlike_state,
        )

        before = self._before
        culprit = moved_tensor(before.frozen, now.frozen)
        culprit = culprit or moved_state(before.reachable, now.reachable)
        if culprit is None and now.batch != before.batch:
            culprit = "the batch of the same samples"
        if culprit is None and now.gradients != before.gradients:
            culprit = unlike_state(before.reachable, now.reachable)
            culprit = culprit or (_GRADIENT if self._objects else _GRADIENT_OF_OUR_TASK)
        if culprit is not None:
            raise _state_error(culprit, when)

    def _try_other_weights(self) -> None:
        """Before the first step, detect state that depends on the weights it was computed with.

        Another microbatch is computed at other weights and then at the initial ones. The state it
        leaves must affect neither the first microbatch's gradients nor its own. The latter are
        compared with those after dicts, lists and attributes were restored to their contents.
        """
        from worker.tasks.checks.reachable_state import (  # noqa: PLC0415 -- torch
            Containers,
            reachable_state,
            refuse_changes,
            unlike_state,
        )

        refuse_changes(self._before.reachable, self._observe().reachable)
        other, contents = self._batches[-1](), Containers(self._objects)
        initial = self._task.initial_parameters()
        factor, summand = _NUDGE
        try:
            self._program.load([values * factor + summand for values in initial])
            self._gradients(other)
        except LossRaised:
            pass  # a loss may fail at weights that no run has
        finally:
            self._program.load(initial)
        nudged = reachable_state(self._objects)
        after = self._gradients(other), reachable_state(self._objects)
        self._compare(self._observe(), _IN_TRIAL)
        contents.restore()
        anew = self._gradients(other), reachable_state(self._objects)
        if anew[0] != after[0]:
            culprit = unlike_state(anew[1], after[1]) or unlike_state(nudged, after[1])
            raise _state_error(culprit or _GRADIENT, _IN_TRIAL)
        contents.restore()


def refuse_unstable_batch(spec: RunSpec, task: Task, make: Callable[[], Batch]) -> None:
    """Check that the user's code makes the same batch from the same samples twice.

    Raises:
        DataError: It does not; names what changed between the calls.
    """
    if not (objects := _user_objects(spec, task)):
        return
    from worker.tasks.checks.reachable_state import moved_state, reachable_state  # noqa: PLC0415 -- torch

    first, before = _batch_digest(make()), reachable_state(objects)
    second, after = _batch_digest(make()), reachable_state(objects)
    if first != second:
        culprit = moved_state(before, after) or "the batch of the same samples"
        raise _state_error(culprit, _BETWEEN_CALLS)


def _state_error(what: str, when: str = _IN_TRAINING, remedy: str = _REMEDY) -> DataError:
    return DataError(
        f"expected only the trained weights to change, but {what} changed {when}: the result would "
        f"depend on which worker computes what; {remedy}"
    )


def _user_objects(spec: RunSpec, task: Task) -> Mapping[str, object]:
    """Objects from which the user's code can be reached; empty for a built-in task."""
    if isinstance(task, HasUserObjects):
        return task.user_objects()
    return {"task": task} if ":" in spec.task else {}


def _swap(one: list[Array], other: list[Array]) -> None:
    """Exchange the contents of two lists of arrays, with a copy of one array at a time."""
    for first, second in zip(one, other, strict=True):
        copy = first.copy()
        first[:] = second
        second[:] = copy


def _batch_digest(batch: Batch) -> str:
    hasher = blake3(repr(batch.weight).encode())
    arrays: Mapping[str, Any] = batch.arrays
    for name, array in sorted(arrays.items()):
        hasher.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()
