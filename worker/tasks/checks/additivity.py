"""Check on real samples that a user's loss is a sum over samples, before a run and during it.

The check is for losses that users wrote, in a script or in a package. A float64 copy of the model
computes the loss and gradients of several samples together and of each alone, in training mode.
Its weights are perturbed first: a tensor that is initialized to zero, like LoRA's B, hides a
penalty on it. After some steps the check is repeated with the current weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from backends.base.device_errors import is_machine_specific
from backends.base.interface import Array, Batch
from backends.checks.additivity import Arrays, Discrepancy, Evaluation, LossTrial, Parts
from backends.checks.outside_table import TableLookups, find_failing_index
from backends.checks.steady_draws import LEVELS, TooManyDrawsError
from backends.checks.trainable_checks import (
    WHOLE_MICROBATCH,
    has_accumulated_hook,
    hooks_need_backward,
)
from protocol.base.errors import DataError, SamestepError, describe_raised
from protocol.exact.digest import digest_arrays
from worker.tasks.base.task import DrawsBatches, ReadsFiles, Task

_COPY_ELEMENTS: Final = 1 << 27
"""Largest model that is copied in float64: 1 GiB."""
_RECHECKED_ELEMENTS: Final = 1 << 26
"""Largest model whose copy stays in memory until the second check."""
_SMALL_ELEMENTS: Final = 1 << 20
"""Largest model that is checked with eight samples and all levels of draws; larger ones use three
samples and two levels."""
_MEDIUM_ELEMENTS: Final = 1 << 24
"""Largest model that is checked with three samples; larger ones use two."""
_RECHECK_SAMPLES: Final = 3
"""Number of samples for the checks with other draws and in evaluation mode."""
_CANDIDATES: Final = 64
"""Number of samples to choose from."""
_CANDIDATE_BYTES: Final = 1 << 26
"""Limit on the size of the candidates' arrays."""
_GOLDEN: Final = (math.sqrt(5) - 1) / 2
"""Multiples of this number, modulo 1, are evenly spread and match no period of the data."""
_PERTURBATION: Final = 0.02
"""Perturbation of weights, relative to the tensor's root mean square; 0.01 for zeros."""
_CPU: Final = torch.device("cpu")
_EQUAL_SPACINGS: Final = 256
"""Two values count as equal within this many float spacings."""


class NotASum(DataError):
    """A loss or its gradients do not add up over samples.

    Attributes:
        is_mean: Whether the loss is a mean over samples, or over their weights.
    """

    def __init__(self, text: str, *, is_mean: bool = False) -> None:
        super().__init__(text)
        self.is_mean = is_mean


@runtime_checkable
class HasSumTrial(Protocol):
    """A task that checks its loss itself."""

    @property
    def sum_trial(self) -> SumTrial | None:
        """Return the check, so that it can be repeated; None for a loss of a whole microbatch."""


def sum_trial_of(task: Task) -> SumTrial | None:
    """Check a task's loss; return the check, or None for a task that cannot be checked.

    Raises:
        DataError: The loss is not a sum over samples, or raises.
    """
    if isinstance(task, HasSumTrial):
        return task.sum_trial
    trainable = task.trainable
    if trainable.module is None or trainable.loss is None or trainable.capture_rows is not None:
        return None
    if isinstance(task, ReadsFiles):  # its samples may not have been fetched yet
        return None
    trial = SumTrial(task)
    trial.check()
    return trial


@dataclass(frozen=True, slots=True)
class _Mode:
    """Settings of a trial: mode of the module, level of random draws, with or without gradients."""

    training: bool
    level: float
    gradients: bool


class _BackwardCalledError(TypeError):
    """The user's loss calls `backward()`."""


class _RaisedError(Exception):
    """The loss or its backward raised, for these samples."""

    def __init__(self, error: Exception, batch: Arrays, numbers: Sequence[int]) -> None:
        self.error, self.batch, self.numbers = error, batch, numbers


