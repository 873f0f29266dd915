"""Check on real samples that a user's loss is a sum over samples, before a run and during it.

For losses that users wrote, in a script or in a package. A float64 copy of the model computes the
loss and gradients of several samples together and of each alone, in training mode. Its weights are
perturbed first: a tensor that is initialized to zero, like LoRA's B, would hide a penalty on it.
After some steps the check is repeated with the current weights.
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

from backends.base.additivity import Arrays, Discrepancy, Evaluation, LossTrial, Parts
from backends.base.device_errors import concerns_device
from backends.base.interface import Array, Batch
from backends.base.outside_table import TableLookups, index_outside
from backends.base.steady_draws import LEVELS, TooManyDrawsError
from backends.base.trainable_checks import (
    WHOLE_MICROBATCH,
    has_accumulated_hook,
    hooks_need_backward,
)
from protocol.base.errors import DataError, SamestepError, describe_raised
from protocol.exact.digest import digest_arrays
from worker.tasks.base.task import DrawsBatches, ReadsFiles, Task

_COPY_ELEMENTS: Final = 1 << 27
"""Largest model that is copied in float64: 1 GiB."""
_KEPT_ELEMENTS: Final = 1 << 26
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
"""Multiples of it, modulo 1, are evenly spread and match no period of the data."""
_PERTURBATION: Final = 0.02
"""Perturbation of weights, as a share of the tensor's root mean square; 0.01 for zeros."""
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
    """Check a task's loss; return the check, or None if there is nothing to check.

    Raises:
        DataError: The loss is not a sum over samples, or raises.
    """
    if isinstance(task, HasSumTrial):
        return task.sum_trial
    trainable = task.trainable
    if trainable.module is None or trainable.loss is None or trainable.rows is not None:
        return None
    if isinstance(task, ReadsFiles):  # its samples may not have been fetched yet
        return None
    trial = SumTrial(task)
    trial.check()
    return trial


@dataclass(frozen=True, slots=True)
class _Mode:
    """How to compute a loss: mode of the module, level of draws, with or without gradients."""

    training: bool
    level: float
    gradients: bool


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
        raise _RaisedError(error, trial.given, numbers) from error


