"""Read the learning rates of torch's schedulers from a copy that steps through the whole run.

The run spec then names a schedule with the same rates, or lists the rates.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from protocol.base.errors import DataError
from protocol.exact.schedule import learning_rate
from protocol.spec.sections.optimizer import OptimizerSpec
from samestep.torch_translation import rate_of

Interval = Literal["step", "epoch"]
Rates = list[float]
"""The learning rate of each step, or of each epoch."""

_RATE_TOLERANCE: Final = 1e-9
"""Rates are equal if they differ by at most this share of the highest rate; float32 resolves
1e-7."""
_SCHEDULER_ENTRIES: Final = {
    "params", "param_names", "lr", "momentum", "initial_lr", "max_lr", "min_lr", "base_momentum",
    "max_momentum",
}  # fmt: skip
"""Entries of a group that a scheduler may change, or that are not settings."""
_PLATEAU_EPS: Final = 1e-8
"""ReduceLROnPlateau's smallest change of the rate, as in `protocol.exact.plateau`."""
_MAX_RATES: Final = 8_000
"""Maximum number of rates in a run spec, which may have 256 KiB."""


class GroupSchedule(NamedTuple):
    """Learning rate and momentum of a group of parameters, at each step of a scheduler.

    Attributes:
        rates: The learning rate.
        momenta: Momentum, or the first of Adam's betas; empty if it does not change.
    """

    rates: list[float]
    momenta: list[float]


def group_schedules(
    optimizer: torch.optim.Optimizer, scheduler: object, count: int
) -> list[GroupSchedule]:
    """Return the schedule of each group of parameters, read from a copy of the scheduler.

    Args:
        optimizer: The optimizer; not changed.
        scheduler: A scheduler of this optimizer, not changed, or None.
        count: Number of the scheduler's steps to read. Without a scheduler, and for
            `ReduceLROnPlateau`, only each group's current rate is read.

    Raises:
        DataError: The scheduler changes another setting, or fails.
    """
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return [GroupSchedule([rate_of(group)], []) for group in optimizer.param_groups]
    copied_scheduler = _copy_scheduler(optimizer, scheduler)
    groups = copied_scheduler.optimizer.param_groups
    initial_settings = [_other_settings(group) for group in groups]
    schedules: list[GroupSchedule] = [GroupSchedule([], []) for _ in groups]
    for _ in _step_through(copied_scheduler, count):
        for group, schedule, initial in zip(groups, schedules, initial_settings, strict=True):
            schedule.rates.append(rate_of(group))
            schedule.momenta.append(_momentum(group))
            settings = _other_settings(group)
            if changed_names := [name for name in initial if settings[name] != initial[name]]:
                raise DataError(
                    "scheduler: expected one that changes only lr and momentum, got "
                    f"{type(copied_scheduler).__name__}, which changes {changed_names[0]} too: "
                    "leave it out"
                )
    return [
        item if len(set(item.momenta)) > 1 else GroupSchedule(item.rates, []) for item in schedules
    ]


