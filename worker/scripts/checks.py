"""Check a user's task before training: each error is one line with a remedy.

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

from backends.checks.trainable_checks import refuse_running_statistics, refuse_scripted
from protocol.base.errors import DataError, SamestepError
from protocol.exact.digest import digest_arrays
from protocol.spec.sections.model import ComputePrecision
from protocol.spec.sections.tasks import Unit
from worker.scripts.evaluation_sets import named_sets
from worker.scripts.user_task import UserTask
from worker.tasks.base.evaluation_modes import parts_in_evaluation

PRECISIONS: Final[tuple[ComputePrecision, ...]] = get_args(ComputePrecision)


def check_task(task: object) -> UserTask:
    """Check the result of `build`.

    Raises:
        DataError: The result is not a task, or the task cannot be trained.
    """
    if not isinstance(task, UserTask):
        raise DataError(
            f"expected a samestep.Task from build, got {type(task).__name__}: write "
            "return samestep.Task(module=..., train=..., loss=...)"
        )
    if task.unit not in get_args(Unit):
        raise DataError(f'expected unit "sample" or "microbatch", got {task.unit!r}')
    _check_module(task.module, task.unit)
    check_data("train", task.train)
    for name, data in named_sets(task.held_out).items():
        check_data(f"held_out[{name!r}]" if name else "held_out", data)
    if task.embed is None and not callable(task.loss):
        raise DataError(
            "expected a loss, got none: write loss=lambda module, batch: ..., a sum over the batch"
        )
    _check_coupling(task)
    functions = {
        "collate": task.collate, "weight": task.weight, "evaluate": task.evaluate,
        "embed": task.embed, "batch_loss": task.batch_loss,
    }  # fmt: skip
    for name, function in {**functions, **task.metrics}.items():
        if function is not None and not callable(function):
            raise DataError(f"expected a function as {name}, got {type(function).__name__}")
    return task


def _check_coupling(task: UserTask) -> None:
    """Check that the functions of a loss over all samples of a step are complete."""
    if (task.embed is None) != (task.batch_loss is None):
        raise DataError(
            "expected both embed and batch_loss, got only one: embed computes the tensors that "
            "batch_loss reads for all samples of a step"
        )
    for name, function in (("loss", task.loss), ("weight", task.weight)):
        if task.embed is not None and function is not None:
            raise DataError(
                f"expected no {name} with embed, got both: batch_loss returns a loss for each "
                "sample"
            )


def _check_module(module: object, unit: Unit) -> None:
    if not isinstance(module, nn.Module):
        raise DataError(f"expected a torch.nn.Module as module, got {type(module).__name__}")
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise DataError(
            f"expected the module itself, got it inside {type(module).__name__}: pass "
            "module.module; samestep divides the batch among the workers"
        )
    if any(hasattr(layer, "_orig_mod") for layer in module.modules()):
        raise DataError("expected a plain module, got a compiled one: leave out torch.compile")
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu":
            raise DataError(
                f"expected the model on the CPU, got {name!r} on {parameter.device}: leave out "
                ".to(...) and .cuda(); each worker moves it to its own device"
            )
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise DataError(
                f"expected trainable tensors in float32, got {name!r} in {parameter.dtype}: write "
                'module.float(), and fit(precision="bfloat16") to compute in it'
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise DataError(
            "expected a model with trainable tensors, got none: set requires_grad of some of them"
        )
    try:
        refuse_scripted(module)
        evaluation_layers = parts_in_evaluation(module)
        if unit == "sample":
            refuse_running_statistics(module, evaluation_layers)
    except SamestepError as error:
        raise DataError(str(error)) from None


def check_data(role: str, data: Any) -> None:
    """Check that a data set can be read by sample number.

    Raises:
        DataError: The data set cannot be read that way, or is empty.
    """
    if isinstance(data, DataLoader):
        raise DataError(
            f"expected a data set as {role}, got a DataLoader: pass its dataset, and its "
            "collate_fn as collate; fit has batch= and microbatch="
        )
    has_items = hasattr(data, "__getitem__") and not isinstance(data, Mapping)
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and has_items):
        raise DataError(
            f"expected a data set with a length and items by number as {role}, got "
            f"{type(data).__name__}: read it into a list, or add __len__ and __getitem__"
        )
    if isinstance(data, torch.Tensor) or (
        isinstance(data, tuple) and all(isinstance(item, torch.Tensor) for item in data)
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
        DataError: The loss is not a scalar tensor.
    """
    if not isinstance(value, torch.Tensor):
        remedy = "leave out .item() and float()"
        if value is None:
            remedy = "its last line must be `return ...`"
        elif not isinstance(value, int | float):
            remedy = "return only the loss"
        raise DataError(f"expected a tensor as loss, got {type(value).__name__}: {remedy}")
    if value.dim():
        raise DataError(
            f"expected a loss that is one sum, got shape {tuple(value.shape)}: add .sum()"
        )
    return value


def missing_gradient_error() -> DataError:
    """Return the error for a loss without a gradient."""
    return DataError(
        "expected a loss that depends on a trainable tensor, got one that does not: leave out "
        "detach(), no_grad(), inference_mode() and .data, and pass use_reentrant=False to "
        "checkpoint"
    )


