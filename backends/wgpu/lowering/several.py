"""Several microbatches at once: every dispatch of a step runs over all of them.

A barrier stands between a dispatch and the next that needs its results, and where microbatches are
small it takes longer than what it waits for. Slots and the upload are made so large that each
microbatch has its own slice, at a stride that shaders add (`backends.wgpu.shaders.repeated`);
parameters and constants are there once. Each microbatch's gradients lie in slices of their own, so
they are added along the tree as if they had come one after the other. How many are computed in fact
is said with each run: one plan does for all numbers up to what it has room for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median_low

from backends.wgpu.lowering.plan import Plan
from backends.wgpu.shaders.dispatch import SLICE_ALIGNMENT_BYTES, WORKGROUPS_PER_DIMENSION
from backends.wgpu.shaders.repeated import can_repeat, invocations
from protocol.base.limits import ACTIVATIONS_AT_ONCE_BYTES, INVOCATIONS_PER_DISPATCH


def several(plan: Plan, most: int, fits: Callable[[Plan], bool]) -> Plan:
    """The plan with room for as many microbatches as are worth it, or as it is.

    Args:
        plan: Of one.
        most: At most so many.
        fits: Whether the device has room for a plan.
    """
    most = min(most, _most(plan))
    count = 1 << max(most, 1).bit_length() - 1
    while count > 1:
        found = with_room(plan, count)
        if sum(found.slots) <= ACTIVATIONS_AT_ONCE_BYTES and fits(found):
            return found
        count //= 2
    return plan


def _most(plan: Plan) -> int:
    """Microbatches at once, by what the dispatches are."""
    if not plan.dispatches or not all(_is_repeated(plan, n) for n in range(len(plan.dispatches))):
        return 1
    sizes = [math.prod(each.grid) * invocations(each.shader.source) for each in plan.dispatches]
    deepest = max(each.grid[2] for each in plan.dispatches)
    return min(INVOCATIONS_PER_DISPATCH // median_low(sizes), WORKGROUPS_PER_DIMENSION // deepest)


def _is_repeated(plan: Plan, number: int) -> bool:
    """Whether a dispatch can be, and writes nothing that all microbatches have in common."""
    dispatch = plan.dispatches[number]
    return can_repeat(dispatch.shader.source) and all(
        plan.places[written].slot >= 0 for written in dispatch.written
    )


def with_room(plan: Plan, count: int) -> Plan:
    """The plan with slices for so many microbatches."""
    strides = tuple(_stride(plan, number) for number in range(len(plan.places)))
    slots: dict[int, int] = defaultdict(int)
    for place, stride in zip(plan.places, strides, strict=True):
        if place.slot >= 0:
            slots[place.slot] = max(slots[place.slot], count * stride)
    dispatches = tuple(
        replace(each, strides=tuple(strides[number] for number in each.buffers))
        for each in plan.dispatches
    )
    return replace(
        plan,
        dispatches=dispatches,
        slots=tuple(slots[slot] for slot in range(len(plan.slots))),
        words=_aligned(4 * plan.words) // 4,
        at_once=count,
        strides=strides,
    )


def _stride(plan: Plan, number: int) -> int:
    """Bytes from a microbatch's slice of a buffer to the next one's."""
    place = plan.places[number]
    if place.packed:
        return _aligned(4 * plan.words)
    return _aligned(plan.nbytes[number]) if place.slot >= 0 else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SLICE_ALIGNMENT_BYTES) * SLICE_ALIGNMENT_BYTES
