"""The section `optimizer` of a run spec: the exact update and the learning rate schedule."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from protocol.base import limits
from protocol.base.fields import PRINTABLE, Count, Every, Fraction
from protocol.spec.sections.section import KeyFault, Needs, OmittedByDefault, Section, Tagged

ScheduleName = Literal[
    "constant", "linear", "cosine", "wsd", "polynomial", "cosine-restarts", "inverse-sqrt",
    "onecycle", "piecewise", "rates",
]  # fmt: skip
DecayName = Literal["linear", "cosine", "1-sqrt"]

_FALLING: Final = ("cosine", "linear", "wsd", "polynomial", "cosine-restarts", "onecycle")
_Rate = Annotated[float, Field(ge=0, le=100)]
_INEXACT: Final = {
    "muon": "it orthogonalizes matrices by matrix products, whose bits differ between devices",
    "adafactor": "it divides by sums over rows and columns, but the exact update is elementwise",
    "8bit": "its quantized state depends on one library's kernels on one kind of card",
}
"""Optimizers that users ask for, and why replicas could not agree on their bits."""


def _refusal(name: str) -> str:
    plain = name.lower().replace("-", "").replace("_", "")
    for part, reason in _INEXACT.items():
        if part in plain:
            return f"{name} is not supported: {reason}; use adamw, lion or schedule-free"
    return ""


def _listed(given: Any) -> Any:
    return (
        (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given
    )


_Pattern = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARACTERS, pattern=PRINTABLE)]
_Patterns = Annotated[
    tuple[_Pattern, ...],
    BeforeValidator(_listed),
    Field(min_length=1, max_length=limits.TENSORS),
]


class ParameterGroup(Section):
    """Tensors by name, and how their update differs; the first group that matches counts."""

    match: _Patterns = Field(
        description="names of tensors, in which * stands for any characters and ? for one; each "
        "must match a tensor"
    )
    lr_scale: float = Field(
        1.0, ge=0, le=1e3, description="factor of lr; 0 leaves the tensors as they are"
    )
    weight_decay: float | None = Field(
        None, ge=0, le=1e3, description="weight decay of all these tensors, whatever no_decay says"
    )


class OptimizerSpec(Section):
    """The exact update (`protocol.exact.update`) and its schedule.

    The bounds keep every scalar of an update within float32.
    """

    name: str = Field("adamw", description="the update rule")
    lr: float = Field(1e-3, ge=1e-30, le=1e3, description="learning rate")
    momentum: Fraction = Field(0.9, description="share of the velocity that a step keeps")
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.999), description="decay rates of the moments; usual for lion: 0.9, 0.99"
    )
    alpha: Fraction = Field(0.99, description="rmsprop: decay rate of the squared gradients")
    eps: float = Field(1e-8, ge=1e-30, le=1e3, description="added to the denominator")
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1e3,
        description="adamw and lion: decoupled from the gradient; others: added to the gradient",
    )
    no_decay: Annotated[tuple[str, ...], Needs("weight_decay")] = Field(
        ("bias", "norm"), description="tensors whose names contain one of these do not decay"
    )
    groups: Annotated[tuple[ParameterGroup, ...], OmittedByDefault()] = Field(
        (), max_length=1000, description="rules for tensors by name"
    )
    clip_norm: float | None = Field(
        None, gt=0, description="clip the gradient's norm to this value; default: never"
    )
    schedule: ScheduleName = Field("constant", description="shape of lr after the warmup")
    warmup_steps: Every = Field(0, description="steps in which lr rises")
    warmup_from_zero: Annotated[bool, Needs("warmup_steps")] = Field(
        default=False, description="lr is 0 in the first step, as in transformers"
    )
    min_lr_ratio: Annotated[Fraction, Needs("schedule", _FALLING)] = Field(
        0.0, description="final lr, as a share of lr"
    )
    power: Annotated[float, Needs("schedule", ("polynomial",))] = Field(
        1.0, gt=0, le=100, description="polynomial: exponent of the remaining share of steps"
    )
    cycles: Annotated[int, Needs("schedule", ("cosine-restarts",))] = Field(
        1, ge=1, le=10_000, description="cosine-restarts: how often lr falls from its full value"
    )
    rise_ratio: Annotated[float, Needs("schedule", ("onecycle",))] = Field(
        0.3, gt=0, lt=1, description="onecycle: share of all steps, at the start, in which lr rises"
    )
    start_lr_ratio: Annotated[Fraction, Needs("schedule", ("onecycle",))] = Field(
        0.04, description="onecycle: lr of the first step, as a share of lr"
    )
    milestones: Annotated[tuple[Every, ...], Needs("schedule", ("piecewise",))] = Field(
        (), max_length=1000, description="piecewise: steps at which lr is multiplied by gamma"
    )
    gamma: Annotated[float, Needs("schedule", ("piecewise",))] = Field(
        0.1, gt=0, le=10, description="piecewise: the factor at each milestone"
    )
    rates: Annotated[tuple[_Rate, ...], Needs("schedule", ("rates",))] = Field(
        (), max_length=100_000,
        description="rates: lr of each step as a share of lr; the last one holds from then on",
    )  # fmt: skip
    rates_every: Annotated[Count, Needs("schedule", ("rates",)), OmittedByDefault()] = Field(
        1, description="rates: steps that each entry of rates holds for, such as those of an epoch"
    )
    decay_ratio: Annotated[float, Needs("schedule", ("wsd",))] = Field(
        0.1, gt=0.0, le=1.0, description="wsd: share of all steps, at the end, in which lr decays"
    )
    decay: Annotated[DecayName, Needs("schedule", ("wsd",))] = Field(
        "linear", description="wsd: shape of the decay"
    )

    @model_validator(mode="after")
    def _schedule_is_complete(self, info: ValidationInfo) -> Self:
        del info
        if self.schedule == "onecycle" and self.warmup_steps:
            raise KeyFault(
                "expected no warmup_steps with schedule onecycle, which rises by itself; remove "
                "warmup_steps, and set rise_ratio",
                "warmup_steps",
            )
        if self.schedule == "rates" and not self.rates:
            raise KeyFault("expected rates with schedule rates, got none; list them", "rates")
        if any(left >= right for left, right in pairwise(self.milestones)):
            raise KeyFault("expected milestones in ascending order; sort them", "milestones")
        return self


class Sgd(OptimizerSpec, lacks={"momentum", "betas", "eps", "alpha"}):
    """Plain gradient descent."""

    name: Literal["sgd"]


class Momentum(OptimizerSpec, lacks={"betas", "eps", "alpha"}):
    """SGD with heavy-ball or Nesterov momentum, as in torch."""

    name: Literal["momentum", "nesterov"]


class Adamw(OptimizerSpec, lacks={"momentum", "alpha"}):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    name: Literal["adamw"] = "adamw"


class Adam(OptimizerSpec, lacks={"momentum", "alpha"}):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980), with torch's weight decay."""

    name: Literal["adam"]