class SumTrial:
    """Checks a task's loss on a copy of its model, made when the task is built.

    Args:
        task: A task with a torch module and a loss.
        device: The device that computes the check, and of the module until `check` returns.
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
            self._elements <= most for most in (_SMALL_ELEMENTS, _MEDIUM_ELEMENTS)
        )
        self._sample_count = 8 if is_small else 3 if is_medium else 2
        self._levels = LEVELS if is_small else LEVELS[:2]
        self._names = [t.name for block in task.manifest.blocks for t in block.tensors]
        self._module, self._is_wide = self._copy(wide=True)

    def check(self) -> None:
        """Check the loss before the run.

        Raises:
            NotASum: The loss is not a sum over samples.
            DataError: The loss is not finite, or raises.
        """
        if self._task.manifest.train_samples > 1:
            self._in_either_width(lambda: self._try(0, perturb=True))
            if self._module is not self._original and (
                any(map(hooks_need_backward, self._trained_originals().values()))
                or self._reaches_the_original()
            ):
                copied, self._module = (self._module, self._is_wide), self._original
                self._is_wide = False
                self._in_either_width(lambda: self._try(0, perturb=True))
                self._module, self._is_wide = copied
        if (
            self._module is None
            or self._elements > _KEPT_ELEMENTS
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
                self._try(_CANDIDATES, perturb=False)
            except _RaisedError:
                pass  # the run itself will raise it
            except NotASum as error:
                raise NotASum(f"after step {step}: {error}", is_mean=error.is_mean) from None
        self.close()

    def close(self) -> None:
        """Release the copy."""
        self._module = None

    # The check.

    def _in_either_width(self, attempt: Callable[[], None]) -> None:
        """Run the attempt in float64 if the model supports it, else in the model's dtypes."""
        try:
            attempt()
        except _RaisedError as raised:
            if not self._is_wide:
                raise self._describe_failure(raised) from raised.error
            self._module, self._is_wide = self._copy(wide=False)
            self._in_either_width(attempt)

    def _try(self, offset: int, *, perturb: bool) -> None:
        assert self._module is not None
        samples = _Samples(self._task, offset, self._sample_count, self._device)
        if not samples.numbers:
            return
        is_brief = not perturb and self._elements > _SMALL_ELEMENTS  # the run waits for it
        with (
            preserve_modes(self._module),
            self._perturbed(should_perturb=perturb),
            suppress(TooManyDrawsError),
        ):
            self._try_at_these_weights(samples, is_brief=is_brief)

    def _try_at_these_weights(self, samples: _Samples, *, is_brief: bool) -> None:
        mode = _Mode(training=True, level=LEVELS[0], gradients=self._has_gradients())
        parts = self._choose(samples, mode)
        has_draws = self._check_sums(samples, mode, parts)
        if is_brief:
            return
        if has_draws:
            for level in self._levels[1:]:
                other = _Mode(mode.training, level, mode.gradients)
                self._check_sums(samples, other, None)
        with suppress(_RaisedError):  # in evaluation mode some models take other arguments
            self._check_sums(samples, _Mode(False, LEVELS[0], False), None)

    def _choose(self, samples: _Samples, mode: _Mode) -> Parts:
        """Choose samples, if possible with gradients; return the results of each alone."""
        trial, silent, parts = self._trial(mode), [], Parts()
        last: Evaluation | None = None
        first: Evaluation | None = None
        for number in samples.candidates():
            last = self._alone(trial, samples, number)
            if not last.is_finite:
                continue
            if not last.counts and mode.gradients:
                silent.append((number, last))
                continue
            first = first or last
            samples.choose(number)
            parts.add(last)
            if samples.has_enough:
                break
        for number, computed in silent:
            if samples.has_enough:
                break
            first = first or computed
            samples.choose(number)
            parts.add(computed)
        if first is None:
            assert last is not None
            raise DataError(f"expected a finite loss of the first samples, got {last.loss:.9g}")
        # One sample twice reveals a loss that treats repetitions differently.
        parts.add(first)
        return parts

    def _check_sums(self, samples: _Samples, mode: _Mode, parts: Parts | None) -> bool:
        """Compare a batch of samples with each of them alone; return whether the loss draws.

        Raises:
            NotASum: The batch's loss or a gradient is not the sum of the single samples'.
        """
        trial, chosen = self._trial(mode), samples.chosen
        if parts is None:
            chosen = chosen[:_RECHECK_SAMPLES]
            alone = [self._alone(trial, samples, number) for number in chosen]
            parts = Parts.of(*alone, alone[0])
        chosen = [*chosen, chosen[0]]
        with _raised_for(trial, chosen):
            discrepancy = trial.apart(samples.batch(chosen), parts)
        if discrepancy is not None:
            self._refuse(discrepancy, samples, mode)
        return parts.drew

    def _refuse(self, discrepancy: Discrepancy, samples: _Samples, mode: _Mode) -> None:
        diagnosis = _Diagnosis.of(self._trial(mode), samples)
        in_mode = ""
        if mode.training and self._adds_up_in_evaluation(samples, mode):
            in_mode = " in training mode"
        raise NotASum(_describe(discrepancy, diagnosis, in_mode), is_mean=diagnosis.is_mean)

    def _adds_up_in_evaluation(self, samples: _Samples, mode: _Mode) -> bool:
        try:
            self._check_sums(samples, _Mode(False, mode.level, mode.gradients), None)
        except (NotASum, _RaisedError, TooManyDrawsError):
            return False
        return True

    def _alone(self, trial: LossTrial, samples: _Samples, number: int) -> Evaluation:
        with _raised_for(trial, [number]):
            return trial.of(samples.batch([number]))

    def _describe_failure(self, raised: _RaisedError) -> Exception:
        if concerns_device(raised.error):
            return raised.error
        alone = len(raised.numbers) == 1
        which = f"sample {raised.numbers[0]} alone" if alone else f"{len(raised.numbers)} samples"
        if outside := index_outside(raised.error, raised.batch):
            return DataError(f"the loss of {which}: {outside.text}")
        return DataError(
            f"the loss of {which} raised {describe_raised(raised.error)}{self._hint(raised)}"
        )

    def _hint(self, raised: _RaisedError) -> str:
        """Return what to do about an error with a known cause; empty for others."""
        text = str(raised.error)
        if "use_reentrant" in text:
            return ": write use_reentrant=False where checkpoint is called"
        if "hooks should return None" in text:
            named = self._trained_originals()
            hooked = [name for name, each in named.items() if has_accumulated_hook(each)]
            return f": let the hook of {', '.join(map(repr, hooked))} return nothing"
        alone = len(raised.numbers) == 1
        return ": is there a layer across the batch?" if alone and self._works_twice(raised) else ""

    def _works_twice(self, raised: _RaisedError) -> bool:
        """Return whether a batch with the sample twice works, though the sample alone raises."""
        twice = {
            name: torch.cat([array, array]) if array.dim() else array
            for name, array in raised.batch.items()
        }
        try:
            mode = _Mode(training=True, level=LEVELS[0], gradients=self._has_gradients())
            self._trial(mode).of(twice)
        except Exception:  # noqa: BLE001 -- only the hint depends on it
            return False
        return True

    def _reaches_the_original(self) -> bool:
        """Return whether the loss reads weights of the original model through a closure."""
        assert self._module is not None
        trial = LossTrial(self._module, self._loss_in_its_width, self._trained_originals())
        samples = _Samples(self._task, 0, self._sample_count, self._device)
        try:
            return bool(trial.of(samples.first()).gradients)
        except Exception:  # noqa: BLE001 -- the check itself has passed
            return False

    # The copy.

    def _trained_originals(self) -> dict[str, nn.Parameter]:
        named = dict(self._original.named_parameters())
        return {name: named[name] for name in self._names}

    def _copy(self, *, wide: bool) -> tuple[nn.Module | None, bool]:
        """Copy the module; return it and whether it is in float64."""
        if self._elements > _COPY_ELEMENTS:
            return self._original, False
        try:
            made = copy.deepcopy(self._original)
        except Exception:  # noqa: BLE001 -- a model that cannot be copied can be trained
            return self._original, False
        given = dict(self._original.named_parameters())
        for name, parameter in made.named_parameters():  # deepcopy does not copy hooks
            hooks: Any = given[name]._backward_hooks  # noqa: SLF001 -- None for most
            for hook in (hooks or {}).values():
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        return (made.double() if wide else made), wide

    def _trained(self) -> dict[str, nn.Parameter]:
        assert self._module is not None
        named = dict(self._module.named_parameters())
        return {name: named[name] for name in self._names if name in named}

    def _has_gradients(self) -> bool:
        return sum(each.numel() for each in self._trained().values()) <= _COPY_ELEMENTS

    def _trial(self, mode: _Mode) -> LossTrial:
        assert self._module is not None
        self._module.train(mode.training)
        return LossTrial(
            self._module,
            self._loss_in_its_width,
            self._trained() if mode.gradients else {},
            mode.level,
            accumulates=self._module is self._original,
        )

    def _loss_in_its_width(self, module: Any, arrays: Arrays) -> torch.Tensor:
        if self._is_wide:
            arrays = {n: a.double() if a.dtype == torch.float32 else a for n, a in arrays.items()}
        with nullcontext() if self._device == _CPU else TableLookups(arrays):
            loss = self._loss(module, arrays)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise TypeError(f"expected a tensor that is one sum as loss, got {_shape_of(loss)}")
        return loss

    @torch.no_grad()
    def _load(self, parameters: Sequence[Array]) -> None:
        trained = self._trained()
        for block, values in zip(self._task.manifest.blocks, parameters, strict=True):
            for tensor, part in block.slices():
                trained[tensor.name].copy_(
                    torch.from_numpy(values[part].reshape(tensor.shape).copy())
                )

    @contextmanager
    def _perturbed(self, *, should_perturb: bool) -> Iterator[None]:
        """Perturb the trained weights within the context, and restore them afterwards."""
        if not should_perturb or not self._has_gradients():
            yield
            return
        trained, generator = self._trained(), torch.Generator().manual_seed(0)
        before = {name: each.detach().clone() for name, each in trained.items()}
        with torch.no_grad():
            for each in trained.values():
                size = float(each.square().mean().sqrt()) if each.numel() else 0.0
                scale = _PERTURBATION * size or 0.01
                draws = torch.randn(each.shape, generator=generator, dtype=each.dtype)
                each.add_(draws.to(each.device), alpha=scale)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, each in trained.items():
                    each.copy_(before[name])


