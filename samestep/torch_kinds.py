"""What torch's optimizers compute, as keys of a run spec's section `optimizer`.

By exact class, since a subclass may compute something else. Each function takes the settings of a
group and returns the section without rates, and the settings that have no equivalent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

Settings = Mapping[str, Any]
Translated = tuple[dict[str, Any], list[str]]

_UNSUPPORTED: Final = ("dampening", "maximize", "amsgrad")
"""Settings that have no equivalent here unless they are off."""


def section_of_settings(kind: type, settings: Settings) -> Translated | None:
    """Translate the settings of a group; None if the class has no exact equivalent."""
    if kind not in KINDS:
        return None
    section, unsupported = KINDS[kind](settings)
    unsupported += [f"{name}={settings[name]!r}" for name in _UNSUPPORTED if settings.get(name)]
    return section, unsupported


def _sgd(settings: Settings) -> Translated:
    if not settings["momentum"]:
        return {"name": "sgd"}, []
    name = "nesterov" if settings["nesterov"] else "momentum"
    return {"name": name, "momentum": float(settings["momentum"])}, []


def _adam(settings: Settings, *, decoupled: bool = False) -> Translated:
    is_decoupled = decoupled or settings.get("decoupled_weight_decay")
    section = {
        "name": "adamw" if is_decoupled else "adam",
        "betas": [float(beta) for beta in settings["betas"]],
        "eps": float(settings["eps"]),
    }
    return section, []


def _rmsprop(settings: Settings) -> Translated:
    section = {
        "name": "rmsprop", "alpha": float(settings["alpha"]), "eps": float(settings["eps"]),
    }  # fmt: skip
    return section, _set(settings, "momentum", "centered")


def _adagrad(settings: Settings) -> Translated:
    section = {"name": "adagrad", "eps": float(settings["eps"])}
    return section, _set(settings, "lr_decay", "initial_accumulator_value")


def _set(settings: Settings, *names: str) -> list[str]:
    return [f"{name}={settings[name]!r}" for name in names if settings[name]]


KINDS: Final[dict[type, Callable[[Settings], Translated]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: partial(_adam, decoupled=True),
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
}
"""Classes that have an exact equivalent."""
