"""The section `optimizer` of a run spec: the exact update and the learning rate schedule."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from protocol.base import limits
from protocol.base.fields import PRINTABLE, Count, CountOrZero, Fraction
from protocol.spec.sections.checkpoint import Better
from protocol.spec.sections.section import KeyFault, Needs, OmittedByDefault, Section, TaggedUnion

ScheduleName = Literal[
    "constant", "linear", "cosine", "wsd", "polynomial", "cosine-restarts", "inverse-sqrt",
    "onecycle", "piecewise", "rates", "plateau",
]  # fmt: skip
DecayName = Literal["linear", "cosine", "1-sqrt"]

_FALLING: Final = (
    "cosine", "linear", "wsd", "polynomial", "cosine-restarts", "onecycle", "plateau",
)  # fmt: skip
_Rate = Annotated[float, Field(ge=0, le=100)]
_INEXACT: Final = {
    "muon": "it orthogonalizes each matrix by some fifteen matrix products, and the order in which "
    "a library adds their terms differs between processors and cards, so replicas would differ "
    "after one step",
    "8bit": "its quantized state depends on one library's kernels on one family of cards",
}
"""Optimizers that users request, and why replicas cannot agree on their bits."""


def _refusal_of(name: str) -> str:
    letters = name.lower().replace("-", "").replace("_", "")
    for part, reason in _INEXACT.items():
        if part in letters:
            return f"{name} is not supported: {reason}; use adamw, lion or schedule-free"
    return ""


def _as_tuple(value: Any) -> Any:
    return (
        (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    )


_Pattern = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARACTERS, pattern=PRINTABLE)]
_Patterns = Annotated[
    tuple[_Pattern, ...],
    BeforeValidator(_as_tuple),
    Field(min_length=1, max_length=limits.TENSORS),
]


class ParameterGroup(Section):
    """Rules for the update of tensors with matching names; the first group that matches applies."""

    match: _Patterns = Field(
        description="names of tensors, in which * stands for any characters and ? for one; each "
        "must match a tensor"
    )
    lr_scale: float = Field(
        1.0, ge=0, le=1e3, description="factor of lr; 0 leaves the tensors unchanged"
    )
    lr_scales: Annotated[tuple[_Rate, ...], OmittedByDefault()] = Field(
        (), max_length=100_000,
        description="factor of lr in each step, in place of lr_scale; the last one holds from then "
        "on",
    )  # fmt: skip
    weight_decay: float | None = Field(
        None, ge=0, le=1e3, description="weight decay of all these tensors, whatever no_decay says"
    )
    clip_norm: Annotated[float | None, OmittedByDefault()] = Field(
        None,
        gt=0,
        description="clip the norm of these tensors' gradients to this value; optimizer.clip_norm "
        "then counts the others only",
    )


class EmaSpec(Section):
    """Exponential moving average of the weights, which is evaluated and saved in their place.

    It is the average of torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn; with
    `count_initial`, that of timm's ModelEmaV3.
    """

    decay: Fraction = Field(0.999, description="share of the average that each averaging keeps")
    warmup: bool = Field(
        default=False,
        description="averaging n, from 0, keeps at most (1 + n) / (10 + n), as in diffusers",
    )
    start_step: CountOrZero = Field(0, description="updates before the first one that is averaged")
    every: Count = Field(1, description="updates from one averaging to the next")
    count_initial: bool = Field(
        default=False,
        description="average the initial weights too, as in timm; by default the average begins "
        "with the weights after the first averaged update, as in torch",
    )

    @model_validator(mode="after")
    def _check_count_initial(self, info: ValidationInfo) -> Self:
        del info
        if self.count_initial and self.start_step:
            raise KeyFault(
                f"expected count_initial or start_step, got both ({self.start_step}); remove one",
                "count_initial",
                "start_step",
            )
        return self


class SwaSpec(Section):
    """Stochastic weight averaging (Izmailov et al. 2018, arXiv:1803.05407).

    The mean of the weights after chosen updates, evaluated and saved in their place: the default
    average of torch.optim.swa_utils.AveragedModel.
    """

    start_step: CountOrZero = Field(0, description="updates before the first one that is averaged")
    every: Count = Field(1, description="updates from one averaging to the next")


class PlateauSpec(Section):
    """The rate falls whenever an evaluation metric stops improving: torch's ReduceLROnPlateau.

    The coordinator decides from the evaluations in its journal. The rate is at least
    `min_lr_ratio` times lr.
    """

    metric: str = Field(description="an evaluation metric, such as loss_per_token")
    better: Better = Field(
        "lower", description="whether a higher or a lower value of the metric is better"
    )
    factor: float = Field(0.1, gt=0, lt=1, description="the rate is multiplied by this")
    patience: CountOrZero = Field(
        10, description="evaluations without improvement that are accepted; the next one lowers lr"
    )
    threshold: float = Field(
        1e-4, ge=0, le=1e6, description="smallest change that counts as improvement"
    )
    threshold_mode: Literal["rel", "abs"] = Field(
        "rel", description="whether threshold is a share of the best value, or a difference"
    )
    cooldown: CountOrZero = Field(
        0, description="evaluations after a decrease of lr that do not count against patience"
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
    amsgrad: Annotated[bool, OmittedByDefault()] = Field(
        default=False, description="divide by the largest second moment so far (arXiv:1904.09237)"
    )
    centered: Annotated[bool, OmittedByDefault()] = Field(
        default=False, description="divide by the variance of the gradients"
    )
    beta2_decay: float = Field(
        -0.8, ge=-1, le=0, description="update t moves the means of squares by t^beta2_decay"
    )
    clip_threshold: float = Field(
        1.0, gt=0, le=1e3, description="root mean square that the update of a tensor is clipped to"
    )
    scale_parameter: bool = Field(
        default=True, description="multiply lr by the root mean square of the tensor's parameters"
    )
    min_parameter_rms: Annotated[float, Needs("scale_parameter")] = Field(
        1e-3, gt=0, le=1e3, description="smallest root mean square that scale_parameter uses"
    )
    relative_step: bool = Field(
        default=False, description="the rate of update t is at most 1 / sqrt(t)"
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=1e3,
        description="adamw, lion and adafactor: decoupled from the gradient; others: added to the "
        "gradient",
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
    clip_value: Annotated[float | None, OmittedByDefault()] = Field(
        None, ge=1e-30, le=1e30, description="clip each element of the gradient to this magnitude"
    )
    ema: Annotated[EmaSpec | None, OmittedByDefault()] = None
    swa: Annotated[SwaSpec | None, OmittedByDefault()] = None
    schedule: ScheduleName = Field("constant", description="shape of lr after the warmup")
    warmup_steps: CountOrZero = Field(0, description="steps in which lr rises")
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
    milestones: Annotated[tuple[CountOrZero, ...], Needs("schedule", ("piecewise",))] = Field(
        (), max_length=1000, description="piecewise: steps at which lr is multiplied by gamma"
    )
    gamma: Annotated[float, Needs("schedule", ("piecewise",))] = Field(
        0.1, gt=0, le=10, description="piecewise: the factor at each milestone"
    )
    rates: Annotated[tuple[_Rate, ...], Needs("schedule", ("rates",))] = Field(
        (), max_length=100_000,
        description="rates: lr of each step as a share of lr; the last one holds from then on",
    )  # fmt: skip
    momenta: Annotated[tuple[Fraction, ...], OmittedByDefault()] = Field(
        (), max_length=100_000,
        description="momentum, or betas[0] of adam, in each step, as OneCycleLR cycles it; the "
        "last one holds from then on",
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
    plateau: Annotated[PlateauSpec | None, Needs("schedule", ("plateau",)), OmittedByDefault()] = (
        None
    )

    @property
    def scheduled_scales(self) -> tuple[tuple[float, ...], ...]:
        """The different lists of `lr_scales` of the groups."""
        return tuple(dict.fromkeys(group.lr_scales for group in self.groups if group.lr_scales))

    @property
    def average(self) -> EmaSpec | SwaSpec | None:
        """The average of the weights that is part of the state; None without one."""
        return self.ema or self.swa

    @property
    def clipped_groups(self) -> tuple[ParameterGroup, ...]:
        """The groups whose gradients are clipped by the norm of the group."""
        return tuple(group for group in self.groups if group.clip_norm is not None)

    @model_validator(mode="after")
    def _check_clipping_and_average(self, info: ValidationInfo) -> Self:
        del info
        if self.clip_value is not None and (self.clip_norm or self.clipped_groups):
            raise KeyFault(
                "expected clip_norm or clip_value, got both: remove one of them", "clip_value"
            )
        if len(self.clipped_groups) > limits.CLIPPED_GROUPS:
            raise KeyFault(
                f"expected at most {limits.CLIPPED_GROUPS} groups with clip_norm, got "
                f"{len(self.clipped_groups)}: join groups that are clipped alike",
                "groups",
            )
        if len(self.scheduled_scales) > limits.SCHEDULED_GROUPS:
            raise KeyFault(
                f"expected at most {limits.SCHEDULED_GROUPS} different lists of lr_scales, got "
                f"{len(self.scheduled_scales)}: use lr_scale where the factor does not change",
                "groups",
            )
        if self.ema is not None and self.swa is not None:
            raise KeyFault("expected ema or swa, got both: remove one of them", "swa", "ema")
        if self.average is not None and self.name == "schedule-free":
            key = "swa" if self.ema is None else "ema"
            raise KeyFault(f"schedule-free averages its weights itself: remove {key}", key)
        return self

    @model_validator(mode="after")
    def _check_schedule(self, info: ValidationInfo) -> Self:
        del info
        if self.schedule == "plateau" and self.plateau is None:
            raise KeyFault(
                "expected plateau with schedule plateau, got none; name the metric: "
                "plateau={metric: NAME}",
                "plateau",
            )
        if self.schedule == "onecycle" and self.warmup_steps:
            raise KeyFault(
                "expected no warmup_steps with schedule onecycle, which has a warmup; remove "
                "warmup_steps, and set rise_ratio",
                "warmup_steps",
            )
        if self.schedule == "rates" and not self.rates:
            raise KeyFault("expected rates with schedule rates, got none; list them", "rates")
        if any(left >= right for left, right in pairwise(self.milestones)):
            raise KeyFault("expected milestones in ascending order; sort them", "milestones")
        return self


_ADAFACTOR_KEYS: Final = frozenset({
    "beta2_decay", "clip_threshold", "scale_parameter", "min_parameter_rms", "relative_step",
})  # fmt: skip
_VARIANTS: Final = _ADAFACTOR_KEYS | {"amsgrad", "centered"}


class Sgd(OptimizerSpec, lacks={"momentum", "momenta", "betas", "eps", "alpha"} | _VARIANTS):
    """Plain gradient descent."""

    name: Literal["sgd"]


class Momentum(OptimizerSpec, lacks={"betas", "eps", "alpha"} | _VARIANTS):
    """SGD with heavy-ball or Nesterov momentum, as in torch."""

    name: Literal["momentum", "nesterov"]


class Adamw(OptimizerSpec, lacks={"momentum", "alpha", "centered"} | _ADAFACTOR_KEYS):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    name: Literal["adamw"] = "adamw"


class Adam(OptimizerSpec, lacks={"momentum", "alpha", "centered"} | _ADAFACTOR_KEYS):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980), with torch's weight decay."""

    name: Literal["adam"]


