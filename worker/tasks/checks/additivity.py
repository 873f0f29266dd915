"""Check on real samples that a user's loss is a sum over samples, before a run and during it.

For losses that users wrote, in a script or in a package. A copy of the model in float64 computes
loss and gradients of several samples together and of each alone, in training mode. Its weights are
perturbed first: tensors that are initialized to zero, like LoRA's B, would hide a penalty on them.
After some steps the check is repeated with the weights of then.
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
"""Largest model whose copy is kept for the second check."""
_SMALL_ELEMENTS: Final = 1 << 20
"""Largest model that is checked with eight samples and all levels of draws; larger ones use three
samples and two levels."""
_MEDIUM_ELEMENTS: Final = 1 << 24
"""Largest model that is checked with three samples; larger ones use two."""
_AGAIN: Final = 3
"""Number of samples for the checks with other draws and in evaluation mode."""
_CANDIDATES: Final = 64
"""Number of samples to choose from."""
_CANDIDATE_BYTES: Final = 1 << 26
"""Limit on the bytes of their arrays."""
_GOLDEN: Final = (math.sqrt(5) - 1) / 2
"""Its multiples modulo 1 are evenly spread and follow no period of the data."""
_MOVED: Final = 0.02
"""Perturbation of weights, times the tensor's root mean square; 0.01 for zeros."""
_CPU: Final = torch.device("cpu")
_SAME: Final = 256
"""Float spacings within which two terms count as equal."""


class NotASum(DataError):
    """A loss or its gradients do not add up over samples.

    Attributes:
        is_mean: It is a mean over samples, or over their weights.
    """

    def __init__(self, text: str, *, is_mean: bool = False) -> None:
        super().__init__(text)
        self.is_mean = is_mean


@runtime_checkable
class HasSumTrial(Protocol):
    """A task that has checked its loss itself."""

    @property
    def sum_trial(self) -> SumTrial | None:
        """Return the check, to repeat it; None for a loss of a whole microbatch."""


def sum_trial_of(task: Task) -> SumTrial | None:
    """Check a task's loss; return the check, or None if there is nothing to check.

    Raises:
        DataError: The loss is not a sum over samples, or raises.
    """
    if isinstance(task, HasSumTrial):
        return task.sum_trial
    trained = task.trainable
    if trained.module is None or trained.loss is None or trained.rows is not None:
        return None
    if isinstance(task, ReadsFiles):  # what is not here yet cannot be tried
        return None
    trial = SumTrial(task)
    trial.refuse()
    return trial


