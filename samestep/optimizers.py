"""The arguments `optimizer` and `scheduler` of `fit` as a section of a run spec.

torch's optimizers do not run, because their bits depend on the machine. An optimizer object of
torch is translated: its rule, its groups of parameters by the names of their tensors, and the rates
of its scheduler (`samestep.schedulers`). What has no equivalent is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from protocol.base.errors import DataError
from samestep.schedulers import (
    GroupSchedule,
    Interval,
    Rates,
    by_step,
    check_scheduler,
    group_schedules,
    plateau_of,
    scales_between,
    schedule_of,
)
from samestep.torch_kinds import KINDS, Settings, section_of_settings

_GROUPED: Final = {
    "lr", "weight_decay", "params", "param_names", "name", "initial_lr", "max_lr", "min_lr",
    "base_momentum", "max_momentum", "foreach", "fused", "capturable", "differentiable",
}  # fmt: skip
"""Entries of torch's groups that groups here have, or that change no number."""
_RULES: Final = (
    "sgd, momentum, nesterov, adam, adamw, rmsprop, adagrad, adafactor, lion or schedule-free"
)


@dataclass(frozen=True, slots=True)
class OptimizerArguments:
    """What `fit` got as optimizer.

    Attributes:
        optimizer: A name; a run spec's section; an optimizer of torch; or a class, partial or
            function of the module that makes one.
        scheduler: A scheduler of torch for it, or a function of the optimizer; None for a constant
            rate.
        interval: How often the loop would step the scheduler.
        extra: Keys of the section `optimizer` that torch's objects cannot say, such as
            `clip_norm`.
    """

    optimizer: object
    scheduler: object = None
    interval: Interval = "step"
    extra: Mapping[str, Any] | None = None

    @property
    def is_section(self) -> bool:
        """Whether the section is given by name or as a mapping."""
        return isinstance(self.optimizer, str | Mapping)

    def named_section(self) -> dict[str, Any]:
        """The section that is given by name or as a mapping; empty for an optimizer of torch's."""
        if isinstance(self.optimizer, str):
            return {"name": self.optimizer}
        return dict(self.optimizer) if isinstance(self.optimizer, Mapping) else {}

    def check(self) -> None:
        """Check what can be checked before the module is built.

        Raises:
            DataError: It cannot be translated.
        """
        if self.extra is not None and not isinstance(self.extra, Mapping):
            raise DataError(
                "settings: expected keys and values as optimizer, got "
                f"{type(self.extra).__name__}: write settings={{'optimizer': {{'clip_norm': 1.0}}}}"
            )
        if self.is_section:
            for name, value in (("scheduler", self.scheduler), ("settings: optimizer", self.extra)):
                if value is not None:
                    raise DataError(
                        f"{name}: expected none beside an optimizer by name, got one: write "
                        'optimizer={"name": "adamw", "schedule": "cosine", "clip_norm": 1.0}'
                    )
            return
        if isinstance(self.optimizer, Optimizer):
            _refuse_untranslatable(self.optimizer)
            if not callable(self.scheduler) and self.scheduler is not None:
                check_scheduler(self.scheduler, self.optimizer)
        elif isinstance(self.optimizer, tuple | list):
            raise DataError(
                f"expected one optimizer, got {len(self.optimizer)}: a run has one loss and one "
                "update per step, so optimizers that take turns (GANs) are not supported; if each "
                "has parameters of its own and one loss reaches all, give one optimizer with a "
                "group of parameters for each"
            )
        elif not callable(self.optimizer):
            raise DataError(
                f"expected an optimizer such as {{'name': 'adamw', 'lr': 1e-3}} or one of torch's, "
                f"got {type(self.optimizer).__name__}"
            )

    def section(self, module: nn.Module, steps: int, epoch_steps: int) -> dict[str, Any]:
        """Return the section `optimizer` of a run spec.

        Args:
            module: The module to train.
            steps: Steps of the run.
            epoch_steps: Steps of an epoch.

        Raises:
            DataError: torch's optimizer or scheduler has no equivalent.
        """
        if self.is_section:
            return self.named_section()
        optimizer = _optimizer_for(self.optimizer, module)
        scheduler = self.scheduler
        if scheduler is not None:
            if not isinstance(scheduler, LRScheduler):
                scheduler = _called(scheduler, optimizer, "scheduler")
            check_scheduler(scheduler, optimizer)
        interval_steps = epoch_steps if self.interval == "epoch" else 1
        schedules = group_schedules(optimizer, scheduler, -(-steps // interval_steps))
        section = _section(optimizer, schedules, module, interval_steps, steps)
        extra = dict(self.extra or {})
        if isinstance(scheduler, ReduceLROnPlateau):
            section |= plateau_of(scheduler, section["lr"])
            if isinstance(metric := extra.pop("plateau", {}), Mapping):
                section["plateau"] |= metric
        if both := sorted(section.keys() & extra.keys()):
            raise DataError(
                f"settings: expected keys of optimizer that torch's object does not set, got "
                f"{both[0]!r}: leave it out"
            )
        return {**section, **extra}


def _optimizer_for(given: Any, module: nn.Module) -> Optimizer:
    """Return an optimizer object: the given one, or what a class or function makes."""
    if isinstance(given, Optimizer):
        return given
    made_of = given.func if isinstance(given, partial) else given
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if inspect.isclass(made_of) and issubclass(made_of, Optimizer):
        parameters: Any = trained if made_of in KINDS else [p for _, p in trained]
        optimizer = _called(given, parameters, "optimizer")
    else:
        optimizer = _called(given, module, "optimizer")
    if not isinstance(optimizer, Optimizer):
        raise DataError(
            f"optimizer: expected a function of the module that returns an optimizer of torch, got "
            f"one that returns {type(optimizer).__name__}"
        )
    _refuse_untranslatable(optimizer)
    return optimizer


def _called(function: Any, argument: object, name: str) -> Any:
    try:
        return function(argument)
    except Exception as error:
        raise DataError(f"{name} raised {type(error).__name__}: {error}") from error


def _refuse_untranslatable(optimizer: Optimizer) -> None:
    kind, first = type(optimizer), optimizer.param_groups[0]
    translated = section_of_settings(kind, first)
    if translated is None:
        owner, name = kind.__module__.partition(".")[0], kind.__name__
        shown = f"{owner}'s {name}" if owner in {"torch", "transformers"} else name
        raise DataError(
            f"optimizer: {shown} has no exact equivalent here: write optimizer="
            f'{{"name": "adamw", "lr": {_adamw_rate(kind, first)}}}, or another rule: {_RULES}'
        )
    unsupported = translated[1]
    for group in optimizer.param_groups[1:]:
        unsupported += [
            f"groups of parameters with other {name}"
            for name in first
            if name not in _GROUPED and group.get(name) != first[name]
        ]
    if unsupported:
        raise DataError(
            f"optimizer: torch's {kind.__name__} cannot be translated with "
            f"{', '.join(dict.fromkeys(unsupported))}: leave it out, or choose another rule: "
            f"{_RULES}"
        )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise DataError(
            f"optimizer: expected one that has taken no step, got {kind.__name__} with state: "
            "create it anew; a run keeps its own state, and resume=True continues it"
        )


def _adamw_rate(kind: type, group: Settings) -> float:
    """The rate to suggest for AdamW: that of a relative of Adam, else its own default."""
    rate = group.get("initial_lr") or group.get("lr")
    return float(rate) if rate and "adam" in kind.__name__.lower() else 1e-3


def _has_stepped(state: Settings) -> bool:
    return (
        bool(float(state["step"]))
        if "step" in state
        else any(value is not None for value in state.values())
    )


def _section(
    optimizer: Optimizer,
    schedules: Sequence[GroupSchedule],
    module: nn.Module,
    interval_steps: int,
    steps: int,
) -> dict[str, Any]:
    groups, rates = optimizer.param_groups, [each.rates for each in schedules]
    base = _base_of(rates)
    translated = section_of_settings(type(optimizer), groups[base])
    assert translated is not None, "checked by _refuse_untranslatable"
    section = {**translated[0], **schedule_of(rates[base], interval_steps, steps)}
    if momenta := schedules[base].momenta:
        section["momenta"] = by_step(momenta, interval_steps, steps)
    if any(each.momenta != momenta for each in schedules):
        raise DataError(
            "scheduler: expected one momentum for all groups of parameters, got several"
        )
    decay = float(groups[base]["weight_decay"])
    if decay:
        section |= {"weight_decay": decay, "no_decay": []}
    names = _names_by_group(optimizer, module)
    found: dict[tuple[tuple[float, ...], float], list[str]] = {}
    for group, own, tensors in zip(groups, rates, names, strict=True):
        scales = scales_between(own, rates[base])
        if len(scales) > 1:
            scales = by_step(scales, interval_steps, steps)
        found.setdefault((tuple(scales), float(group["weight_decay"])), []).extend(tensors)
    listed = {name for each in names for name in each}
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    outside = [name for name in trained if name not in listed]
    found.setdefault(((0.0,), 0.0), []).extend(outside)
    found.pop(((1.0,), decay), None)
    if rules := [_rule(*rule, tensors, decay) for rule, tensors in found.items() if tensors]:
        section["groups"] = rules
    return section


def _base_of(rates: Sequence[Rates]) -> int:
    """Return the group whose rates are the section's: the first that is seldom 0.

    Raises:
        DataError: All are 0.
    """
    base = max(range(len(rates)), key=lambda group: sum(rate > 0 for rate in rates[group]))
    if not max(rates[base]):
        raise DataError("optimizer: expected a learning rate above 0, got 0 in every group")
    return base


def _rule(
    scales: tuple[float, ...], decay: float, tensors: list[str], usual_decay: float
) -> dict[str, Any]:
    rule: dict[str, Any] = {"match": [escape(name) for name in tensors]}
    if len(scales) > 1:
        rule["lr_scales"] = [*scales]
    elif scales != (1.0,):
        rule["lr_scale"] = scales[0]
    if decay != usual_decay:
        rule["weight_decay"] = decay
    return rule


def _names_by_group(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """Return the names of the trained tensors of each group.

    Raises:
        DataError: A tensor belongs to another module.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    by_identity = {id(p): name for name, p in trained.items()}
    names: list[list[str]] = []
    for group in optimizer.param_groups:
        own = group.get("param_names") or [None] * len(group["params"])
        found = []
        for tensor, name in zip(group["params"], own, strict=True):
            known = by_identity.get(id(tensor), name if name in trained else None)
            if known is not None:
                found.append(known)
            elif tensor.requires_grad:
                raise DataError(
                    f"optimizer: expected parameters of the module that build returns, got a "
                    f"tensor of shape {tuple(tensor.shape)} of another: create module and "
                    "optimizer before build, or write optimizer=lambda module: "
                    f"torch.optim.{type(optimizer).__name__}(module.parameters(), ...)"
                )
        names.append(found)
    return names