def _momentum(group: Mapping[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def _other_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that a scheduler may not change."""
    settings = {name: value for name, value in group.items() if name not in _SCHEDULER_ENTRIES}
    if "betas" in settings:
        settings["betas"] = settings["betas"][1:]
    return settings


def check_scheduler(scheduler: object, optimizer: object) -> None:
    """Check that a scheduler's rates can be read before the run.

    Raises:
        DataError: The object is not a torch scheduler, or belongs to another optimizer.
    """
    class_name = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise DataError(
            f"scheduler: expected a scheduler of torch, or a function of the optimizer that "
            f"returns one, got {class_name}"
        )
    if "step" in vars(scheduler):
        raise DataError(
            f"scheduler: expected the step of {class_name}, got an object whose step was replaced: "
            "workers would not run it; leave the replacement out"
        )
    if scheduler.optimizer is not optimizer:
        raise DataError(
            f"scheduler: expected one of the optimizer that fit gets, got {class_name} of another: "
            "create it with that optimizer"
        )


def plateau_of(scheduler: ReduceLROnPlateau, rate: float) -> dict[str, Any]:
    """Return the keys of a run spec's section `optimizer` for a rate that follows a metric.

    The metric is the held-out loss, unless `fit(settings=...)` names another one.

    Args:
        scheduler: The scheduler.
        rate: The learning rate `lr` of the section.

    Raises:
        DataError: There is a minimum rate beside several groups, another `eps` than 1e-8, or the
            scheduler has taken a step.
    """
    min_rates = set(scheduler.min_lrs)
    if len(min_rates) > 1 or (max(min_rates) and len(scheduler.min_lrs) > 1):
        raise DataError(
            "scheduler: expected one lowest rate for ReduceLROnPlateau, got min_lr beside several "
            "groups of parameters: leave min_lr out"
        )
    if scheduler.last_epoch or scheduler.eps != _PLATEAU_EPS:
        raise DataError(
            "scheduler: expected a new ReduceLROnPlateau with eps 1e-8, got another: create a "
            "new one, and leave eps out"
        )
    plateau = {
        "metric": "loss",
        "better": "lower" if scheduler.mode == "min" else "higher",
        "factor": scheduler.factor,
        "patience": scheduler.patience,
        "threshold": scheduler.threshold,
        "threshold_mode": scheduler.threshold_mode,
        "cooldown": scheduler.cooldown,
    }
    section: dict[str, Any] = {"lr": rate, "schedule": "plateau", "plateau": plateau}
    return section | ({"min_lr_ratio": max(min_rates) / rate} if max(min_rates) else {})


def _copy_scheduler(optimizer: torch.optim.Optimizer, scheduler: object) -> Any:
    """Copy a scheduler and its optimizer without the parameters."""
    placeholder = torch.nn.Parameter(torch.zeros(()))
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copy.deepcopy(scheduler, {id(tensor): placeholder for tensor in tensors})


def _step_through(scheduler: Any, count: int) -> Iterator[int]:
    """Yield the number of each of the scheduler's steps, from 0, stepping the scheduler between
    them."""
    for index in range(count):
        yield index
        if index + 1 == count:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a missing optimizer.step()
                scheduler.step()
        except Exception as error:
            raise DataError(
                f"scheduler: {type(scheduler).__name__} raised {type(error).__name__} at step "
                f"{index + 2} of {count}: {error}"
            ) from error


def scales_between(rates: Rates, base: Rates) -> list[float]:
    """Return the ratio of two groups' rates: one value, or one for each rate if it changes.

    Raises:
        DataError: The base is 0 where the other group is not.
    """
    peak_index = max(range(len(base)), key=base.__getitem__)
    scale = rates[peak_index] / base[peak_index]
    tolerance = _RATE_TOLERANCE * max(*rates, *base)
    if all(
        abs(rate - scale * base_rate) <= tolerance
        for rate, base_rate in zip(rates, base, strict=True)
    ):
        return [float(f"{scale:.12g}")]  # 0.1, not 0.09999999999999999
    if any(rate and not base_rate for rate, base_rate in zip(rates, base, strict=True)):
        raise DataError(
            "scheduler: expected a group of parameters whose rate is 0 only where all others are, "
            "got none: let the rates begin above 0"
        )
    return [
        rate / base_rate if base_rate else 1.0 for rate, base_rate in zip(rates, base, strict=True)
    ]


def by_step(values: Sequence[float], interval_steps: int, steps: int) -> list[float]:
    """Return a list with an entry for each step; repetitions of the last entry are left out.

    Args:
        values: An entry for each interval.
        interval_steps: Steps of an interval.
        steps: Steps of the run.

    Raises:
        DataError: There are too many entries to list.
    """
    step_values = [values[step // interval_steps] for step in range(steps)]
    while len(step_values) > 1 and step_values[-1] == step_values[-2]:
        step_values.pop()
    if len(step_values) > _MAX_RATES:
        raise DataError(
            f"scheduler: expected at most {_MAX_RATES} different steps for momentum or for groups "
            f"whose ratio changes, got {len(step_values)}: keep them constant, or train for fewer "
            "steps"
        )
    return step_values


def schedule_of(rates: Rates, interval_steps: int, steps: int) -> dict[str, Any]:
    """Return the keys of a run spec's section `optimizer` that have these rates.

    Args:
        rates: The rate of each interval; the highest is above 0.
        interval_steps: Steps of an interval.
        steps: Steps of the run.

    Raises:
        DataError: There are too many rates to list, and no schedule by name has them.
    """
    highest_rate = max(rates)
    if min(rates) == highest_rate:
        return {"lr": highest_rate}
    if (
        named_schedule := _find_named_schedule(
            [rates[step // interval_steps] for step in range(steps)]
        )
    ) is not None:
        return named_schedule
    interval_rates = [*rates]
    while interval_rates[-1] == interval_rates[-2]:
        interval_rates.pop()
    if len(interval_rates) > _MAX_RATES:
        raise DataError(
            f"scheduler: expected at most {_MAX_RATES} rates to list, got {len(interval_rates)} "
            "that no schedule by name has: step it once per epoch (scheduler_interval='epoch'), "
            "or write optimizer={..., 'schedule': 'cosine'} or another of docs/run-spec.md"
        )
    interval_keys = {"rates_every": interval_steps} if interval_steps > 1 else {}
    return {
        "lr": highest_rate, "schedule": "rates",
        "rates": [rate / highest_rate for rate in interval_rates],
        **interval_keys,
    }  # fmt: skip


def _find_named_schedule(rates: Rates) -> dict[str, Any] | None:
    """Find a schedule by name with these rates."""
    highest_rate, steps = max(rates), len(rates)
    peak = rates.index(highest_rate)
    warmups: list[dict[str, Any]] = [{}]
    if peak:
        is_from_zero = rates[0] == 0.0
        warmup = {
            "warmup_steps": peak if is_from_zero else peak + 1,
            "warmup_from_zero": is_from_zero,
        }
        warmups = [{name: value for name, value in warmup.items() if value}]
    for warmup, name in (
        (warmup_keys, schedule_name)
        for warmup_keys in warmups
        for schedule_name in ("constant", "linear", "cosine")
    ):
        document = {"lr": highest_rate, "schedule": name, **warmup}
        if name != "constant":
            lowest_ratio = _min_rate_ratio(document, rates)
            document |= {"min_lr_ratio": lowest_ratio} if lowest_ratio else {}
        spec = OptimizerSpec.model_validate({"name": "adamw", **document})
        schedule_rates = (learning_rate(spec, step, steps) for step in range(steps))
        if all(
            abs(schedule_rate - rate) <= _RATE_TOLERANCE * highest_rate
            for schedule_rate, rate in zip(schedule_rates, rates, strict=True)
        ):
            return document
    return None


def _min_rate_ratio(document: dict[str, Any], rates: Rates) -> float:
    """Return the `min_lr_ratio` with which a schedule ends at the last rate; 0 if none does."""
    spec = OptimizerSpec.model_validate({"name": "adamw", **document})
    steps = len(rates)
    share = learning_rate(spec, steps - 1, steps) / spec.lr
    ratio = (rates[-1] / spec.lr - share) / (1.0 - share) if share < 1.0 else 0.0
    return float(f"{ratio:.12g}") if _RATE_TOLERANCE < ratio < 1.0 else 0.0
