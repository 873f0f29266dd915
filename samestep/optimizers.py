"""Converts the argument `optimizer` of `fit` to a section of a run spec.

torch's optimizers are not used, because every machine applies the same exact update. For one of
torch's the error names the equivalent section, its groups of parameters included, and the settings
that have no equivalent.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from glob import escape
from typing import Any, Final

import torch

from protocol.base.errors import DataError

Settings = Mapping[str, Any]

_UNSUPPORTED: Final = ("dampening", "maximize", "amsgrad")
"""Settings of torch's optimizers that have no equivalent here unless they are off."""
_GROUPED: Final = {"lr", "weight_decay", "params", "param_names", "name", "initial_lr"}
"""Entries of torch's groups that groups here have, or do not need."""


def optimizer_of(optimizer: object) -> dict[str, Any]:
    """Return the section `optimizer` of a run spec.

    Raises:
        DataError: It is one of torch's optimizers, or no optimizer at all.
    """
    if isinstance(optimizer, str):
        return {"name": optimizer}
    if isinstance(optimizer, Mapping):
        return dict(optimizer)
    kind, settings = _torch_optimizer(optimizer)
    if kind is None:
        raise DataError(
            f"expected an optimizer such as {{'name': 'adamw', 'lr': 1e-3}}, got "
            f"{type(optimizer).__name__}"
        )
    problem = f"expected an optimizer by name, got torch's {kind.__name__}"
    if kind not in _SECTIONS:
        raise DataError(
            f"{problem}, which has no exact equivalent here: write "
            f'optimizer={{"name": "adamw", "lr": {json.dumps(float(settings["lr"]))}}}, or sgd, '
            "momentum, nesterov, adam, rmsprop, adagrad, lion or schedule-free"
        )
    section, unsupported = _SECTIONS[kind](settings)
    unsupported += [f"{name}={settings[name]!r}" for name in _UNSUPPORTED if settings.get(name)]
    if section.get("weight_decay"):
        section["no_decay"] = []
    groups, others = _groups(optimizer, settings)
    unsupported += others
    if groups:
        section["groups"] = groups
    suffix = f"; without an equivalent: {', '.join(unsupported)}" if unsupported else ""
    raise DataError(
        f"{problem}: every machine takes the same exact update, so write "
        f"optimizer={json.dumps(section)}{suffix}"
    )


def _torch_optimizer(given: object) -> tuple[type | None, Settings]:
    """Class and settings of a torch optimizer, given as an instance, a class or a partial."""
    if isinstance(given, torch.optim.Optimizer):
        return type(given), given.param_groups[0]
    more: Settings = {}
    if isinstance(given, partial):
        more, given = given.keywords, given.func
    if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
        return None, {}
    parameters = inspect.signature(given).parameters.values()
    usual = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    return given, {"lr": 1e-3, **usual, **more}


def _groups(given: object, first: Settings) -> tuple[list[dict[str, Any]], list[str]]:
    """Return `optimizer.groups` for an instance's groups after the first, and what they cannot say.

    torch knows the names only if the optimizer was made from `named_parameters()`.
    """
    groups = given.param_groups if isinstance(given, torch.optim.Optimizer) else []
    found, others = [], set[str]()
    for number, group in enumerate(groups[1:], 2):
        names = group.get("param_names")
        match = [f"names of the {len(group['params'])} tensors of group {number}"]
        section: dict[str, Any] = {"match": match if names is None else list(map(escape, names))}
        if group["lr"] != first["lr"]:
            section["lr_scale"] = float(group["lr"]) / float(first["lr"])
        if group.get("weight_decay") != first.get("weight_decay"):
            section["weight_decay"] = float(group["weight_decay"])
        others |= {n for n in first.keys() - _GROUPED if group.get(n) != first[n]}
        if len(section) > 1:
            found.append(section)
    words = " and ".join(sorted(others))
    return found, [f"groups of parameters with other {words}"] if words else []


def _sgd(given: Settings) -> tuple[dict[str, Any], list[str]]:
    name = "sgd"
    if given["momentum"]:
        name = "nesterov" if given["nesterov"] else "momentum"
    section = {"name": name, "lr": float(given["lr"])}
    if given["momentum"]:
        section["momentum"] = float(given["momentum"])
    return _with_decay(section, given), []


def _adam(given: Settings, *, decoupled: bool = False) -> tuple[dict[str, Any], list[str]]:
    section: dict[str, Any] = {
        "name": "adamw" if decoupled or given.get("decoupled_weight_decay") else "adam",
        "lr": float(given["lr"]),
        "betas": [float(beta) for beta in given["betas"]],
        "eps": float(given["eps"]),
    }
    return _with_decay(section, given), []


def _rmsprop(given: Settings) -> tuple[dict[str, Any], list[str]]:
    section: dict[str, Any] = {
        "name": "rmsprop", "lr": float(given["lr"]), "alpha": float(given["alpha"]),
        "eps": float(given["eps"]),
    }  # fmt: skip
    lost = [f"{name}={given[name]!r}" for name in ("momentum", "centered") if given[name]]
    return _with_decay(section, given), lost


def _adagrad(given: Settings) -> tuple[dict[str, Any], list[str]]:
    section: dict[str, Any] = {
        "name": "adagrad", "lr": float(given["lr"]), "eps": float(given["eps"]),
    }  # fmt: skip
    names = ("lr_decay", "initial_accumulator_value")
    return _with_decay(section, given), [f"{n}={given[n]!r}" for n in names if given[n]]


def _with_decay(section: dict[str, Any], given: Settings) -> dict[str, Any]:
    decay = float(given["weight_decay"])
    return {**section, "weight_decay": decay} if decay else section


_SECTIONS: Final[dict[type, Callable[[Settings], tuple[dict[str, Any], list[str]]]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: partial(_adam, decoupled=True),
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
}
"""By exact class, since a subclass may compute something else: section and unsupported settings."""
