"""The section `arithmetic` of a run spec: whose rules a run's gradients are computed by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ArithmeticSpec(BaseModel):
    """How gradients are computed: by each device's own rules, or by one that all keep to.

    With canonical arithmetic unlike machines give the same bits: a CPU of any kind with any number
    of threads, and each Vulkan device that follows the convention. What a convention fixes is what
    devices differ in; `worker devices` says which one a device follows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["native", "canonical"] = Field(
        "native", description="native: as each device computes; canonical: the same bits on all"
    )
    multiply_add: Literal["fused", "separate"] = Field(
        "fused", description="canonical: whether a multiply-add is rounded once or twice"
    )
    subnormals: Literal["kept", "flushed"] = Field(
        "kept", description="canonical: whether numbers below 2^-126 are kept, or count as zeros"
    )

    @model_validator(mode="before")
    @classmethod
    def _mode_alone(cls, given: Any) -> Any:
        """`arithmetic: canonical` stands for its mode."""
        return {"mode": given} if isinstance(given, str) else given

    @property
    def is_canonical(self) -> bool:
        """Whether all devices give the same bits."""
        return self.mode == "canonical"

    def __str__(self) -> str:
        if not self.is_canonical:
            return "native"
        return f"canonical, {self.multiply_add}, subnormals {self.subnormals}"
