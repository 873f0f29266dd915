"""The scale of losses that are computed in float16: what it is at a step, from commits alone.

It begins as the run spec says and is doubled after every `model.loss_scale_every` steps. A step
whose gradients overflow is done again with half of it, until it is 1. Powers of two, so that to
multiply and divide by it changes no bit of what neither overflows nor vanishes. After Micikevicius
et al., "Mixed Precision Training" (2018), arXiv:1710.03740; there a batch that overflows is lost.
"""

from __future__ import annotations

from protocol.base import limits
from protocol.spec.run_spec import RunSpec

FLOOR = 1.0
"""Below it a scale would help nothing: what is not finite then is the model's own."""


def scales(spec: RunSpec) -> bool:
    """Whether losses are scaled."""
    return spec.model is not None and spec.model.precision == "float16"


def first_scale(spec: RunSpec) -> float:
    """At step 0; 1 where nothing is scaled."""
    return spec.model.loss_scale if spec.model is not None and scales(spec) else FLOOR


def scale_after(spec: RunSpec, scale: float, step: int) -> float:
    """The scale of the step behind `step` steps, if the one before had `scale`."""
    if spec.model is None or not scales(spec) or step % spec.model.loss_scale_every:
        return scale
    return min(2.0 * scale, limits.LOSS_SCALE_FACTOR)