def check_weight(value: object) -> float:
    """Check the value of a weight.

    Raises:
        DataError: The value is not a valid weight.
    """
    try:
        weight = float(value)  # type: ignore[arg-type]  # raises unless it is a number
    except (TypeError, ValueError, RuntimeError):
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        text = " ".join(repr(value).split())[:100]
        raise DataError(
            f"expected weight to return a finite number, 0 or more, got {text}: return the "
            "number of samples or tokens of the batch that count"
        )
    return weight


def check_metric(
    name: str, metric: Callable[..., Any], value: object
) -> tuple[float, float | None]:
    """Check a metric's value; return its sum and divisor, None for the number of samples.

    Raises:
        DataError: The value is neither a number nor a pair of numbers.
    """
    try:
        if not isinstance(value, tuple):
            return number_of(value), None
        numerator, denominator = value
        return number_of(numerator), number_of(denominator)
    except (TypeError, ValueError, RuntimeError):
        text = " ".join(repr(value).split())[:100]
        code = getattr(metric, "__code__", None)
        location = (
            f" in {PurePath(code.co_filename).name}, line {code.co_firstlineno}" if code else ""
        )
        raise DataError(
            f"expected the metric {name!r}{location} to return a number, or a pair of numbers to "
            f"be divided, got {text}"
        ) from None


def check_metrics(returned_value: object, names: Sequence[str]) -> dict[str, float]:
    """Check the result of `evaluate`: numbers by name.

    Args:
        returned_value: The result.
        names: The names in its first result; empty for the first.

    Raises:
        DataError: The result is not a mapping of numbers, or the names have changed.
    """
    if not isinstance(returned_value, Mapping) or not returned_value:
        raise DataError(
            f"expected metrics by name from evaluate, got {type(returned_value).__name__}: write "
            'return {"f1": ...}'
        )
    metrics: dict[str, float] = {}
    for name, value in returned_value.items():
        try:
            metrics[str(name)] = number_of(value)
        except (TypeError, ValueError, RuntimeError):
            text = " ".join(repr(value).split())[:100]
            raise DataError(
                f"expected evaluate to return a number as {str(name)!r}, got {text}"
            ) from None
    if names and tuple(sorted(metrics)) != tuple(names):
        raise DataError(
            f"expected evaluate to return {', '.join(names)} each time, got "
            f"{', '.join(sorted(metrics))}"
        )
    return metrics


def number_of(value: Any) -> float:
    """Convert the value of a loss or a metric, possibly a tensor with a gradient, to a float.

    Raises:
        TypeError, ValueError, RuntimeError: The value is not a number.
    """
    if isinstance(value, str | bytes):
        raise TypeError
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def check_precision(value: object) -> ComputePrecision:
    """Check the argument `precision`.

    Raises:
        DataError: The argument is not one of `PRECISIONS`.
    """
    for precision in PRECISIONS:
        if isinstance(value, str) and value == precision:
            return precision
    *first_names, last_name = PRECISIONS
    raise DataError(f"precision: expected {', '.join(first_names)} or {last_name}, got {value!r}")


def check_draws(
    samples: Sequence[int],
    batches: Sequence[Mapping[str, Any]],
    generator_positions: Sequence[object],
) -> None:
    """Check that each read of samples draws anew, and makes the same batch with the same seed.

    Args:
        samples: The numbers of the samples.
        batches: The arrays of two reads.
        generator_positions: Positions of the generators after each read; empty if no generator can
            be used.

    Raises:
        DataError: The batches differ, or the two reads used the generators differently.
    """
    numbers = ", ".join(map(str, samples))
    if digest_arrays(batches[0]) != digest_arrays(batches[1]):
        raise DataError(
            f"expected the same batch from samples {numbers} at each read with the same seed, got "
            "a different one: draw from torch's, numpy's or Python's global generator, or from one "
            "that is an attribute of data set or collator"
        )
    if generator_positions[:1] != generator_positions[1:]:
        raise DataError(
            f"expected new draws at each read, got a data set (or collator) that keeps its draws "
            f"from the first read of samples {numbers}: batches would depend on the worker's "
            "earlier reads; draw at each read, or for all samples in build"
        )


def check_reproducible(
    first_loss: torch.Tensor, second_loss: torch.Tensor, changed_state: str | None
) -> None:
    """Check that a loss is the same for the same batch and seed.

    Args:
        first_loss: The loss of a batch.
        second_loss: The loss of the same batch with the same seed.
        changed_state: The state that changed between the two, if known.

    Raises:
        DataError: The two differ.
    """
    if not torch.equal(first_loss.nan_to_num(), second_loss.nan_to_num()):
        cause = f", because {changed_state} changes" if changed_state else ""
        raise DataError(
            f"expected the same loss for the same samples and seed, got {float(first_loss):.9g} "
            f"and then {float(second_loss):.9g}{cause}: draw with torch's functions, which are "
            "seeded for each microbatch, and keep no state in the model that forward changes"
        )


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
