"""Whether a task still computes what it computed before training: replays of a microbatch.

Any worker may compute any microbatch, so its gradients must follow from weights, samples and seed
alone. A teacher that forward moves, a memory bank, a generator in the loss: each makes them depend
on what this process computed before. So the gradients of one microbatch at the initial weights are
kept as a digest, and compared again after steps. What a device computes decides; digests of frozen
tensors and a walk over the user's objects name the culprit.

One comparison costs a microbatch, two loads of the trained weights, and one reading of what is
frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from blake3 import blake3

from backends.base.interface import Array, Batch, LossRaised, Program
from protocol.base.errors import DataError
from protocol.spec.run_spec import RunSpec
from worker.shell.signature import probe_digest, rows_probe
from worker.tasks.base import HasUserObjects, Task

if TYPE_CHECKING:
    from worker.tasks.frozen_tensors import Digests
    from worker.tasks.reachable_state import State

_FIRST_STEPS: Final = 2
_NUDGE: Final = np.float32(1 + 2**-6), np.float32(2**-10)
"""What initial weights are multiplied by, and what is added: weights as after some steps."""
_TRAINED: Final = "during training"
_CALLED: Final = "from one call to the next"
_TRIED: Final = "in a trial at other weights"
_GRADIENT: Final = "the gradient of the same microbatch at the same weights"
_GRADIENT_HERE: Final = f"{_GRADIENT} (let 'worker doctor' look at this machine)"
_REMEDY: Final = (
    "leave out what a call leaves to the next (a moving average, a memory bank, a queue, a "
    "generator of its own)"
)


@dataclass(frozen=True, slots=True)
class _Observed:
    """What a task gives and has, just after one microbatch at the initial weights."""

    gradients: str
    batch: str
    frozen: Digests
    reachable: State


class ReplayCheck:
    """Observes a task on its device when it is built, and after steps.

    Args:
        spec: The run's.
        task: Built, and compiled to `program`, which has the initial weights.
        program: Of the device.
        example: A microbatch.
        batches: Make the first microbatch and another one anew, where the user's code makes them.

    Raises:
        DataError: Something moves in calls at other weights, or from call to call; it is named.
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
        self._last_step = spec.steps_with(task.manifest.train_samples)
        self._every = [spec.checkpoint.every, spec.evaluate_every if spec.stop else 0]
        self._taken = 0
        self._before = self._observe()
        if self._objects:
            self._try_other_weights()

    def begin_again(self) -> None:
        """Another run of the same task, or the same one from another state."""
        self._taken = 0

    def is_due(self, step: int) -> bool:
        """Count a step that was taken: whether to compare after it, `step` being the run's."""
        self._taken += 1
        return (
            self._taken <= _FIRST_STEPS
            or step >= self._last_step
            or any(every and step % every == 0 for every in self._every)
        )

    def check(self, parameters: list[Array]) -> None:
        """Compare with what was observed before training.

        Args:
            parameters: The replica's, which the device computes with; the same afterwards.

        Raises:
            DataError: Something moved; it is named.
        """
        others = self._task.initial_parameters()
        _swap(parameters, others)  # in place: the device may read this very memory
        self._program.load(parameters)
        try:
            self._compare(self._observe(), _TRAINED)
        except LossRaised as error:
            raise _moved(f"the loss of the first microbatch, which raises: {error}") from error
        finally:
            _swap(parameters, others)
            self._program.load(parameters)

    def _observe(self) -> _Observed:
        """At the weights that are loaded."""
        self._program.loss_scale = self._loss_scale
        batch = _batch_digest(self._batches[0]()) if self._objects else ""
        gradients = self._gradients(self._example)
        frozen: Digests = {}
        reachable: State = {}
        module = self._task.trainable.module
        if module is not None:
            from worker.tasks.frozen_tensors import frozen_tensors  # noqa: PLC0415 -- torch

            frozen = frozen_tensors(module)
        if self._objects:
            from worker.tasks.reachable_state import reachable_state  # noqa: PLC0415 -- torch

            reachable = reachable_state(self._objects)
        return _Observed(gradients, batch, frozen, reachable)

    def _gradients(self, batch: Batch) -> str:
        """On every rank, where there are several."""
        if self._task.manifest.capture is not None:
            return rows_probe(self._program, [batch])
        return probe_digest(self._program, [batch], ranks=getattr(self._program, "ranks", 1))

    def _compare(self, now: _Observed, when: str) -> None:
        from worker.tasks.frozen_tensors import moved_tensor  # noqa: PLC0415 -- torch
        from worker.tasks.reachable_state import (  # noqa: PLC0415 -- torch
            moved_state,
            unlike_state,
        )

        before = self._before
        culprit = moved_tensor(before.frozen, now.frozen)
        culprit = culprit or moved_state(before.reachable, now.reachable)
        if culprit is None and now.batch != before.batch:
            culprit = "the batch of the same samples"
        if culprit is None and now.gradients != before.gradients:
            culprit = unlike_state(before.reachable, now.reachable)
            culprit = culprit or (_GRADIENT if self._objects else _GRADIENT_HERE)
        if culprit is not None:
            raise _moved(culprit, when)

    def _try_other_weights(self) -> None:
        """Before the first step: what is filled or moved by weights that are not the initial ones.

        Another microbatch is computed at other weights and then at the initial ones. What it left
        behind must show neither in the first microbatch's gradients nor in its own, compared with
        those it has when dicts, lists and attributes are restored to what they held before.
        """
        from worker.tasks.reachable_state import (  # noqa: PLC0415 -- torch
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
            pass  # it does not hold with weights that no run has
        finally:
            self._program.load(initial)
        nudged = reachable_state(self._objects)
        after = self._gradients(other), reachable_state(self._objects)
        self._compare(self._observe(), _TRIED)
        contents.restore()
        anew = self._gradients(other), reachable_state(self._objects)
        if anew[0] != after[0]:
            culprit = unlike_state(anew[1], after[1]) or unlike_state(nudged, after[1])
            raise _moved(culprit or _GRADIENT, _TRIED)
        contents.restore()


def refuse_unsteady_batch(spec: RunSpec, task: Task, make: Callable[[], Batch]) -> None:
    """See that the user's code makes the same batch of the same samples.

    Raises:
        DataError: It does not; what changed between the calls is named.
    """
    if not (objects := _user_objects(spec, task)):
        return
    from worker.tasks.reachable_state import moved_state, reachable_state  # noqa: PLC0415 -- torch

    first, before = _batch_digest(make()), reachable_state(objects)
    second, after = _batch_digest(make()), reachable_state(objects)
    if first != second:
        culprit = moved_state(before, after) or "the batch of the same samples"
        raise _moved(culprit, _CALLED)


def _moved(what: str, when: str = _TRAINED) -> DataError:
    return DataError(
        f"expected only the trained weights to change, but {what} changed {when}: which worker "
        f"computes what would show in the result; {_REMEDY}"
    )


def _user_objects(spec: RunSpec, task: Task) -> Mapping[str, object]:
    """What the user's code is reached from; empty for a task of our own."""
    if isinstance(task, HasUserObjects):
        return task.user_objects()
    return {"task": task} if ":" in spec.task else {}


def _swap(one: list[Array], other: list[Array]) -> None:
    """Exchange their contents; memory for one block more."""
    for mine, theirs in zip(one, other, strict=True):
        held = mine.copy()
        mine[:] = theirs
        theirs[:] = held


def _batch_digest(batch: Batch) -> str:
    hasher = blake3(repr(batch.weight).encode())
    arrays: Mapping[str, Any] = batch.arrays
    for name, array in sorted(arrays.items()):
        hasher.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()
