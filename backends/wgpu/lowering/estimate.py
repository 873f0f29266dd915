"""Estimate a plan's memory before anything is allocated, and refuse a plan that does not fit.

The estimate counts the module's tensors that the plan reads (each once, as stored), the memory that
its buffers share over time, constants, the upload, and readback buffers. `FREE_SHARE` accounts for
the driver's own memory and padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from backends.wgpu.lowering.plan import Plan
from protocol.base.errors import SamestepError
from protocol.base.limits import byte_size

FREE_SHARE: Final = 0.05
"""Share of a device's memory that plans leave free."""

_INTERMEDIATE: Final = "an intermediate result"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of a plan, in bytes.

    Attributes:
        weights: The module's tensors as stored.
        activations: Peak memory of intermediate results.
        transfers: Constants, uploads and readback buffers.
        largest_buffer: Size and name of the largest buffer.
    """

    weights: int
    activations: int
    transfers: int
    largest_buffer: tuple[int, str]

    @property
    def total(self) -> int:
        """Total memory."""
        return self.weights + self.activations + self.transfers

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("activations", self.activations),
                 ("transfers", self.transfers))  # fmt: skip
        return (
            f"{byte_size(self.total)} ({', '.join(f'{name} {byte_size(n)}' for name, n in parts)})"
        )


def estimate(plan: Plan, tensor_bytes: Mapping[str, int]) -> Estimate:
    """Estimate a plan's memory.

    Args:
        plan: The plan.
        tensor_bytes: Size of each of the module's tensors on the device.
    """
    tensors = {location.tensor for location in plan.locations if location.tensor}
    sizes = [(tensor_bytes[name], name) for name in sorted(tensors)]
    sizes += [(nbytes, _INTERMEDIATE) for nbytes in plan.slots]
    constants = sum(
        4 * location.constant.numel()
        for location in plan.locations
        if location.constant is not None
    )
    readback = 4 * sum(
        plan.elements[output]
        for segment in plan.segments
        for output in segment.outputs
        if plan.outputs[output] is not None
    )
    weights = sum(tensor_bytes[name] for name in tensors)
    # A staging buffer has at most twice the size of its content.
    transfers = constants + 4 * plan.words * plan.microbatch_limit + 2 * readback
    return Estimate(weights, sum(plan.slots), transfers, max(sizes, default=(0, "")))


def has_room(estimates: Sequence[Estimate], nbytes: int, memory_bytes: int) -> bool:
    """Whether `nbytes` more bytes fit in memory together with a program's plans.

    True if the size of the device's memory is unknown. Such a device uses the host's memory, which
    stores the data in any case.
    """
    largest_total = max((estimate.total for estimate in estimates), default=0)
    return not memory_bytes or largest_total + nbytes <= _usable_bytes(memory_bytes)


def refuse_insufficient_memory(
    estimates: Sequence[Estimate], memory_bytes: int, largest_bytes: int, device: str
) -> None:
    """Refuse plans that do not fit in the device's memory.

    Args:
        estimates: Estimates of all plans of a program, which share weights and activations.
        memory_bytes: The device's memory; 0 if unknown, then only `largest_bytes` is checked.
        largest_bytes: Largest size of a buffer.
        device: Name of the device.

    Raises:
        SamestepError: A buffer or the memory of a plan is too large.
    """
    for estimate in estimates:
        nbytes, tensor = estimate.largest_buffer
        if nbytes > largest_bytes:
            advice = "use fewer tokens in a batch or a smaller vocabulary"
            if tensor != _INTERMEDIATE:
                advice = "make it smaller, or use a cpu or cuda worker"
            raise SamestepError(
                f"expected buffers of at most {byte_size(largest_bytes)} for {device!r}, got "
                f"{byte_size(nbytes)} for {tensor!r}; {advice}"
            )
    usable_bytes = _usable_bytes(memory_bytes)
    worst = max(estimates, key=lambda estimate: estimate.total)
    if memory_bytes and worst.total > usable_bytes:
        raise SamestepError(
            f"expected at most {byte_size(usable_bytes)} for {device!r}, got {worst}: "
            f"{byte_size(worst.total - usable_bytes)} too much; lower batch.microbatch or "
            "data.max_tokens, set model.gradient_checkpointing, or with lora model.base_dtype"
        )


def _usable_bytes(memory_bytes: int) -> int:
    return int(memory_bytes * (1 - FREE_SHARE))