class Rmsprop(OptimizerSpec, lacks={"momenta", "betas", "amsgrad"} | _ADAFACTOR_KEYS):
    """RMSprop (Hinton 2012), as in torch."""

    name: Literal["rmsprop"]
    momentum: Annotated[Fraction, OmittedByDefault()] = Field(
        0.0, description="share of the velocity that a step keeps"
    )


class Adagrad(OptimizerSpec, lacks={"momenta", "momentum", "betas", "alpha"} | _VARIANTS):
    """Adagrad (Duchi et al. 2011), as in torch without lr_decay."""

    name: Literal["adagrad"]
    eps: float = Field(1e-10, ge=1e-30, le=1e3, description="added to the denominator")


class Adafactor(
    OptimizerSpec, lacks={"momenta", "momentum", "betas", "alpha", "amsgrad", "centered"}
):
    """Adafactor without a first moment (Shazeer and Stern 2018, arXiv:1804.04235)."""

    name: Literal["adafactor"]
    eps: float = Field(1e-30, ge=1e-38, le=1e3, description="added to the squared gradients")


class Lion(OptimizerSpec, lacks={"momenta", "momentum", "eps", "alpha"} | _VARIANTS):
    """Lion (Chen et al. 2023, arXiv:2302.06675)."""

    name: Literal["lion"]


class ScheduleFree(OptimizerSpec, lacks={"momenta", "momentum", "alpha"} | _VARIANTS):
    """Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682).

    The average of its iterates is evaluated and saved.
    """

    name: Literal["schedule-free"]

    @model_validator(mode="after")
    def _refuse_schedule(self, info: ValidationInfo) -> Self:
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
    Sgd | Momentum | Adamw | Adam | Rmsprop | Adagrad | Adafactor | Lion | ScheduleFree,
    TaggedUnion("name", default="adamw", refusal=_refusal_of),
]
