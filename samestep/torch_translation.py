"""Translate torch's optimizers to keys of a run spec's section `optimizer`.

Classes are matched exactly, since a subclass may compute something else. Each function takes the
settings of a group, and returns the section without rates and the list of settings that have no
equivalent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

Settings = Mapping[str, Any]
Translation = tuple[dict[str, Any], list[str]]

_UNSUPPORTED: Final = ("dampening", "maximize")
"""Settings that have no equivalent here unless they are off."""


def rate_of(settings: Settings) -> float:
    """Return the learning rate of a group; None of transformers' Adafactor stands for 1e-2."""
    return 1e-2 if settings["lr"] is None else float(settings["lr"])


def translate_settings(optimizer_class: type, settings: Settings) -> Translation | None:
    """Translate the settings of a group; None if the class has no exact equivalent."""
    translate = TRANSLATIONS.get(optimizer_class) or _TRANSLATIONS_BY_NAME.get(
        f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    )
    if translate is None:
        return None
    section, unsupported = translate(settings)
    unsupported += [f"{name}={settings[name]!r}" for name in _UNSUPPORTED if settings.get(name)]
    return section, unsupported


def _sgd(settings: Settings) -> Translation:
    if not settings["momentum"]:
        return {"name": "sgd"}, []
    name = "nesterov" if settings["nesterov"] else "momentum"
    return {"name": name, "momentum": float(settings["momentum"])}, []


def _adam(settings: Settings, *, decoupled: bool = False) -> Translation:
    is_decoupled = decoupled or settings.get("decoupled_weight_decay")
    section = {
        "name": "adamw" if is_decoupled else "adam",
        "betas": [float(beta) for beta in settings["betas"]],
        "eps": float(settings["eps"]),
        **({"amsgrad": True} if settings["amsgrad"] else {}),
    }
    return section, []


def _rmsprop(settings: Settings) -> Translation:
    section: dict[str, Any] = {
        "name": "rmsprop", "alpha": float(settings["alpha"]), "eps": float(settings["eps"]),
    }  # fmt: skip
    if settings["centered"]:
        section["centered"] = True
    if settings["momentum"]:
        section["momentum"] = float(settings["momentum"])
    return section, []


def _adafactor(settings: Settings) -> Translation:
    gradient_eps, parameter_eps = settings["eps"]
    section = {
        "name": "adafactor",
        "beta2_decay": float(settings["beta2_decay"]),
        "clip_threshold": float(settings["d"]),
        "min_parameter_rms": float(parameter_eps),
        "relative_step": True,
    }
    return section, [] if gradient_eps is None else [f"eps={settings['eps']!r}"]


def _adafactor_of_transformers(settings: Settings) -> Translation:
    """Translate `transformers.Adafactor`, which has options that torch's does not."""
    gradient_eps, parameter_eps = settings["eps"]
    scales_by_parameter = bool(settings["scale_parameter"])
    section = {
        "name": "adafactor",
        "beta2_decay": float(settings["decay_rate"]),
        "clip_threshold": float(settings["clip_threshold"]),
        "eps": float(gradient_eps),
        "scale_parameter": scales_by_parameter,
        "relative_step": bool(settings["relative_step"]),
        **({"min_parameter_rms": float(parameter_eps)} if scales_by_parameter else {}),
        **({"warmup_steps": 10_000} if settings["warmup_init"] else {}),  # 1e-6 more each step
    }
    unsupported = [] if settings["beta1"] is None else [f"beta1={settings['beta1']!r}"]
    if settings["weight_decay"] and scales_by_parameter:  # it decays by the scaled rate
        unsupported.append(f"weight_decay={settings['weight_decay']!r} beside scale_parameter=True")
    return section, unsupported


def _adagrad(settings: Settings) -> Translation:
    section = {"name": "adagrad", "eps": float(settings["eps"])}
    return section, _enabled_settings(settings, "lr_decay", "initial_accumulator_value")


def _enabled_settings(settings: Settings, *names: str) -> list[str]:
    return [f"{name}={settings[name]!r}" for name in names if settings[name]]


TRANSLATIONS: Final[dict[type, Callable[[Settings], Translation]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: partial(_adam, decoupled=True),
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adafactor: _adafactor,
}
"""Classes that have an exact equivalent."""
_TRANSLATIONS_BY_NAME: Final[dict[str, Callable[[Settings], Translation]]] = {
    "transformers.optimization.Adafactor": _adafactor_of_transformers,
}
"""Classes with an exact equivalent in packages that are imported only if a script uses them."""
