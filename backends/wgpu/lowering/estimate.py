"""How much of a device's memory a plan needs, and by how much it is too much, before any is taken.

What counts: the module's tensors that the plan reads (each once, as they are stored), memory that
its buffers share over time, constants, the upload, and the buffers that results come back through.
Drivers keep some for themselves and pad; `ROOM` stands for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from backends.wgpu.lowering.plan import Plan
from protocol.base.errors import SamestepError
from protocol.base.limits import byte_size

ROOM: Final = 0.05
"""Of a device's memory, that no plan is given."""

_COMPUTED: Final = "an intermediate result"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of a plan on a device.

    Attributes:
        weights: The module's tensors, as they are stored.
        activations: What forward and backward compute, at the widest point.
        transfers: Constants, the upload and what results come back through.
        largest: Of any one buffer, and what it is.
    """

    weights: int
    activations: int
    transfers: int
    largest: tuple[int, str]

    @property
    def total(self) -> int:
        """Everything together."""
        return self.weights + self.activations + self.transfers

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("activations", self.activations),
                 ("transfers", self.transfers))  # fmt: skip
        return (
            f"{byte_size(self.total)} ({', '.join(f'{name} {byte_size(n)}' for name, n in parts)})"
        )


def estimate(plan: Plan, tensor_bytes: Mapping[str, int]) -> Estimate:
    """Add up a plan.

    Args:
        plan: What is to run.
        tensor_bytes: Of each of the module's tensors on the device.
    """
    named = {place.tensor for place in plan.places if place.tensor}
    sizes = [(tensor_bytes[name], name) for name in sorted(named)]
    sizes += [(nbytes, _COMPUTED) for nbytes in plan.slots]
    constants = sum(
        4 * place.constant.numel() for place in plan.places if place.constant is not None
    )
    back = 4 * sum(
        plan.elements[output]
        for segment in plan.segments
        for output in segment.outputs
        if plan.outputs[output] is not None
    )
    weights = sum(tensor_bytes[name] for name in named)
    # A staging buffer has at most twice the size of what it brings.
    transfers = constants + 4 * plan.words * plan.at_once + 2 * back
    return Estimate(weights, sum(plan.slots), transfers, max(sizes, default=(0, "")))


def has_room(needed: Sequence[Estimate], nbytes: int, memory_bytes: int) -> bool:
    """Whether so many bytes more fit beside a program's plans; so where memory is not known, for
    there it is the host's, which would hold them otherwise."""
    most = max((one.total for one in needed), default=0)
    return not memory_bytes or most + nbytes <= _usable(memory_bytes)


def refuse_what_does_not_fit(
    needed: Sequence[Estimate], memory_bytes: int, largest_bytes: int, device: str
) -> None:
    """Say so before anything is uploaded.

    Args:
        needed: Of all plans of a program; they share weights, and memory over time.
        memory_bytes: The device's; 0 where it is not known: then only `largest_bytes` is looked at.
        largest_bytes: What one buffer may have.
        device: Its name.

    Raises:
        SamestepError: By how much it does not fit.
    """
    for one in needed:
        nbytes, what = one.largest
        if nbytes > largest_bytes:
            advice = "fewer tokens in a batch, or a smaller vocabulary"
            if what != _COMPUTED:
                advice = "it smaller, or a cpu or cuda worker"
            raise SamestepError(
                f"{what!r} needs a buffer of {byte_size(nbytes)}, and {device!r} has at most "
                f"{byte_size(largest_bytes)}: expected {advice}"
            )
    usable = _usable(memory_bytes)
    worst = max(needed, key=lambda one: one.total)
    if memory_bytes and worst.total > usable:
        raise SamestepError(
            f"expected at most {byte_size(usable)} for {device!r}, but this needs {worst}: "
            f"{byte_size(worst.total - usable)} too much; lower batch.microbatch or "
            "data.max_tokens, set model.gradient_checkpointing, or with lora model.base_dtype"
        )


def _usable(memory_bytes: int) -> int:
    return int(memory_bytes * (1 - ROOM))