class _Samples:
    """Samples spread over the data and over the kinds of labels, and their batches.

    Args:
        task: The task that makes batches.
        offset: Number of candidates to skip.
        count: Number of samples to choose.
        device: The device of the batches.
    """

    def __init__(self, task: Task, offset: int, count: int, device: torch.device) -> None:
        self._task = task
        self._device = device
        self.chosen: list[int] = []
        self._sample_count = count
        self._candidate_count = _CANDIDATES if count > 3 else 12
        samples = task.manifest.train_samples
        self.numbers = list(dict.fromkeys(
            int((index * _GOLDEN) % 1 * samples) for index in range(offset, offset + _CANDIDATES)
        ))  # fmt: skip
        self._rows: dict[int, int] = {}
        self._drawn: Arrays = {}
        if isinstance(task, DrawsBatches) and _draws(task, self.numbers[:2]):
            self._draw_jointly(task)

    @property
    def has_enough(self) -> bool:
        """Return whether enough samples are chosen."""
        return len(self.chosen) >= self._sample_count

    def choose(self, number: int) -> None:
        """Choose this sample."""
        self.chosen.append(number)

    def batch(self, numbers: Sequence[int]) -> Arrays:
        """Make a batch of these samples."""
        return {name: array.to(self._device) for name, array in self._on_host(numbers).items()}

    def _on_host(self, numbers: Sequence[int]) -> Arrays:
        if self._drawn:
            rows = [self._rows[number] for number in numbers]
            count = float(len(self._rows))
            return {
                # A scalar is a setting, unless it equals the number of samples.
                name: array[rows]
                if array.dim()
                else torch.where(array == count, len(rows), array).to(array.dtype)
                for name, array in self._drawn.items()
            }
        batch = self._task.batch(numbers)
        return {name: torch.tensor(array) for name, array in batch.arrays.items()}

    def first(self) -> Arrays:
        """Make a batch of one sample."""
        return self.batch(self.numbers[:1])

    def candidates(self) -> list[int]:
        """Return the candidates, starting with one for each kind of label."""
        kinds: dict[object, int] = {}
        rest, size = [], 0
        for number in self.numbers:
            arrays = self._on_host([number])
            size += sum(array.nbytes for array in arrays.values())
            if kinds.setdefault(_labels(arrays), number) != number:
                rest.append(number)
            if size > _CANDIDATE_BYTES:
                break
        return [*kinds.values(), *rest][: self._candidate_count]

    def _draw_jointly(self, task: DrawsBatches) -> None:
        """Draw one large batch, so that a sample's random draws are the same in every batch."""
        numbers = self.numbers[: self._candidate_count]
        arrays = task.drawn_batch(numbers, 1).arrays
        by_sample = all(len(array) == len(numbers) for array in arrays.values() if array.ndim)
        self.numbers = numbers if by_sample and len(numbers) > 1 else []
        self._drawn = {name: torch.tensor(array) for name, array in arrays.items()}
        self._rows = {number: row for row, number in enumerate(numbers)}