@contextmanager
def _raised_for(trial: LossTrial, numbers: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except (SamestepError, TooManyDrawsError, MemoryError):
        raise
    except Exception as error:
        raise _RaisedError(error, trial.last_batch, numbers) from error


class SumTrial:
    """Checks a task's loss on a copy of its model, made when the task is built.

    Args:
        task: A task with a torch module and a loss.
        device: The device that computes the check; `check` expects the module on it.
    """

    def __init__(self, task: Task, device: torch.device = _CPU) -> None:
        assert task.trainable.module is not None
        self._device = device
        assert task.trainable.loss is not None
        self._task = task
        self._loss: Callable[[Any, Mapping[str, Any]], Any] = task.trainable.loss
        self._original: nn.Module = task.trainable.module
        self._elements = sum(parameter.numel() for parameter in self._original.parameters())
        is_small, is_medium = (
            self._elements <= limit for limit in (_SMALL_ELEMENTS, _MEDIUM_ELEMENTS)
        )
        self._sample_count = 8 if is_small else 3 if is_medium else 2
        self._levels = LEVELS if is_small else LEVELS[:2]
        self._names = [tensor.name for block in task.manifest.blocks for tensor in block.tensors]
        self._module, self._is_float64 = self._copy_module(is_float64=True)

    def check(self) -> None:
        """Check the loss before the run.

        Raises:
            NotASum: The loss is not a sum over samples.
            DataError: The loss is not finite, or raises.
        """
        if self._task.manifest.train_samples > 1:
            self._run_in_float64_if_possible(lambda: self._check_samples(0, perturb=True))
            if self._module is not self._original and (
                any(map(hooks_need_backward, self._trained_originals().values()))
                or self._reaches_the_original()
            ):
                copied_module, self._module = (self._module, self._is_float64), self._original
                self._is_float64 = False
                self._run_in_float64_if_possible(lambda: self._check_samples(0, perturb=True))
                self._module, self._is_float64 = copied_module
        if (
            self._module is None
            or self._elements > _RECHECKED_ELEMENTS
            or self._module is self._original
        ):
            self.close()
        else:
            self._module.cpu()

    def check_after_steps(self, step: int, parameters: Sequence[Array]) -> None:
        """Check the loss again, on other samples and with the current weights.

        Args:
            step: Number of steps taken.
            parameters: The current weights, a flat float32 array per block.

        Raises:
            NotASum: The loss is not a sum over samples.
        """
        if self._task.manifest.train_samples > 1 and self._module is not None:
            self._module.to(self._device)
            self._load(parameters)
            try:
                self._check_samples(_CANDIDATES, perturb=False)
            except _RaisedError:
                pass  # the run itself will raise the error
            except NotASum as error:
                raise NotASum(f"after step {step}: {error}", is_mean=error.is_mean) from None
        self.close()

    def close(self) -> None:
        """Release the copy."""
        self._module = None

    # The check.

    def _run_in_float64_if_possible(self, attempt: Callable[[], None]) -> None:
        """Run `attempt` in float64 if the model supports it, else in the model's dtypes."""
        try:
            attempt()
        except _RaisedError as raised:
            if not self._is_float64:
                raise self._describe_failure(raised) from raised.error
            self._module, self._is_float64 = self._copy_module(is_float64=False)
            self._run_in_float64_if_possible(attempt)

    def _check_samples(self, offset: int, *, perturb: bool) -> None:
        assert self._module is not None
        samples = _Samples(self._task, offset, self._sample_count, self._device)
        if not samples.numbers:
            return
        # The second check delays the run, so it is brief for a large model.
        is_brief = not perturb and self._elements > _SMALL_ELEMENTS
        with (
            preserve_modes(self._module),
            self._perturbed(should_perturb=perturb),
            suppress(TooManyDrawsError),
        ):
            self._check_at_current_weights(samples, is_brief=is_brief)

    def _check_at_current_weights(self, samples: _Samples, *, is_brief: bool) -> None:
        mode = _Mode(training=True, level=LEVELS[0], gradients=self._has_gradients())
        parts = self._choose_samples(samples, mode)
        has_draws = self._check_sums(samples, mode, parts)
        if is_brief:
            return
        if has_draws:
            for level in self._levels[1:]:
                other_mode = _Mode(mode.training, level, mode.gradients)
                self._check_sums(samples, other_mode, None)
        with suppress(_RaisedError):  # in evaluation mode some models take other arguments
            self._check_sums(samples, _Mode(False, LEVELS[0], False), None)

    def _choose_samples(self, samples: _Samples, mode: _Mode) -> Parts:
        """Choose samples, if possible with gradients; return their single results."""
        trial, without_gradients, parts = self._trial(mode), [], Parts()
        last_evaluation: Evaluation | None = None
        first_evaluation: Evaluation | None = None
        for number in samples.candidates():
            last_evaluation = self._evaluate_single(trial, samples, number)
            if not last_evaluation.is_finite:
                continue
            if not last_evaluation.has_gradients and mode.gradients:
                without_gradients.append((number, last_evaluation))
                continue
            first_evaluation = first_evaluation or last_evaluation
            samples.choose(number)
            parts.add(last_evaluation)
            if samples.has_enough:
                break
        for number, evaluation in without_gradients:
            if samples.has_enough:
                break
            first_evaluation = first_evaluation or evaluation
            samples.choose(number)
            parts.add(evaluation)
        if first_evaluation is None:
            assert last_evaluation is not None
            raise DataError(
                f"expected a finite loss of the first samples, got {last_evaluation.loss:.9g}"
            )
        # One sample twice reveals a loss that treats repetitions differently.
        parts.add(first_evaluation)
        return parts

    def _check_sums(self, samples: _Samples, mode: _Mode, parts: Parts | None) -> bool:
        """Compare a batch of samples with each of them alone; return whether the loss draws.

        Raises:
            NotASum: The batch's loss or a gradient is not the sum of the single samples'.
        """
        trial, numbers = self._trial(mode), samples.chosen_numbers
        if parts is None:
            numbers = numbers[:_RECHECK_SAMPLES]
            single_evaluations = [
                self._evaluate_single(trial, samples, number) for number in numbers
            ]
            parts = Parts.of(*single_evaluations, single_evaluations[0])
        numbers = [*numbers, numbers[0]]
        with _raised_for(trial, numbers):
            discrepancy = trial.find_discrepancy(samples.batch(numbers), parts)
        if discrepancy is not None:
            self._refuse(discrepancy, samples, mode)
        return parts.has_draws

    def _refuse(self, discrepancy: Discrepancy, samples: _Samples, mode: _Mode) -> None:
        diagnosis = _Diagnosis.of(self._trial(mode), samples)
        mode_text = ""
        if mode.training and self._adds_up_in_evaluation(samples, mode):
            mode_text = " in training mode"
        raise NotASum(_describe(discrepancy, diagnosis, mode_text), is_mean=diagnosis.is_mean)

    def _adds_up_in_evaluation(self, samples: _Samples, mode: _Mode) -> bool:
        try:
            self._check_sums(samples, _Mode(False, mode.level, mode.gradients), None)
        except (NotASum, _RaisedError, TooManyDrawsError):
            return False
        return True

    def _evaluate_single(self, trial: LossTrial, samples: _Samples, number: int) -> Evaluation:
        with _raised_for(trial, [number]):
            return trial.evaluate(samples.batch([number]))

    def _describe_failure(self, raised: _RaisedError) -> Exception:
        if is_machine_specific(raised.error):
            return raised.error
        is_single = len(raised.numbers) == 1
        failing_samples = (
            f"sample {raised.numbers[0]} alone" if is_single else f"{len(raised.numbers)} samples"
        )
        if outside := find_failing_index(raised.error, raised.batch):
            return DataError(f"the loss of {failing_samples}: {outside.text}")
        return DataError(
            f"the loss of {failing_samples} raised "
            f"{describe_raised(raised.error)}{self._hint(raised)}"
        )

    def _hint(self, raised: _RaisedError) -> str:
        """Return a remedy for an error with a known cause, else an empty text."""
        if isinstance(raised.error, _BackwardCalledError):
            return ""  # the error names the remedy
        text = str(raised.error)
        if "use_reentrant" in text:
            return ": write use_reentrant=False where checkpoint is called"
        if "hooks should return None" in text:
            parameters_by_name = self._trained_originals()
            hooked = [
                name
                for name, parameter in parameters_by_name.items()
                if has_accumulated_hook(parameter)
            ]
            return f": let the hook of {', '.join(map(repr, hooked))} return nothing"
        is_single = len(raised.numbers) == 1
        return (
            ": is there a layer across the batch?"
            if is_single and self._works_twice(raised)
            else ""
        )

    def _works_twice(self, raised: _RaisedError) -> bool:
        """Return whether a batch with the sample twice works, though the sample alone raises."""
        doubled_batch = {
            name: torch.cat([array, array]) if array.dim() else array
            for name, array in raised.batch.items()
        }
        try:
            mode = _Mode(training=True, level=LEVELS[0], gradients=self._has_gradients())
            self._trial(mode).evaluate(doubled_batch)
        except Exception:  # noqa: BLE001 -- only the hint depends on it
            return False
        return True

    def _reaches_the_original(self) -> bool:
        """Return whether the loss reads weights of the original model through a closure."""
        assert self._module is not None
        trial = LossTrial(self._module, self._compute_loss, self._trained_originals())
        samples = _Samples(self._task, 0, self._sample_count, self._device)
        try:
            return bool(trial.evaluate(samples.first_batch()).gradients)
        except Exception:  # noqa: BLE001 -- the check itself has passed
            return False

    # The copy.

    def _trained_originals(self) -> dict[str, nn.Parameter]:
        parameters_by_name = dict(self._original.named_parameters())
        return {name: parameters_by_name[name] for name in self._names}

    def _copy_module(self, *, is_float64: bool) -> tuple[nn.Module | None, bool]:
        """Copy the module; return it and whether it is in float64."""
        if self._elements > _COPY_ELEMENTS:
            return self._original, False
        try:
            module_copy = copy.deepcopy(self._original)
        except Exception:  # noqa: BLE001 -- a model that cannot be copied can be trained
            return self._original, False
        original_parameters = dict(self._original.named_parameters())
        for name, parameter in module_copy.named_parameters():  # deepcopy does not copy hooks
            hooks: Any = original_parameters[name]._backward_hooks  # noqa: SLF001 -- None for most
            for hook in (hooks or {}).values():
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        return (module_copy.double() if is_float64 else module_copy), is_float64

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        assert self._module is not None
        parameters_by_name = dict(self._module.named_parameters())
        return {
            name: parameters_by_name[name] for name in self._names if name in parameters_by_name
        }

    def _has_gradients(self) -> bool:
        return (
            sum(parameter.numel() for parameter in self._trained_parameters().values())
            <= _COPY_ELEMENTS
        )

    def _trial(self, mode: _Mode) -> LossTrial:
        assert self._module is not None
        self._module.train(mode.training)
        return LossTrial(
            self._module,
            self._compute_loss,
            self._trained_parameters() if mode.gradients else {},
            mode.level,
            accumulates=self._module is self._original,
        )

    def _compute_loss(self, module: Any, arrays: Arrays) -> torch.Tensor:
        if self._is_float64:
            arrays = {n: a.double() if a.dtype == torch.float32 else a for n, a in arrays.items()}
        parameters = self._trained_parameters()
        gradients_before = {name: value.grad for name, value in parameters.items()}
        with nullcontext() if self._device == _CPU else TableLookups(arrays):
            loss = self._loss(module, arrays)
        for name, value in parameters.items():
            if value.grad is not gradients_before[name]:
                raise _BackwardCalledError(
                    "expected a loss that is returned, got a call of backward() in it, at the "
                    f"gradient of {name!r}: return the sum of all losses, and samestep calls "
                    "backward()"
                )
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise TypeError(f"expected a tensor that is one sum as loss, got {_shape_of(loss)}")
        return loss

    @torch.no_grad()
    def _load(self, parameters: Sequence[Array]) -> None:
        trained_parameters = self._trained_parameters()
        for block, values in zip(self._task.manifest.blocks, parameters, strict=True):
            for tensor, part in block.slices():
                trained_parameters[tensor.name].copy_(
                    torch.from_numpy(values[part].reshape(tensor.shape).copy())
                )

    @contextmanager
    def _perturbed(self, *, should_perturb: bool) -> Iterator[None]:
        """Perturb the trained weights within the context, and restore them afterwards."""
        if not should_perturb or not self._has_gradients():
            yield
            return
        trained_parameters, generator = self._trained_parameters(), torch.Generator().manual_seed(0)
        saved_values = {
            name: parameter.detach().clone() for name, parameter in trained_parameters.items()
        }
        with torch.no_grad():
            for parameter in trained_parameters.values():
                size = float(parameter.square().mean().sqrt()) if parameter.numel() else 0.0
                scale = _PERTURBATION * size or 0.01
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(noise.to(parameter.device), alpha=scale)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in trained_parameters.items():
                    parameter.copy_(saved_values[name])


class _Samples:
    """Samples spread over the data and over the labels, and their batches.

    Args:
        task: The task that makes batches.
        offset: Number of candidates to skip.
        count: Number of samples to choose.
        device: The device of the batches.
    """

    def __init__(self, task: Task, offset: int, count: int, device: torch.device) -> None:
        self._task = task
        self._device = device
        self.chosen_numbers: list[int] = []
        self._sample_count = count
        self._candidate_count = _CANDIDATES if count > 3 else 12
        samples = task.manifest.train_samples
        self.numbers = list(dict.fromkeys(
            int((index * _GOLDEN) % 1 * samples) for index in range(offset, offset + _CANDIDATES)
        ))  # fmt: skip
        self._rows: dict[int, int] = {}
        self._joint_arrays: Arrays = {}
        if isinstance(task, DrawsBatches) and _draws(task, self.numbers[:2]):
            self._draw_jointly(task)

    @property
    def has_enough(self) -> bool:
        """Return whether enough samples are chosen."""
        return len(self.chosen_numbers) >= self._sample_count

    def choose(self, number: int) -> None:
        """Choose this sample."""
        self.chosen_numbers.append(number)

    def batch(self, numbers: Sequence[int]) -> Arrays:
        """Make a batch of these samples."""
        return {name: array.to(self._device) for name, array in self._on_host(numbers).items()}

    def _on_host(self, numbers: Sequence[int]) -> Arrays:
        if self._joint_arrays:
            rows = [self._rows[number] for number in numbers]
            count = float(len(self._rows))
            return {
                # A scalar is a setting, unless it equals the number of samples.
                name: array[rows]
                if array.dim()
                else torch.where(array == count, len(rows), array).to(array.dtype)
                for name, array in self._joint_arrays.items()
            }
        batch = self._task.batch(numbers)
        return {name: torch.tensor(array) for name, array in batch.arrays.items()}

    def first_batch(self) -> Arrays:
        """Make a batch of one sample."""
        return self.batch(self.numbers[:1])

    def candidates(self) -> list[int]:
        """Return the candidates, starting with one for each label."""
        numbers_by_label: dict[object, int] = {}
        other_numbers, size = [], 0
        for number in self.numbers:
            arrays = self._on_host([number])
            size += sum(array.nbytes for array in arrays.values())
            if numbers_by_label.setdefault(_label_of(arrays), number) != number:
                other_numbers.append(number)
            if size > _CANDIDATE_BYTES:
                break
        return [*numbers_by_label.values(), *other_numbers][: self._candidate_count]

    def _draw_jointly(self, task: DrawsBatches) -> None:
        """Draw one large batch, so that a sample's random draws are the same in every batch."""
        numbers = self.numbers[: self._candidate_count]
        arrays = task.drawn_batch(numbers, 1).arrays
        by_sample = all(len(array) == len(numbers) for array in arrays.values() if array.ndim)
        self.numbers = numbers if by_sample and len(numbers) > 1 else []
        self._joint_arrays = {name: torch.tensor(array) for name, array in arrays.items()}
        self._rows = {number: row for row, number in enumerate(numbers)}


def _draws(task: DrawsBatches, numbers: Sequence[int]) -> bool:
    first_digest, second_digest = (
        digest_arrays(_batch_arrays(task.drawn_batch(numbers, seed))) for seed in (1, 2)
    )
    return first_digest != second_digest


def _batch_arrays(batch: Batch) -> Mapping[str, np.ndarray[Any, Any]]:
    return batch.arrays


def _label_of(arrays: Arrays) -> object:
    """Return a sample's label: all of its whole numbers that are single elements."""
    return tuple(
        (name, float(array))
        for name, array in sorted(arrays.items())
        if array.numel() == 1 and not array.is_complex() and float(array).is_integer()
    )


@dataclass(frozen=True, slots=True)
class _Diagnosis:
    """The likely reason why a loss is not a sum, from two samples.

    Attributes:
        is_mean: Whether a sample twice has the same loss as once.
        constant_term: A term that is added once per batch, whatever its samples; None if there is
            none.
    """

    is_mean: bool
    constant_term: float | None

    @staticmethod
    def of(trial: LossTrial, samples: _Samples) -> _Diagnosis:
        """Classify a loss by the first two chosen samples."""
        first_number, last_number = samples.chosen_numbers[0], samples.chosen_numbers[-1]
        try:
            evaluations = [
                trial.evaluate(samples.batch(numbers))
                for numbers in (
                    [first_number],
                    [last_number],
                    [first_number, last_number],
                    [first_number, first_number],
                )
            ]
        except Exception:  # noqa: BLE001 -- only the message depends on it
            return _Diagnosis(is_mean=False, constant_term=None)
        first_loss, last_loss, pair_loss, doubled_loss = (
            evaluation.loss for evaluation in evaluations
        )
        epsilon = max(evaluation.epsilon for evaluation in evaluations)
        tolerance = _EQUAL_SPACINGS * epsilon * max(map(abs, (first_loss, last_loss, pair_loss)))
        constant = 2 * first_loss - doubled_loss
        is_constant_in_pair = abs(first_loss + last_loss - pair_loss - constant) <= tolerance
        has_constant = (
            first_number != last_number and abs(constant) > tolerance and is_constant_in_pair
        )
        is_mean = abs(doubled_loss - first_loss) <= tolerance < abs(first_loss)
        return _Diagnosis(is_mean and not has_constant, constant if has_constant else None)


def _describe(discrepancy: Discrepancy, diagnosis: _Diagnosis, mode_text: str) -> str:
    sums_text = (
        f"{discrepancy.batch_loss:.9g} for a batch of {len(discrepancy.part_losses) - 1} samples "
        f"and the first one again, and {sum(discrepancy.part_losses):.9g} as the sum over these "
        f"samples alone{mode_text}"
    )
    if diagnosis.is_mean:
        return (
            f"expected a loss summed over samples, got a mean ({sums_text}): write "
            f'reduction="sum" or .sum(), as samestep divides by the number of samples, or by '
            f"weight=; or {WHOLE_MICROBATCH}"
        )
    if diagnosis.constant_term is not None:
        return (
            f"expected a loss that adds up over samples, got {sums_text}: a term of "
            f"{diagnosis.constant_term:.3g} counts once for each microbatch, whatever samples it "
            "has; a penalty on weights belongs in the optimizer's weight_decay, any other term "
            "must be multiplied by the number of samples in the batch"
        )
    if discrepancy.tensor is not None:
        return (
            f"expected gradients that add up over samples, got a gradient of "
            f"{discrepancy.tensor!r} for a batch that differs by {discrepancy.difference:.3g} from "
            f"the sum over its samples{mode_text}, though the loss adds up: the result would "
            "depend on the number of samples in a microbatch; remove code that works across the "
            "batch in backward (scale_grad_by_freq, a Function or hook that normalizes) and state "
            "that one call leaves to the next (a moving average, a memory bank); a penalty on "
            "weights belongs in the optimizer's weight_decay"
        )
    return (
        f"expected a loss that adds up over samples, got {sums_text}: a loss across samples "
        "(contrastive, balancing, a mean weighted by class) or one with layers across the batch "
        f"cannot be divided among microbatches: write it per sample, or {WHOLE_MICROBATCH}; a "
        "penalty on weights belongs in the optimizer's weight_decay; remove state that one call "
        "leaves to the next (a moving average, a memory bank)"
    )


def _shape_of(loss: object) -> str:
    if isinstance(loss, torch.Tensor):
        return f"shape {tuple(loss.shape)}"
    return type(loss).__name__


@contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Move a module from the CPU to a device within the context."""
    if device == _CPU:
        yield
        return
    module.to(device)
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # the device may have failed
            module.cpu()
        raise
    module.cpu()


@contextmanager
def preserve_modes(module: nn.Module) -> Iterator[None]:
    """Restore the training mode of each submodule at the end of the context."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training
