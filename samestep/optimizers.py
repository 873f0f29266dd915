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
from samestep.torch_translation import TRANSLATIONS, Settings, translate_settings

_IGNORED_SETTINGS: Final = {
    "lr", "weight_decay", "params", "param_names", "name", "initial_lr", "max_lr", "min_lr",
    "base_momentum", "max_momentum", "foreach", "fused", "capturable", "differentiable",
}  # fmt: skip
"""Entries of torch's groups that may differ between groups, or that do not affect the result."""
_RULES: Final = (
    "sgd, momentum, nesterov, adam, adamw, rmsprop, adagrad, adafactor, lion or schedule-free"
)


@dataclass(frozen=True, slots=True)
class OptimizerArguments:
    """The arguments of `fit` that define the optimizer.

    Attributes:
        optimizer: A name; a run spec's section; an optimizer of torch; a class of optimizers or a
            partial of one, called with the parameters; or a function of the module that returns an
            optimizer.
        scheduler: A torch scheduler of the optimizer, or a function of the optimizer that returns
            one; None for a constant rate.
        interval: Whether the scheduler steps after each step or after each epoch.
        extra_keys: Keys of the section `optimizer` that a torch object cannot express, such as
            `clip_norm`.
    """

    optimizer: object
    scheduler: object = None
    interval: Interval = "step"
    extra_keys: Mapping[str, Any] | None = None

    @property
    def is_section(self) -> bool:
        """Whether the optimizer is a name or a mapping, not an object of torch."""
        return isinstance(self.optimizer, str | Mapping)

    def named_section(self) -> dict[str, Any]:
        """Return the section of a name or a mapping; empty for an optimizer of torch."""
        if isinstance(self.optimizer, str):
            return {"name": self.optimizer}
        return dict(self.optimizer) if isinstance(self.optimizer, Mapping) else {}

    def check(self) -> None:
        """Check the arguments as far as possible before the module is built.

        Raises:
            DataError: The optimizer or scheduler cannot be translated.
        """
        if self.extra_keys is not None and not isinstance(self.extra_keys, Mapping):
            raise DataError(
                "settings: expected a mapping as 'optimizer', got "
                f"{type(self.extra_keys).__name__}: write settings={{'optimizer': {{'clip_norm': "
                "1.0}}"
            )
        if self.is_section:
            for name, value in (
                ("scheduler", self.scheduler),
                ("settings: optimizer", self.extra_keys),
            ):
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
                "update per step, so optimizers that take turns (GANs) are not supported; if one "
                "loss reaches the parameters of all of them, give one optimizer with several "
                "groups of parameters"
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
                scheduler = _call_user_function(scheduler, optimizer, "scheduler")
            check_scheduler(scheduler, optimizer)
        interval_steps = epoch_steps if self.interval == "epoch" else 1
        schedules = group_schedules(optimizer, scheduler, -(-steps // interval_steps))
        section = _make_section(optimizer, schedules, module, interval_steps, steps)
        extra_keys = dict(self.extra_keys or {})
        if isinstance(scheduler, ReduceLROnPlateau):
            section |= plateau_of(scheduler, section["lr"])
            if isinstance(metric := extra_keys.pop("plateau", {}), Mapping):
                section["plateau"] |= metric
        if duplicate_keys := sorted(section.keys() & extra_keys.keys()):
            raise DataError(
                f"settings: expected keys of optimizer that torch's object does not set, got "
                f"{duplicate_keys[0]!r}: leave it out"
            )
        return {**section, **extra_keys}


def _optimizer_for(source: Any, module: nn.Module) -> Optimizer:
    """Return the optimizer object, created for the module if the source is a class or a
    function."""
    if isinstance(source, Optimizer):
        return source
    factory = source.func if isinstance(source, partial) else source
    trained_parameters = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    if inspect.isclass(factory) and issubclass(factory, Optimizer):
        parameters: Any = (
            trained_parameters
            if factory in TRANSLATIONS
            else [parameter for _, parameter in trained_parameters]
        )
        optimizer = _call_user_function(source, parameters, "optimizer")
    else:
        optimizer = _call_user_function(source, module, "optimizer")
    if not isinstance(optimizer, Optimizer):
        raise DataError(
            f"optimizer: expected a function of the module that returns an optimizer of torch, got "
            f"one that returns {type(optimizer).__name__}"
        )
    _refuse_untranslatable(optimizer)
    return optimizer


def _call_user_function(function: Any, argument: object, name: str) -> Any:
    try:
        return function(argument)
    except Exception as error:
        raise DataError(f"{name} raised {type(error).__name__}: {error}") from error


def _refuse_untranslatable(optimizer: Optimizer) -> None:
    optimizer_class, first_group = type(optimizer), optimizer.param_groups[0]
    translation = translate_settings(optimizer_class, first_group)
    if translation is None:
        owner, name = optimizer_class.__module__.partition(".")[0], optimizer_class.__name__
        display_name = f"{owner}'s {name}" if owner in {"torch", "transformers"} else name
        raise DataError(
            f"optimizer: {display_name} has no exact equivalent here: write optimizer="
            f'{{"name": "adamw", "lr": {_adamw_rate(optimizer_class, first_group)}}}, or another '
            f"rule: {_RULES}"
        )
    unsupported = translation[1]
    for group in optimizer.param_groups[1:]:
        unsupported += [
            f"groups of parameters with other {name}"
            for name in first_group
            if name not in _IGNORED_SETTINGS and group.get(name) != first_group[name]
        ]
    if unsupported:
        raise DataError(
            f"optimizer: torch's {optimizer_class.__name__} cannot be translated with "
            f"{', '.join(dict.fromkeys(unsupported))}: leave it out, or choose another rule: "
            f"{_RULES}"
        )
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise DataError(
            f"optimizer: expected the step of {optimizer_class.__name__}, got an object whose step "
            "was replaced: workers would not run it; leave the replacement out"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:  # noqa: SLF001
        raise DataError(
            f"optimizer: expected no step hooks, got some on {optimizer_class.__name__}: workers "
            "would not run them; leave register_step_pre_hook and register_step_post_hook out"
        )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise DataError(
            f"optimizer: expected one that has taken no step, got {optimizer_class.__name__} with "
            "state: create a new one; a run keeps its own state, and resume=True continues it"
        )


def _adamw_rate(optimizer_class: type, group: Settings) -> float:
    """Return the learning rate to suggest for AdamW: the initial rate for a variant of Adam, else
    the default."""
    rate = group.get("initial_lr") or group.get("lr")
    return float(rate) if rate and "adam" in optimizer_class.__name__.lower() else 1e-3


def _has_stepped(state: Settings) -> bool:
    return (
        bool(float(state["step"]))
        if "step" in state
        else any(value is not None for value in state.values())
    )


def _make_section(
    optimizer: Optimizer,
    schedules: Sequence[GroupSchedule],
    module: nn.Module,
    interval_steps: int,
    steps: int,
) -> dict[str, Any]:
    groups, rates = optimizer.param_groups, [item.rates for item in schedules]
    base_index = _base_group_index(rates)
    translation = translate_settings(type(optimizer), groups[base_index])
    assert translation is not None, "checked by _refuse_untranslatable"
    section = {**translation[0], **schedule_of(rates[base_index], interval_steps, steps)}
    if momenta := schedules[base_index].momenta:
        section["momenta"] = by_step(momenta, interval_steps, steps)
    if any(item.momenta != momenta for item in schedules):
        raise DataError(
            "scheduler: expected one momentum for all groups of parameters, got several: give all "
            "groups the same momentum"
        )
    decay = float(groups[base_index]["weight_decay"])
    if decay:
        section |= {"weight_decay": decay, "no_decay": []}
    names = _names_by_group(optimizer, module)
    tensors_by_rule: dict[tuple[tuple[float, ...], float], list[str]] = {}
    for group, group_rates, tensors in zip(groups, rates, names, strict=True):
        scales = scales_between(group_rates, rates[base_index])
        if len(scales) > 1:
            scales = by_step(scales, interval_steps, steps)
        tensors_by_rule.setdefault((tuple(scales), float(group["weight_decay"])), []).extend(
            tensors
        )
    grouped_names = {name for item in names for name in item}
    trained_names = [name for name, p in module.named_parameters() if p.requires_grad]
    ungrouped_names = [name for name in trained_names if name not in grouped_names]
    tensors_by_rule.setdefault(((0.0,), 0.0), []).extend(ungrouped_names)
    tensors_by_rule.pop(((1.0,), decay), None)
    if rules := [
        _make_rule(*rule, tensors, decay) for rule, tensors in tensors_by_rule.items() if tensors
    ]:
        section["groups"] = rules
    return section


def _base_group_index(rates: Sequence[Rates]) -> int:
    """Return the index of the group whose rates become the section's: the rates that are 0 least
    often.

    Raises:
        DataError: All rates are 0.
    """
    best_index = max(range(len(rates)), key=lambda group: sum(rate > 0 for rate in rates[group]))
    if not max(rates[best_index]):
        raise DataError(
            "optimizer: expected a learning rate above 0, got 0 in every group: set lr in one of "
            "them"
        )
    return best_index


def _make_rule(
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
    trained_parameters = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    names_by_id = {id(parameter): name for name, parameter in trained_parameters.items()}
    names: list[list[str]] = []
    for group in optimizer.param_groups:
        param_names = group.get("param_names") or [None] * len(group["params"])
        group_names = []
        for tensor, name in zip(group["params"], param_names, strict=True):
            trained_name = names_by_id.get(id(tensor), name if name in trained_parameters else None)
            if trained_name is not None:
                group_names.append(trained_name)
            elif tensor.requires_grad:
                raise DataError(
                    f"optimizer: expected parameters of the module that build returns, got a "
                    f"tensor of shape {tuple(tensor.shape)} of another: create module and "
                    "optimizer before build, or write optimizer=lambda module: "
                    f"torch.optim.{type(optimizer).__name__}(module.parameters(), ...)"
                )
        names.append(group_names)
    return names