def _draws(task: DrawsBatches, numbers: Sequence[int]) -> bool:
    first, second = (digest_arrays(_plain(task.drawn_batch(numbers, seed))) for seed in (1, 2))
    return first != second


def _plain(batch: Batch) -> Mapping[str, np.ndarray[Any, Any]]:
    return batch.arrays


def _labels(arrays: Arrays) -> object:
    """Return what tells kinds of samples apart: a sample's scalar integers."""
    return tuple(
        (name, float(array))
        for name, array in sorted(arrays.items())
        if array.numel() == 1 and not array.is_complex() and float(array).is_integer()
    )


@dataclass(frozen=True, slots=True)
class _Diagnosis:
    """Why a loss is not a sum, as far as two samples show.

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
        first, second = samples.chosen[0], samples.chosen[-1]
        try:
            computed = [
                trial.of(samples.batch(numbers))
                for numbers in ([first], [second], [first, second], [first, first])
            ]
        except Exception:  # noqa: BLE001 -- only the message depends on it
            return _Diagnosis(is_mean=False, constant_term=None)
        one, other, pair, twice = (each.loss for each in computed)
        epsilon = max(each.epsilon for each in computed)
        near = _EQUAL_SPACINGS * epsilon * max(map(abs, (one, other, pair)))
        constant = 2 * one - twice
        is_constant_in_pair = abs(one + other - pair - constant) <= near
        has_constant = first != second and abs(constant) > near and is_constant_in_pair
        is_mean = abs(twice - one) <= near < abs(one)
        return _Diagnosis(is_mean and not has_constant, constant if has_constant else None)


def _describe(discrepancy: Discrepancy, diagnosis: _Diagnosis, in_mode: str) -> str:
    shown = (
        f"{discrepancy.whole:.9g} of {len(discrepancy.parts) - 1} samples and the first once more "
        f"together and {sum(discrepancy.parts):.9g} as the sum of each alone{in_mode}"
    )
    if diagnosis.is_mean:
        return (
            f'expected a loss summed over samples, got a mean ({shown}): write reduction="sum" or '
            f".sum(), as samestep divides by the number of samples, or by weight=; or "
            f"{WHOLE_MICROBATCH}"
        )
    if diagnosis.constant_term is not None:
        return (
            f"expected a loss that adds up over samples, got {shown}: a term of "
            f"{diagnosis.constant_term:.3g} counts once for each microbatch, whatever samples it "
            "has; a penalty on weights belongs in the optimizer's weight_decay, any other term "
            "must be multiplied by the number of samples in the batch"
        )
    if discrepancy.tensor is not None:
        return (
            f"expected gradients that add up over samples, got one of {discrepancy.tensor!r} by "
            f"samples together that is {discrepancy.off:.3g} off the sum of each alone's{in_mode}, "
            "though the loss adds up: the result would depend on how many samples a microbatch "
            "has; leave out what works across the batch in backward, such as scale_grad_by_freq, "
            "or a Function or hook that normalizes, and state that one call leaves to the next (a "
            "moving average, a memory bank); a penalty on weights belongs in the optimizer's "
            "weight_decay"
        )
    return (
        f"expected a loss that adds up over samples, got {shown}: a loss across samples "
        "(contrastive, balancing, a mean weighted by class) or one with layers across the batch "
        f"cannot be divided among microbatches, write it per sample, or {WHOLE_MICROBATCH}; a "
        "penalty on weights belongs in the optimizer's weight_decay; leave out state that one call "
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
    modes = [(each, each.training) for each in module.modules()]
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
