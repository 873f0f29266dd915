"""The learning rates of torch's schedulers: read from a copy that steps through the whole run.

A run spec holds either a schedule by name, if one has the same rates, or the list of rates.
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
from samestep.torch_kinds import rate_of

Interval = Literal["step", "epoch"]
Rates = list[float]
"""The learning rate of each step, or of each epoch."""

_SAME: Final = 1e-9
"""Rates are equal if they differ by at most this share of the highest one: float32 has 1e-7."""
_SCHEDULED: Final = {
    "params", "param_names", "lr", "momentum", "initial_lr", "max_lr", "min_lr", "base_momentum",
    "max_momentum",
}  # fmt: skip
"""Entries of a group that a scheduler may change, or that are not settings."""
_USUAL_EPS: Final = 1e-8
"""Of ReduceLROnPlateau: the smallest change of the rate, as in `protocol.exact.plateau`."""
_MOST_RATES: Final = 8_000
"""Rates that a run spec lists; it may have 256 KiB."""


class GroupSchedule(NamedTuple):
    """What a scheduler makes of a group of parameters, in each of its steps.

    Attributes:
        rates: The learning rate.
        momenta: Momentum, or the first of Adam's betas; empty if it does not change.
    """

    rates: list[float]
    momenta: list[float]


def group_schedules(
    optimizer: torch.optim.Optimizer, scheduler: object, count: int
) -> list[GroupSchedule]:
    """Return what a scheduler makes of each group of parameters.

    Args:
        optimizer: The optimizer; not changed.
        scheduler: A scheduler of this optimizer, not changed, or None.
        count: Number of its steps to read.

    Raises:
        DataError: The scheduler changes something else, or fails.
    """
    if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
        return [GroupSchedule([rate_of(group)], []) for group in optimizer.param_groups]
    own = _copied(optimizer, scheduler)
    groups = own.optimizer.param_groups
    before = [_other_settings(group) for group in groups]
    found: list[GroupSchedule] = [GroupSchedule([], []) for _ in groups]
    for _ in _stepped(own, count):
        for group, schedule, unchanged in zip(groups, found, before, strict=True):
            schedule.rates.append(rate_of(group))
            schedule.momenta.append(_momentum(group))
            now = _other_settings(group)
            if changed := [name for name in unchanged if now[name] != unchanged[name]]:
                raise DataError(
                    f"scheduler: expected one that changes lr and momentum, got "
                    f"{type(own).__name__}, which changes {changed[0]} too: leave it out"
                )
    return [each if len(set(each.momenta)) > 1 else GroupSchedule(each.rates, []) for each in found]


def _momentum(group: Mapping[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def _other_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that a scheduler may not change."""
    settings = {name: value for name, value in group.items() if name not in _SCHEDULED}
    if "betas" in settings:
        settings["betas"] = settings["betas"][1:]
    return settings


def check_scheduler(scheduler: object, optimizer: object) -> None:
    """Check that a scheduler's rates can be read before the run.

    Raises:
        DataError: It is none of torch's, or belongs to another optimizer.
    """
    kind = type(scheduler).__name__
    if not isinstance(scheduler, LRScheduler):
        raise DataError(
            f"scheduler: expected a scheduler of torch, or a function of the optimizer that "
            f"returns one, got {kind}"
        )
    if scheduler.optimizer is not optimizer:
        raise DataError(
            f"scheduler: expected one of the optimizer that fit gets, got {kind} of another: "
            "create it with that optimizer"
        )


