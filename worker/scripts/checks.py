"""Checks of a user's task before training: each error is one line that says what to write instead.

`worker.tasks.checks.additivity` checks that a loss is a sum over samples.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from backends.base.trainable_checks import refuse_running_statistics, refuse_scripted
from protocol.base.errors import DataError, SamestepError
from protocol.exact.digest import digest_arrays
from protocol.spec.sections.model import ComputePrecision
from protocol.spec.sections.tasks import Unit
from worker.scripts.held_out import named_sets
from worker.scripts.user_task import UserTask
from worker.tasks.base.evaluation_modes import parts_in_evaluation

PRECISIONS: Final[tuple[ComputePrecision, ...]] = get_args(ComputePrecision)


def check_task(built: object) -> UserTask:
    """Check what `build` returned.

    Raises:
        DataError: It is not a task, or one that cannot be trained.
    """
    if not isinstance(built, UserTask):
        raise DataError(
            f"expected a samestep.Task from build, got {type(built).__name__}: write "
            "return samestep.Task(module=..., train=..., loss=...)"
        )
    if built.unit not in get_args(Unit):
        raise DataError(f'expected unit "sample" or "microbatch", got {built.unit!r}')
    _check_module(built.module, built.unit)
    check_data("train", built.train)
    for name, data in named_sets(built.held_out).items():
        check_data(f"held_out[{name!r}]" if name else "held_out", data)
    if built.embed is None and not callable(built.loss):
        raise DataError(
            "expected a loss, got none: write loss=lambda module, batch: ..., a sum over the batch"
        )
    _check_coupling(built)
    functions = {
        "collate": built.collate, "weight": built.weight, "evaluate": built.evaluate,
        "embed": built.embed, "batch_loss": built.batch_loss,
    }  # fmt: skip
    for name, each in {**functions, **built.metrics}.items():
        if each is not None and not callable(each):
            raise DataError(f"expected a function as {name}, got {type(each).__name__}")
    return built


def _check_coupling(built: UserTask) -> None:
    """Check which functions of a loss that couples all samples of a step are given."""
    if (built.embed is None) != (built.batch_loss is None):
        raise DataError(
            "expected embed and batch_loss, got one of them: embed makes what batch_loss reads of "
            "all samples of a step"
        )
    for name, other in (("loss", built.loss), ("weight", built.weight)):
        if built.embed is not None and other is not None:
            raise DataError(
                f"expected no {name} with embed, got both: batch_loss gives a loss for each sample"
            )


def _check_module(module: object, unit: Unit) -> None:
    if not isinstance(module, nn.Module):
        raise DataError(f"expected a torch.nn.Module as module, got {type(module).__name__}")
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise DataError(
            f"expected the module itself, got it inside {type(module).__name__}: give "
            "module.module; samestep divides the batch among the workers"
        )
    if any(hasattr(each, "_orig_mod") for each in module.modules()):
        raise DataError("expected a plain module, got a compiled one: leave out torch.compile")
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu":
            raise DataError(
                f"expected the model on the CPU, got {name!r} on {parameter.device}: leave out "
                ".to(...) and .cuda(); each worker takes it to its own device"
            )
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise DataError(
                f"expected trainable tensors in float32, got {name!r} in {parameter.dtype}: write "
                'module.float(), and fit(precision="bfloat16") to compute in it'
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise DataError("the model has no trainable tensor: leave some without requires_grad_(0)")
    try:
        refuse_scripted(module)
        in_evaluation = parts_in_evaluation(module)
        if unit == "sample":
            refuse_running_statistics(module, in_evaluation)
    except SamestepError as error:
        raise DataError(str(error)) from None


def check_data(role: str, data: Any) -> None:
    """Check that a data set can be read by sample number.

    Raises:
        DataError: It cannot be used.
    """
    if isinstance(data, DataLoader):
        raise DataError(
            f"expected a data set as {role}, got a DataLoader: give its dataset, and its "
            "collate_fn as collate; fit has batch= and microbatch="
        )
    by_number = hasattr(data, "__getitem__") and not isinstance(data, Mapping)
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and by_number):
        raise DataError(
            f"expected a data set with a length and items by number as {role}, got "
            f"{type(data).__name__}: read it into a list, or give it __len__ and __getitem__"
        )
    if isinstance(data, torch.Tensor) or (
        isinstance(data, tuple) and all(isinstance(each, torch.Tensor) for each in data)
    ):
        raise DataError(
            f"expected a data set as {role}, got {type(data).__name__} of tensors: write "
            "torch.utils.data.TensorDataset(x, y)"
        )
    if len(data) == 0:
        raise DataError(f"expected samples as {role}, got an empty {type(data).__name__}")


def check_loss(value: object) -> torch.Tensor:
    """Check that a loss is a scalar tensor.

    Raises:
        DataError: It is not.
    """
    if not isinstance(value, torch.Tensor):
        remedy = "leave out .item() and float()"
        if value is None:
            remedy = "its last line must be `return ...`"
        elif not isinstance(value, int | float):
            remedy = "return the loss alone"
        raise DataError(f"expected a tensor as loss, got {type(value).__name__}: {remedy}")
    if value.dim():
        raise DataError(
            f"expected a loss that is one sum, got shape {tuple(value.shape)}: add .sum()"
        )
    return value


def no_gradient() -> DataError:
    """The error for a loss without a gradient."""
    return DataError(
        "the loss depends on no trainable tensor: leave out detach(), no_grad(), inference_mode() "
        "and .data, and write use_reentrant=False where checkpoint is called"
    )


def check_weight(value: object) -> float:
    """Check the value of a weight.

    Raises:
        DataError: It cannot be used.
    """
    try:
        weight = float(value)  # type: ignore[arg-type]  # whatever is no number raises
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        shown = " ".join(repr(value).split())[:100]
        raise DataError(
            f"expected weight to give a finite number, 0 or more, got {shown}: give the number of "
            "samples or tokens of the batch that count"
        )
    return weight


def check_metric(
    name: str, metric: Callable[..., Any], value: object
) -> tuple[float, float | None]:
    """Check a metric's value; returns the sum and its divisor, None for the number of samples.

    Raises:
        DataError: It is neither a number nor a pair of numbers.
    """
    try:
        if not isinstance(value, tuple):
            return number_of(value), None
        above, below = value
        return number_of(above), number_of(below)
    except (TypeError, ValueError, RuntimeError):
        shown = " ".join(repr(value).split())[:100]
        code = getattr(metric, "__code__", None)
        where = f" in {PurePath(code.co_filename).name}, line {code.co_firstlineno}" if code else ""
        raise DataError(
            f"expected the metric {name!r}{where} to give a number, or a pair of numbers to be "
            f"divided, got {shown}"
        ) from None


def check_figures(given: object, names: Sequence[str]) -> dict[str, float]:
    """Check what `evaluate` returned: numbers by name.

    Args:
        given: What it returned.
        names: The names that it returned at first; none before that.

    Raises:
        DataError: It is something else, or has other names than at first.
    """
    if not isinstance(given, Mapping) or not given:
        raise DataError(
            f"expected metrics by name from evaluate, got {type(given).__name__}: write "
            'return {"f1": ...}'
        )
    figures: dict[str, float] = {}
    for name, value in given.items():
        try:
            figures[str(name)] = number_of(value)
        except (TypeError, ValueError, RuntimeError):
            shown = " ".join(repr(value).split())[:100]
            raise DataError(
                f"expected evaluate to give a number as {str(name)!r}, got {shown}"
            ) from None
    if names and tuple(sorted(figures)) != tuple(names):
        raise DataError(
            f"expected evaluate to give {', '.join(names)} each time, got "
            f"{', '.join(sorted(figures))}"
        )
    return figures


def number_of(value: Any) -> float:
    """Convert the value of a loss or a metric, possibly a tensor with a gradient, to a float.

    Raises:
        TypeError, ValueError, RuntimeError: It is not a number.
    """
    if isinstance(value, str | bytes):
        raise TypeError
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def check_precision(given: object) -> ComputePrecision:
    """Check the argument `precision`.

    Raises:
        DataError: It is not one of `PRECISIONS`.
    """
    for each in PRECISIONS:
        if isinstance(given, str) and given == each:
            return each
    *others, last = PRECISIONS
    raise DataError(f"precision: expected {', '.join(others)} or {last}, got {given!r}")


def check_draws(
    samples: Sequence[int], batches: Sequence[Mapping[str, Any]], ends: Sequence[object]
) -> None:
    """Check that samples give the same batch at each read with the same seed.

    Args:
        samples: The numbers of the samples.
        batches: The arrays of two reads.
        ends: Where the generators stood after each of them; empty if nothing can draw.

    Raises:
        DataError: The batches differ, or only the first one was drawn.
    """
    numbers = ", ".join(map(str, samples))
    if digest_arrays(batches[0]) != digest_arrays(batches[1]):
        raise DataError(
            f"expected the same batch from samples {numbers} at each read with the same seed, got "
            "another: draw from torch's, numpy's or Python's global generator, or from one that is "
            "an attribute of data set or collator"
        )
    if ends[:1] != ends[1:]:
        raise DataError(
            f"expected draws at each read, got a data set (or collator) that keeps what it drew "
            f"when samples {numbers} were first read: batches would depend on what a worker has "
            "read before; draw at each read, or for all samples in build"
        )


def check_reproducible(first: torch.Tensor, second: torch.Tensor, moved: str | None) -> None:
    """Check that a loss is the same for the same batch and seed.

    Args:
        first: The loss of a batch.
        second: The loss of the same batch with the same seed.
        moved: What changed between the two, if known.

    Raises:
        DataError: The two differ.
    """
    if not torch.equal(first.nan_to_num(), second.nan_to_num()):
        culprit = f", as {moved} changes" if moved else ""
        raise DataError(
            f"the loss of the same samples with the same seed is {float(first):.9g} and then "
            f"{float(second):.9g}{culprit}: draw with torch's functions, which are seeded for each "
            "microbatch, and keep nothing in the model that forward changes"
        )


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
