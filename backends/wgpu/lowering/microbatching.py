"""Compute several small microbatches together: every dispatch of a step processes all of them.

For small microbatches, the barriers between dependent dispatches take longer than the dispatches.
Slots and the upload get a slice per microbatch, at a stride that shaders add
(`backends.wgpu.shaders.repeated`); parameters and constants are shared. Each microbatch's gradients
have their own slices, so they are added along the tree as if they were computed one by one. Each
run states its number of microbatches: one plan serves all numbers up to its limit.
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


def enlarge_for_microbatches(plan: Plan, limit: int, has_memory: Callable[[Plan], bool]) -> Plan:
    """Return a plan for as many microbatches as are worthwhile, or the plan itself.

    Args:
        plan: A plan for one microbatch.
        limit: Largest number of microbatches.
        has_memory: Whether a plan fits in the device's memory.
    """
    limit = min(limit, _largest_count(plan))
    count = 1 << max(limit, 1).bit_length() - 1
    while count > 1:
        enlarged = add_slices(plan, count)
        if sum(enlarged.slots) <= ACTIVATIONS_AT_ONCE_BYTES and has_memory(enlarged):
            return enlarged
        count //= 2
    return plan


def _largest_count(plan: Plan) -> int:
    """Return the largest number of microbatches that the dispatches allow."""
    if not plan.dispatches or not all(_is_repeatable(plan, n) for n in range(len(plan.dispatches))):
        return 1
    sizes = [
        math.prod(dispatch.grid) * invocations(dispatch.shader.source)
        for dispatch in plan.dispatches
    ]
    largest_depth = max(dispatch.grid[2] for dispatch in plan.dispatches)
    return min(
        INVOCATIONS_PER_DISPATCH // median_low(sizes), WORKGROUPS_PER_DIMENSION // largest_depth
    )


def _is_repeatable(plan: Plan, number: int) -> bool:
    """Whether a dispatch supports several microbatches: it writes no shared buffer."""
    dispatch = plan.dispatches[number]
    return can_repeat(dispatch.shader.source) and all(
        plan.locations[number_written].slot >= 0 for number_written in dispatch.written
    )


def add_slices(plan: Plan, count: int) -> Plan:
    """Return the plan with slices for `count` microbatches."""
    strides = tuple(_stride(plan, number) for number in range(len(plan.locations)))
    slots: dict[int, int] = defaultdict(int)
    for location, stride in zip(plan.locations, strides, strict=True):
        if location.slot >= 0:
            slots[location.slot] = max(slots[location.slot], count * stride)
    dispatches = tuple(
        replace(dispatch, strides=tuple(strides[number] for number in dispatch.buffers))
        for dispatch in plan.dispatches
    )
    return replace(
        plan,
        dispatches=dispatches,
        slots=tuple(slots[slot] for slot in range(len(plan.slots))),
        words=_align(4 * plan.words) // 4,
        microbatch_limit=count,
        strides=strides,
    )


def _stride(plan: Plan, number: int) -> int:
    """Return the distance between a buffer's slices in bytes."""
    location = plan.locations[number]
    if location.is_upload:
        return _align(4 * plan.words)
    return _align(plan.nbytes[number]) if location.slot >= 0 else 0


def _align(nbytes: int) -> int:
    return -(-nbytes // SLICE_ALIGNMENT_BYTES) * SLICE_ALIGNMENT_BYTES