@dataclass(frozen=True, slots=True)
class _Way:
    """How a loss is computed."""

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
    """Checks a task's loss on a copy of its model, made when the task was built.

    Args:
        task: One with a torch module and a loss.
        device: Where it is computed, and where the module is until `refuse` returns.
    """

    def __init__(self, task: Task, device: torch.device = _CPU) -> None:
        assert task.trainable.module is not None
        self._device = device
        assert task.trainable.loss is not None
        self._task = task
        self._loss: Callable[[Any, Mapping[str, Any]], Any] = task.trainable.loss
        self._given: nn.Module = task.trainable.module
        self._elements = sum(parameter.numel() for parameter in self._given.parameters())
        is_small, is_medium = (
            self._elements <= most for most in (_SMALL_ELEMENTS, _MEDIUM_ELEMENTS)
        )
        self._wanted = 8 if is_small else 3 if is_medium else 2
        self._levels = LEVELS if is_small else LEVELS[:2]
        self._names = [t.name for block in task.manifest.blocks for t in block.tensors]
        self._module, self._is_wide = self._copy(wide=True)

    def refuse(self) -> None:
        """Check the loss before the run.

        Raises:
            NotASum: It is not a sum over samples.
            DataError: It is not finite, or raises.
        """
        if self._task.manifest.train_samples > 1:
            self._in_either_width(lambda: self._try(0, moved=True))
            if self._module is not self._given and (
                any(map(hooks_need_backward, self._trained_originals().values()))
                or self._reaches_the_original()
            ):
                copied, self._module = (self._module, self._is_wide), self._given
                self._is_wide = False
                self._in_either_width(lambda: self._try(0, moved=True))
                self._module, self._is_wide = copied
        if self._module is None or self._elements > _KEPT_ELEMENTS or self._module is self._given:
            self.close()
        else:
            self._module.cpu()

    def refuse_after_steps(self, step: int, parameters: Sequence[Array]) -> None:
        """Check the loss once more, on other samples, with the weights of now.

        Args:
            step: The number of steps taken.
            parameters: The trained values, a flat array per block.

        Raises:
            NotASum: It is no sum over samples.
        """
        if self._task.manifest.train_samples > 1 and self._module is not None:
            self._module.to(self._device)
            self._load(parameters)
            try:
                self._try(_CANDIDATES, moved=False)
            except _RaisedError:
                pass  # the run itself will tell
            except NotASum as error:
                raise NotASum(f"after step {step}: {error}", is_mean=error.is_mean) from None
        self.close()

    def close(self) -> None:
        """Release the copy."""
        self._module = None

    # The check.

    def _in_either_width(self, attempt: Callable[[], None]) -> None:
        """Compute in float64 if the model can, else in its own dtypes."""
        try:
            attempt()
        except _RaisedError as raised:
            if not self._is_wide:
                raise self._told_of(raised) from raised.error
            self._module, self._is_wide = self._copy(wide=False)
            self._in_either_width(attempt)

    def _try(self, offset: int, *, moved: bool) -> None:
        assert self._module is not None
        samples = _Samples(self._task, offset, self._wanted, self._device)
        if not samples.numbers:
            return
        is_brief = not moved and self._elements > _SMALL_ELEMENTS  # the run waits for it
        with modes_kept(self._module), self._moved(wanted=moved), suppress(TooManyDrawsError):
            self._try_at_these_weights(samples, is_brief=is_brief)

    def _try_at_these_weights(self, samples: _Samples, *, is_brief: bool) -> None:
        way = _Way(training=True, level=LEVELS[0], gradients=self._has_gradients())
        parts = self._choose(samples, way)
        drew = self._refuse_apart(samples, way, parts)
        if is_brief:
            return
        if drew:
            for level in self._levels[1:]:
                other = _Way(way.training, level, way.gradients)
                self._refuse_apart(samples, other, None)
        with suppress(_RaisedError):  # some models are called otherwise in evaluation
            self._refuse_apart(samples, _Way(False, LEVELS[0], False), None)

    def _choose(self, samples: _Samples, way: _Way) -> Parts:
        """Choose samples with gradients, as far as there are any; return what each gives alone."""
        trial, silent, parts = self._trial(way), [], Parts()
        last: Evaluation | None = None
        first: Evaluation | None = None
        for number in samples.candidates():
            last = self._alone(trial, samples, number)
            if not last.is_finite:
                continue
            if not last.counts and way.gradients:
                silent.append((number, last))
                continue
            first = first or last
            samples.choose(number)
            parts.add(last)
            if samples.enough:
                break
        for number, computed in silent:
            if samples.enough:
                break
            first = first or computed
            samples.choose(number)
            parts.add(computed)
        if first is None:
            assert last is not None
            raise DataError(f"expected a finite loss of the first samples, got {last.loss:.9g}")
        # What counts repetitions is to see some.
        parts.add(first)
        return parts

    def _refuse_apart(self, samples: _Samples, way: _Way, parts: Parts | None) -> bool:
        """Compare samples together with each alone; return whether random numbers were drawn.

        Raises:
            NotASum: The result together is not the sum of the results alone.
        """
        trial, chosen = self._trial(way), samples.chosen
        if parts is None:
            chosen = chosen[:_AGAIN]
            alone = [self._alone(trial, samples, number) for number in chosen]
            parts = Parts.of(*alone, alone[0])
        chosen = [*chosen, chosen[0]]
        with _raised_for(trial, chosen):
            apart = trial.apart(samples.batch(chosen), parts)
        if apart is not None:
            self._refuse(apart, samples, way)
        return parts.drew

    def _refuse(self, apart: Discrepancy, samples: _Samples, way: _Way) -> None:
        kind = _Kind.of(self._trial(way), samples)
        in_mode = ""
        if way.training and self._adds_up_in_evaluation(samples, way):
            in_mode = " in training mode"
        raise NotASum(_words(apart, kind, in_mode), is_mean=kind.is_mean)

    def _adds_up_in_evaluation(self, samples: _Samples, way: _Way) -> bool:
        try:
            self._refuse_apart(samples, _Way(False, way.level, way.gradients), None)
        except (NotASum, _RaisedError, TooManyDrawsError):
            return False
        return True

    def _alone(self, trial: LossTrial, samples: _Samples, number: int) -> Evaluation:
        with _raised_for(trial, [number]):
            return trial.of(samples.batch([number]))

    def _told_of(self, raised: _RaisedError) -> Exception:
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
        """Return what to do about a known error."""
        text = str(raised.error)
        if "use_reentrant" in text:
            return ": write use_reentrant=False where checkpoint is called"
        if "hooks should return None" in text:
            named = self._trained_originals()
            hooked = [name for name, each in named.items() if has_accumulated_hook(each)]
            return f": let the hook of {', '.join(map(repr, hooked))} return nothing"
        alone = len(raised.numbers) == 1
        return ": is there a layer across the batch?" if alone and self._pairs(raised) else ""

    def _pairs(self, raised: _RaisedError) -> bool:
        """Return whether a sample that raises alone does not raise when it is there twice."""
        twice = {
            name: torch.cat([array, array]) if array.dim() else array
            for name, array in raised.batch.items()
        }
        try:
            way = _Way(training=True, level=LEVELS[0], gradients=self._has_gradients())
            self._trial(way).of(twice)
        except Exception:  # noqa: BLE001 -- it is only about the words
            return False
        return True

    def _reaches_the_original(self) -> bool:
        """Return whether the loss reads weights of the original model through a closure."""
        assert self._module is not None
        trial = LossTrial(self._module, self._loss_in_its_width, self._trained_originals())
        samples = _Samples(self._task, 0, self._wanted, self._device)
        try:
            return bool(trial.of(samples.first()).gradients)
        except Exception:  # noqa: BLE001 -- it has been tried
            return False

    # The copy.

    def _trained_originals(self) -> dict[str, nn.Parameter]:
        named = dict(self._given.named_parameters())
        return {name: named[name] for name in self._names}

    def _copy(self, *, wide: bool) -> tuple[nn.Module | None, bool]:
        """Copy the module; return it and whether it is in float64."""
        if self._elements > _COPY_ELEMENTS:
            return self._given, False
        try:
            made = copy.deepcopy(self._given)
        except Exception:  # noqa: BLE001 -- a model that cannot be copied can be trained
            return self._given, False
        given = dict(self._given.named_parameters())
        for name, parameter in made.named_parameters():  # no copy has its original's hooks
            hooks: Any = given[name]._backward_hooks  # noqa: SLF001 -- None of most
            for hook in (hooks or {}).values():
                parameter.register_hook(hook)  # type: ignore[no-untyped-call]
        return (made.double() if wide else made), wide

    def _trained(self) -> dict[str, nn.Parameter]:
        assert self._module is not None
        named = dict(self._module.named_parameters())
        return {name: named[name] for name in self._names if name in named}

    def _has_gradients(self) -> bool:
        return sum(each.numel() for each in self._trained().values()) <= _COPY_ELEMENTS

    def _trial(self, way: _Way) -> LossTrial:
        assert self._module is not None
        self._module.train(way.training)
        return LossTrial(
            self._module,
            self._loss_in_its_width,
            self._trained() if way.gradients else {},
            way.level,
            accumulates=self._module is self._given,
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
            for tensor, place in block.slices():
                trained[tensor.name].copy_(
                    torch.from_numpy(values[place].reshape(tensor.shape).copy())
                )

    @contextmanager
    def _moved(self, *, wanted: bool) -> Iterator[None]:
        """Perturb the trained weights while entered."""
        if not wanted or not self._has_gradients():
            yield
            return
        trained, generator = self._trained(), torch.Generator().manual_seed(0)
        before = {name: each.detach().clone() for name, each in trained.items()}
        with torch.no_grad():
            for each in trained.values():
                size = float(each.square().mean().sqrt()) if each.numel() else 0.0
                by = _MOVED * size or 0.01
                draws = torch.randn(each.shape, generator=generator, dtype=each.dtype)
                each.add_(draws.to(each.device), alpha=by)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, each in trained.items():
                    each.copy_(before[name])


class _Samples:
    """Samples spread over the data and over the kinds of labels, and their batches.

    Args:
        task: Whose.
        offset: So many of the order of candidates are left out.
        wanted: How many are chosen.
        device: Where batches are.
    """

    def __init__(self, task: Task, offset: int, wanted: int, device: torch.device) -> None:
        self._task = task
        self._device = device
        self.chosen: list[int] = []
        self._wanted = wanted
        self._tried = _CANDIDATES if wanted > 3 else 12
        count = task.manifest.train_samples
        self.numbers = list(dict.fromkeys(
            int((place * _GOLDEN) % 1 * count) for place in range(offset, offset + _CANDIDATES)
        ))  # fmt: skip
        self._rows: dict[int, int] = {}
        self._drawn: Arrays = {}
        if isinstance(task, DrawsBatches) and _draws(task, self.numbers[:2]):
            self._cut(task)

    @property
    def enough(self) -> bool:
        """Return whether enough samples are chosen."""
        return len(self.chosen) >= self._wanted

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
                # A single number is a setting, unless it is how many samples there are.
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
        """Return candidates in order: one of each kind of label first."""
        kinds: dict[object, int] = {}
        rest, size = [], 0
        for number in self.numbers:
            arrays = self._on_host([number])
            size += sum(array.nbytes for array in arrays.values())
            if kinds.setdefault(_labels(arrays), number) != number:
                rest.append(number)
            if size > _CANDIDATE_BYTES:
                break
        return [*kinds.values(), *rest][: self._tried]

    def _cut(self, task: DrawsBatches) -> None:
        """Make a batch whose random draws are those of the rows of one larger batch."""
        numbers = self.numbers[: self._tried]
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
    """Return the kind of a sample: its scalar integers."""
    return tuple(
        (name, float(array))
        for name, array in sorted(arrays.items())
        if array.numel() == 1 and not array.is_complex() and float(array).is_integer()
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a loss is that is not a sum, as far as two samples show.

    Attributes:
        is_mean: A sample twice gives what it gives once.
        once: A term that is added once per batch, whatever is in it; None without one.
    """

    is_mean: bool
    once: float | None

    @staticmethod
    def of(trial: LossTrial, samples: _Samples) -> _Kind:
        """Classify a loss by the first two chosen samples."""
        first, second = samples.chosen[0], samples.chosen[-1]
        try:
            computed = [
                trial.of(samples.batch(numbers))
                for numbers in ([first], [second], [first, second], [first, first])
            ]
        except Exception:  # noqa: BLE001 -- it is only about the words
            return _Kind(is_mean=False, once=None)
        one, other, pair, twice = (each.loss for each in computed)
        near = _SAME * max(each.epsilon for each in computed) * max(map(abs, (one, other, pair)))
        once = 2 * one - twice
        is_once = first != second and abs(once) > near and abs(one + other - pair - once) <= near
        is_mean = abs(twice - one) <= near < abs(one)
        return _Kind(is_mean and not is_once, once if is_once else None)


def _words(apart: Discrepancy, kind: _Kind, in_mode: str) -> str:
    shown = (
        f"{apart.whole:.9g} of {len(apart.parts) - 1} samples and the first once more together and "
        f"{sum(apart.parts):.9g} as the sum of each alone{in_mode}"
    )
    if kind.is_mean:
        return (
            f'expected a loss summed over samples, got a mean ({shown}): write reduction="sum" or '
            f".sum(), as samestep divides by the number of samples, or by weight=; or "
            f"{WHOLE_MICROBATCH}"
        )
    if kind.once is not None:
        return (
            f"expected a loss that adds up over samples, got {shown}: a term of {kind.once:.3g} "
            "counts once for each microbatch, whatever samples it has; a penalty on weights "
            "belongs in the optimizer's weight_decay, any other term must be multiplied by the "
            "number of samples in the batch"
        )
    if apart.tensor is not None:
        return (
            f"expected gradients that add up over samples, got one of {apart.tensor!r} by samples "
            f"together that is {apart.off:.3g} off the sum of each alone's{in_mode}, though the "
            "loss adds up: the result would depend on how many samples a microbatch has; leave out "
            "what works across the batch in backward, such as scale_grad_by_freq, or a Function or "
            "hook that normalizes, and state that one call leaves to the next (a moving average, a "
            "memory bank); a penalty on weights belongs in the optimizer's weight_decay"
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
    """Have a module of the CPU's on a device while entered."""
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
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the training mode of each submodule afterwards."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
