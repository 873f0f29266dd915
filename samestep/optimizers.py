"""The argument `optimizer` of `fit` as a section of a run spec.

torch's optimizers are not used: every machine applies the same exact update. One of torch's is
refused with the section that does the same, every setting of it, or with what has no equal.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from protocol.base.errors import DataError

Settings = Mapping[str, Any]

_NOT_PLAIN: Final = ("dampening", "maximize", "amsgrad")
"""Settings of torch's that no update here has, unless they are off."""


def optimizer_of(given: object) -> dict[str, Any]:
    """The section `optimizer` of a run spec.

    Raises:
        DataError: It is torch's, or nothing that says an optimizer.
    """
    if isinstance(given, str):
        return {"name": given}
    if isinstance(given, Mapping):
        return dict(given)
    kind, settings = _torch_optimizer(given)
    if kind is None:
        raise DataError(
            f"expected an optimizer such as {{'name': 'adamw', 'lr': 1e-3}}, got "
            f"{type(given).__name__}"
        )
    told = f"expected an optimizer by name, got torch's {kind.__name__}"
    if kind not in _SECTIONS:
        raise DataError(
            f"{told}, which has no exact equal here: write "
            f'optimizer={{"name": "adamw", "lr": {json.dumps(float(settings["lr"]))}}}, or sgd, '
            "momentum, nesterov, lion or schedule-free"
        )
    section, lost = _SECTIONS[kind](settings)
    lost += [f"{name}={settings[name]!r}" for name in _NOT_PLAIN if settings.get(name)]
    if section.get("weight_decay"):
        section["no_decay"] = []
    lost += _unlike_groups(given, settings)
    without = f"; it has no equal for {', '.join(lost)}" if lost else ""
    raise DataError(
        f"{told}: every machine takes the same exact update, so write "
        f"optimizer={json.dumps(section)}{without}"
    )


def _torch_optimizer(given: object) -> tuple[type | None, Settings]:
    """Class and settings of an optimizer, of a class of them, or of one with some settings set."""
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


def _unlike_groups(given: object, first: Settings) -> list[str]:
    groups = given.param_groups if isinstance(given, torch.optim.Optimizer) else []
    names = [n for n in first if n != "params" and any(g.get(n) != first[n] for g in groups)]
    decay = ", no_decay names the tensors that do not" if "weight_decay" in names else ""
    return [f"groups of parameters with other {' and '.join(names)}{decay}"] if names else []


def _sgd(given: Settings) -> tuple[dict[str, Any], list[str]]:
    name = "sgd"
    if given["momentum"]:
        name = "nesterov" if given["nesterov"] else "momentum"
    section = {"name": name, "lr": float(given["lr"])}
    if given["momentum"]:
        section["momentum"] = float(given["momentum"])
    return _with_decay(section, given), []


def _adam(given: Settings, *, decoupled: bool | None = None) -> tuple[dict[str, Any], list[str]]:
    section: dict[str, Any] = {
        "name": "adamw",
        "lr": float(given["lr"]),
        "betas": [float(beta) for beta in given["betas"]],
        "eps": float(given["eps"]),
    }
    if not given["weight_decay"]:
        return section, []
    if decoupled or given.get("decoupled_weight_decay"):
        return _with_decay(section, given), []
    return section, [f"weight_decay={given['weight_decay']!r} that is added to the gradient"]


def _with_decay(section: dict[str, Any], given: Settings) -> dict[str, Any]:
    decay = float(given["weight_decay"])
    return {**section, "weight_decay": decay} if decay else section


_SECTIONS: Final[dict[type, Callable[[Settings], tuple[dict[str, Any], list[str]]]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: partial(_adam, decoupled=True),
}
"""What does the same here, and what has no equal; a subclass may compute otherwise."""
