"""What cannot be trained, found before anything starts: one line each, with what to write instead.

That a loss is a sum over samples is tried in `worker.tasks.additivity`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Final, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from backends.base.trainable_checks import refuse_running_statistics, refuse_scripted
from protocol.base.errors import DataError, SamestepError
from protocol.spec.run_spec import ComputePrecision
from samestep.user_task import UserTask
from worker.tasks.modes import parts_in_evaluation

PRECISIONS: Final[tuple[ComputePrecision, ...]] = get_args(ComputePrecision)


def task_of(built: object) -> UserTask:
    """What `build` gave, looked at.

    Raises:
        DataError: It is no task, or one that cannot be trained.
    """
    if not isinstance(built, UserTask):
        raise DataError(
            f"expected a samestep.Task from build, got {type(built).__name__}: write "
            "return samestep.Task(module=..., train=..., loss=...)"
        )
    _check_module(built.module)
    check_data("train", built.train)
    if built.held_out is not None:
        check_data("held_out", built.held_out)
    if not callable(built.loss):
        raise DataError(
            "expected a loss, got none: write loss=lambda module, batch: ..., a sum over the batch"
        )
    for name, each in {"collate": built.collate, "weight": built.weight, **built.metrics}.items():
        if each is not None and not callable(each):
            raise DataError(f"expected a function as {name}, got {type(each).__name__}")
    return built


def _check_module(module: object) -> None:
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
        refuse_running_statistics(module, parts_in_evaluation(module))
    except SamestepError as error:
        raise DataError(str(error)) from None


def check_data(role: str, data: Any) -> None:
    """See that a data set can be read by number.

    Raises:
        DataError: It cannot.
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
    """What a loss gave, if it is one sum.

    Raises:
        DataError: It is not.
    """
    if not isinstance(value, torch.Tensor):
        remedy = "leave out .item() and float()"
        if value is None:
            remedy = "its last line is to be `return ...`"
        elif not isinstance(value, int | float):
            remedy = "return the loss alone"
        raise DataError(f"expected a tensor as loss, got {type(value).__name__}: {remedy}")
    if value.dim():
        raise DataError(
            f"expected a loss that is one sum, got shape {tuple(value.shape)}: add .sum()"
        )
    return value


def no_gradient() -> DataError:
    """For a loss that no gradient comes from."""
    return DataError(
        "the loss depends on no trainable tensor: leave out detach(), no_grad(), inference_mode() "
        "and .data, and write use_reentrant=False where checkpoint is called"
    )


def check_weight(value: object) -> float:
    """What a weight gave, if it can be one.

    Raises:
        DataError: It cannot.
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
    """What a metric gave: a sum, and what it is divided by; None for the number of samples.

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


def number_of(value: Any) -> float:
    """A number that a loss or a metric gave, which a gradient may hang on.

    Raises:
        TypeError, ValueError, RuntimeError: It is none.
    """
    if isinstance(value, str | bytes):
        raise TypeError
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def check_precision(given: object) -> ComputePrecision:
    """What a script may compute in.

    Raises:
        DataError: It is nothing that is offered.
    """
    for each in PRECISIONS:
        if isinstance(given, str) and given == each:
            return each
    *others, last = PRECISIONS
    raise DataError(f"precision: expected {', '.join(others)} or {last}, got {given!r}")


def refuse_own_draws(first: torch.Tensor, second: torch.Tensor, moved: str | None) -> None:
    """Refuse a loss that is another one for the same batch and seed.

    Args:
        first: The loss.
        second: Of the same batch and seed.
        moved: What changed meanwhile, where that is known.

    Raises:
        DataError: It is.
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