class Rmsprop(OptimizerSpec, lacks={"momentum", "betas"}):
    """RMSprop (Hinton 2012), as in torch without momentum and centering."""

    name: Literal["rmsprop"]


class Adagrad(OptimizerSpec, lacks={"momentum", "betas", "alpha"}):
    """Adagrad (Duchi et al. 2011), as in torch without a decay of its own."""

    name: Literal["adagrad"]
    eps: float = Field(1e-10, ge=1e-30, le=1e3, description="added to the denominator")


class Lion(OptimizerSpec, lacks={"momentum", "eps", "alpha"}):
    """Lion (Chen et al. 2023, arXiv:2302.06675)."""

    name: Literal["lion"]


class ScheduleFree(OptimizerSpec, lacks={"momentum", "alpha"}):
    """Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682).

    The average of its iterates is evaluated and saved.
    """

    name: Literal["schedule-free"]

    @model_validator(mode="after")
    def _averages_instead_of_a_schedule(self, info: ValidationInfo) -> Self:
        del info
        if self.schedule != "constant":
            raise KeyFault(
                f"expected no schedule with schedule-free, got {self.schedule}; remove it, and use "
                "warmup_steps",
                "schedule",
            )
        if not self.betas[0]:
            raise KeyFault("expected betas[0] above 0 with schedule-free, got 0", "betas")
        return self


AnyOptimizer = Annotated[
    Sgd | Momentum | Adamw | Adam | Rmsprop | Adagrad | Lion | ScheduleFree,
    Tagged("name", default="adamw", refusal=_refusal),
]
