"""The section `replicas` of a run spec: many steps alone, then one exchange (DiLoCo).

Douillard et al. 2023, arXiv:2311.08105. A run with this section has K logical replicas. In a round
each takes H inner steps alone, from the same parameters; what is exchanged is the difference. Who
computes which replica decides no bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.base.fields import Bounded

Codec = Literal["float32", "bfloat16", "int8", "int4", "topk"]
DenseCodec = Literal["float32", "bfloat16", "int8", "int4"]
InnerState = Literal["reset", "carry"]

_WHOEVER_CAME: Final = (
    "quorum", "min_replicas", "asynchronous", "async", "staleness", "timeout_s", "merging",
)  # fmt: skip
_BY_SPEED: Final = ("auto", "measured", "dynamic", "adaptive")


class Codecs(NamedTuple):
    """What of a step travels how.

    Attributes:
        precision: What workers send.
        averages: What they are sent.
        sums: What every addition is rounded to.
    """

    precision: Codec = "float32"
    averages: Codec = "float32"
    sums: Literal["float32", "bfloat16"] = "float32"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OuterSpec(_Section):
    """The update that takes in what the replicas have learned: exact SGD, its rate constant.

    The averaged difference (start minus end) stands for a gradient.
    """

    lr: float = Field(0.7, ge=1e-30, le=1e3, description="learning rate")
    momentum: float = Field(0.9, ge=0.0, lt=1.0, description="0: none")
    nesterov: bool = Field(default=True, description="look ahead by the momentum, as torch's SGD")


class ReplicasSpec(_Section):
    """Replicas that take many steps alone between two exchanges, for slow links (DiLoCo).

    `optimizer` and `batch` are those of the inner steps; `steps` counts rounds.
    """

    count: int = Field(ge=1, le=256, description="K, whatever the number of workers")
    inner_steps: Bounded = Field(ge=1, description="H: optimizer steps of each replica in a round")
    outer: OuterSpec = OuterSpec()
    inner_state: InnerState = Field(
        "reset",
        description="moments in a new round: zeros, or the replica's own, which travel with it",
    )
    codec: Codec = Field(
        "float32",
        description="of a replica's difference; topk: 64 of 4096, the rest is kept for later",
    )
    averages: DenseCodec = Field("float32", description="of the averaged difference, to workers")
    boundary_every: Bounded = Field(
        0,
        ge=0,
        description="inner steps after which a replica's state is sent, so that no more of them "
        "are computed again after a loss; 0: at the end of a round only",
    )

    @model_validator(mode="before")
    @classmethod
    def _says_what_it_cannot(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        asked = next((key for key in _WHOEVER_CAME if key in given), None)
        if asked is not None:
            raise ValueError(
                f"{asked!r} would let the result depend on who was there: all `count` replicas are "
                "in every round, whichever machines compute them; leave it out"
            )
        if given.get("inner_steps") in _BY_SPEED:
            raise ValueError(
                "inner_steps by measured speed would let the result depend on the machines: give a "
                "number, and raise `count` above the number of machines, so that fast ones compute "
                "several replicas"
            )
        return given

    @model_validator(mode="after")
    def _has_boundaries_within(self) -> ReplicasSpec:
        if self.boundary_every >= self.inner_steps:
            raise ValueError(
                f"boundary_every {self.boundary_every} leaves no boundary within the "
                f"{self.inner_steps} steps of a round: give less than inner_steps, or 0"
            )
        return self

    @property
    def carries(self) -> bool:
        """Whether a replica has a state of its own from one round to the next."""
        return self.inner_state == "carry" or self.codec == "topk"

    @property
    def codecs(self) -> Codecs:
        """How differences and averages travel."""
        return Codecs(self.codec, self.averages)