def plateau_of(scheduler: ReduceLROnPlateau, rate: float) -> dict[str, Any]:
    """Return the keys of a run spec's section `optimizer` for a rate that follows a metric.

    The metric is the held-out loss, which `settings` may change.

    Args:
        scheduler: The scheduler.
        rate: The rate of the section.

    Raises:
        DataError: Its groups have lowest rates of their own, or it has taken a step.
    """
    lowest = set(scheduler.min_lrs)
    if len(lowest) > 1 or (max(lowest) and len(scheduler.min_lrs) > 1):
        raise DataError(
            "scheduler: expected one lowest rate for ReduceLROnPlateau, got min_lr beside several "
            "groups of parameters: leave min_lr out"
        )
    if scheduler.last_epoch or scheduler.eps != _USUAL_EPS:
        raise DataError(
            "scheduler: expected a new ReduceLROnPlateau with eps 1e-8, got another: create it "
            "anew, and leave eps out"
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
    return section | ({"min_lr_ratio": max(lowest) / rate} if max(lowest) else {})


def _copied(optimizer: torch.optim.Optimizer, scheduler: object) -> Any:
    """Copy a scheduler and its optimizer without the parameters."""
    stand_in = torch.nn.Parameter(torch.zeros(()))
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    return copy.deepcopy(scheduler, {id(tensor): stand_in for tensor in tensors})


def _stepped(scheduler: Any, count: int) -> Iterator[int]:
    """Step a scheduler between the items of an iteration."""
    for number in range(count):
        yield number
        if number + 1 == count:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a missing optimizer.step()
                scheduler.step()
        except Exception as error:
            raise DataError(
                f"scheduler: {type(scheduler).__name__} raised {type(error).__name__} at step "
                f"{number + 2} of {count}: {error}"
            ) from error


def scales_between(rates: Rates, base: Rates) -> list[float]:
    """Return the factor between two groups' rates: one, or if it changes, one for each rate.

    Raises:
        DataError: The base is 0 where the other group is not.
    """
    top = max(range(len(base)), key=base.__getitem__)
    scale = rates[top] / base[top]
    most = _SAME * max(*rates, *base)
    if all(abs(one - scale * other) <= most for one, other in zip(rates, base, strict=True)):
        return [float(f"{scale:.12g}")]  # 0.1, not 0.09999999999999999
    if any(one and not other for one, other in zip(rates, base, strict=True)):
        raise DataError(
            "scheduler: expected a group of parameters whose rate is 0 only where all others are, "
            "got none: let the rates begin above 0"
        )
    return [one / other if other else 1.0 for one, other in zip(rates, base, strict=True)]


def by_step(values: Sequence[float], interval_steps: int, steps: int) -> list[float]:
    """Return a list with an entry for each step, without repetitions at the end.

    Args:
        values: An entry for each interval.
        interval_steps: Steps of an interval.
        steps: Steps of the run.

    Raises:
        DataError: There are too many to list.
    """
    listed = [values[step // interval_steps] for step in range(steps)]
    while len(listed) > 1 and listed[-1] == listed[-2]:
        listed.pop()
    if len(listed) > _MOST_RATES:
        raise DataError(
            f"scheduler: expected at most {_MOST_RATES} different steps for momentum or for groups "
            f"whose ratio changes, got {len(listed)}: keep them constant, or train for fewer steps"
        )
    return listed


def schedule_of(rates: Rates, interval_steps: int, steps: int) -> dict[str, Any]:
    """Return the keys of a run spec's section `optimizer` that have these rates.

    Args:
        rates: The rate of each interval; the highest one is above 0.
        interval_steps: Steps of an interval.
        steps: Steps of the run.

    Raises:
        DataError: There are too many to list, and no schedule by name has them.
    """
    highest = max(rates)
    if min(rates) == highest:
        return {"lr": highest}
    if (named := _named([rates[step // interval_steps] for step in range(steps)])) is not None:
        return named
    listed = [*rates]
    while listed[-1] == listed[-2]:
        listed.pop()
    if len(listed) > _MOST_RATES:
        raise DataError(
            f"scheduler: expected at most {_MOST_RATES} rates to list, got {len(listed)} that no "
            "schedule by name has: step it once per epoch (scheduler_interval='epoch'), or write "
            "optimizer={..., 'schedule': 'cosine'} or another of docs/run-spec.md"
        )
    every = {"rates_every": interval_steps} if interval_steps > 1 else {}
    return {
        "lr": highest, "schedule": "rates", "rates": [rate / highest for rate in listed], **every
    }  # fmt: skip


def _named(rates: Rates) -> dict[str, Any] | None:
    """Find a schedule by name with these rates."""
    highest, steps = max(rates), len(rates)
    peak = rates.index(highest)
    warmups: list[dict[str, Any]] = [{}]
    if peak:
        from_zero = rates[0] == 0.0
        warmup = {"warmup_steps": peak if from_zero else peak + 1, "warmup_from_zero": from_zero}
        warmups = [{name: value for name, value in warmup.items() if value}]
    for warmup, name in ((w, n) for w in warmups for n in ("constant", "linear", "cosine")):
        document = {"lr": highest, "schedule": name, **warmup}
        if name != "constant":
            lowest = _lowest(document, rates)
            document |= {"min_lr_ratio": lowest} if lowest else {}
        spec = OptimizerSpec.model_validate({"name": "adamw", **document})
        found = (learning_rate(spec, step, steps) for step in range(steps))
        if all(abs(a - b) <= _SAME * highest for a, b in zip(found, rates, strict=True)):
            return document
    return None


def _lowest(document: dict[str, Any], rates: Rates) -> float:
    """Return the `min_lr_ratio` with which a schedule ends at the last rate; 0 for none."""
    spec = OptimizerSpec.model_validate({"name": "adamw", **document})
    steps = len(rates)
    share = learning_rate(spec, steps - 1, steps) / spec.lr
    lowest = (rates[-1] / spec.lr - share) / (1.0 - share) if share < 1.0 else 0.0
    return float(f"{lowest:.12g}") if _SAME < lowest < 1.0 else 0.0
