"""Plan a whole step or forward as dispatches over numbered buffers.

Layer calls are expanded into the kernels of their kind, each with its own buffers for saved values.
Then every buffer's lifetime is known, from its first writer to its last reader, and buffers with
disjoint lifetimes share memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import torch
from torch import fx

from backends.wgpu.capture.capture import Capture
from backends.wgpu.graph.halves import word_count
from backends.wgpu.graph.values import elements_of
from backends.wgpu.lowering.kernels import Kernel
from backends.wgpu.lowering.layer_kernels import LayerKernels
from backends.wgpu.lowering.lowering import CallStep, LoweredGraph
from backends.wgpu.shaders.dispatch import Dispatch, Shader

_WORD_BYTES: Final = 4
_ALIGNMENT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Location:
    """The content of a plan's buffer. Exactly one attribute is set.

    Attributes:
        tensor: Name of a tensor of the module.
        constant: A value known before the run.
        slot: Number of a slot, memory that several buffers use at different times.
        is_upload: Whether the buffer is the upload of the microbatch.
    """

    tensor: str = ""
    constant: torch.Tensor | None = None
    slot: int = -1
    is_upload: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Dispatches up to `end`, and the numbers of the outputs that are read back after them."""

    end: int
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A program for a device.

    Attributes:
        dispatches: Dispatches in order.
        locations: Location of each buffer.
        slots: Size of each slot in bytes.
        upload_offsets: Offset of each array and, last, of the seeds in the upload, in words; None
            for an array that no kernel reads.
        words: Size of the upload in words.
        outputs: The buffer of each output; None for an output that is zero.
        elements: Number of elements of each output.
        segments: Segments in order.
        nbytes: Size of each buffer in bytes.
        microbatch_limit: Largest number of microbatches that run together; slots and the upload
            have a slice for each.
        strides: For each buffer, the distance in bytes between the slices of consecutive
            microbatches; 0 if all microbatches read the same memory.
    """

    dispatches: tuple[Dispatch, ...]
    locations: tuple[Location, ...]
    slots: tuple[int, ...]
    upload_offsets: tuple[int | None, ...]
    words: int
    outputs: tuple[int | None, ...]
    elements: tuple[int, ...]
    segments: tuple[Segment, ...]
    nbytes: tuple[int, ...]
    microbatch_limit: int = 1
    strides: tuple[int, ...] = ()


def make_plan(
    capture: Capture,
    outer: LoweredGraph,
    layers: Sequence[LayerKernels],
    groups: Sequence[Sequence[int]],
    merge_kernels: Callable[[Sequence[Kernel]], Sequence[Kernel]] = lambda kernels: kernels,
) -> Plan:
    """Make a plan: flatten the step and allocate its buffers.

    Args:
        capture: The trace.
        outer: The lowered outer graph.
        layers: The kernels of each layer call.
        groups: Groups of outputs that are read back together, in order.
        merge_kernels: Merges consecutive kernels into fewer dispatches.
    """
    builder = _Builder(layers)
    upload_offsets, words = builder.bind_inputs(capture, outer)
    for _, steps in groupby(outer.steps, type):
        kernels_and_calls = [*steps]
        for kernel in merge_kernels(
            [step for step in kernels_and_calls if isinstance(step, Kernel)]
        ):
            builder.kernel(kernel, builder.scope)
        for step in (step for step in kernels_and_calls if isinstance(step, CallStep)):
            (builder.layer_forward if step.is_forward else builder.layer_backward)(step)
    outputs = tuple(None if node is None else builder.scope[node] for node in outer.outputs)
    segments = _segments(builder.dispatches, outputs, groups)
    locations, slots = _allocate(builder, outputs, segments)
    elements = tuple(0 if node is None else elements_of(node) for node in outer.outputs)
    return Plan(
        tuple(builder.dispatches),
        locations,
        slots,
        upload_offsets,
        words,
        outputs,
        elements,
        tuple(segments),
        tuple(builder.nbytes),
    )


@dataclass(slots=True)
class _Builder:
    """Builds dispatches over buffers that do not share memory yet."""

    layers: Sequence[LayerKernels]
    dispatches: list[Dispatch] = field(default_factory=list)
    fixed_locations: dict[int, Location] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)
    scope: dict[fx.Node, int] = field(default_factory=dict)
    saved_scopes: dict[int, dict[fx.Node, int]] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)

    def new_buffer(self, words: int) -> int:
        """Add a buffer of `words` words; return its number."""
        self.nbytes.append(max(-(-words * _WORD_BYTES // _ALIGNMENT_BYTES), 1) * _ALIGNMENT_BYTES)
        return len(self.nbytes) - 1

    def fixed_buffer(self, location: Location, words: int) -> int:
        """Add a buffer that shares no memory; return its number."""
        number = self.new_buffer(words)
        self.fixed_locations[number] = location
        return number

    def constant(self, value: torch.Tensor) -> int:
        """Return the buffer of a constant, the same for the same tensor."""
        if id(value) not in self.constants:
            self.constants[id(value)] = self.fixed_buffer(Location(constant=value), value.numel())
        return self.constants[id(value)]

    def bind_inputs(
        self, capture: Capture, outer: LoweredGraph
    ) -> tuple[tuple[int | None, ...], int]:
        """Add buffers of tensors, constants and arrays; a kernel unpacks each array from the
        upload.
        """
        nodes_read = {node for step in outer.steps for node in step.reads}
        tensors, varying = (
            outer.inputs[: len(capture.tensors)],
            outer.inputs[len(capture.tensors) :],
        )
        for name, node in zip(capture.tensors, tensors, strict=True):
            if node in nodes_read:
                self.scope[node] = self.fixed_buffer(Location(tensor=name), elements_of(node))
        for node, value in outer.constants.items():
            self.scope[node] = self.constant(value)
        seeds, *arrays = varying
        offsets: list[int | None] = []
        offset = 0
        upload = self.fixed_buffer(Location(is_upload=True), 0)
        for node in (*arrays, seeds):
            if node not in nodes_read or node in outer.constants:
                offsets.append(None)
                continue
            words = 2 * capture.seeds if node is seeds else elements_of(node)
            self.scope[node] = self.new_buffer(words)
            self.dispatches.append(_unpack(upload, self.scope[node], offset, words))
            offsets.append(offset)
            offset += words
        return tuple(offsets), offset

    def kernel(self, kernel: Kernel, scope: dict[fx.Node, int]) -> None:
        """Add a kernel's dispatch, over the buffers of a scope."""
        for node in kernel.writes:
            if node not in scope:
                scope[node] = self.new_buffer(word_count(node, elements_of(node)))
        buffers = tuple(scope[node] for node in (*kernel.reads, *kernel.writes))
        self.dispatches.append(Dispatch(kernel.shader, buffers, kernel.grid, kernel.label))

    def layer_forward(self, step: CallStep) -> None:
        """Add the kernels of a layer's forward; save its buffers for backward."""
        layer = self.layers[step.call]
        inputs = zip(layer.inputs, step.reads, strict=False)
        scope = {inner: self.scope[outer] for inner, outer in inputs}
        for node, value in layer.constants.items():
            scope[node] = self.constant(value)
        self.saved_scopes[step.call] = dict(scope)
        for index, outer_node in step.writes.items():
            inner_node = layer.results[index]
            words = word_count(inner_node, elements_of(inner_node))
            scope[inner_node] = self.scope[outer_node] = self.new_buffer(words)
        for kernel in layer.forward:
            self.kernel(kernel, scope)
        if not layer.checkpoint:
            self.saved_scopes[step.call] = scope

    def layer_backward(self, step: CallStep) -> None:
        """Add the kernels of a layer's backward."""
        layer = self.layers[step.call]
        scope = self.saved_scopes.pop(step.call)
        grad_outputs = layer.inputs[len(layer.inputs) - len(step.reads) :]
        for inner, outer in zip(grad_outputs, step.reads, strict=True):
            scope[inner] = self.scope[outer]
        for index, outer_node in step.writes.items():
            inner_node = layer.gradients[index]
            words = word_count(outer_node, elements_of(outer_node))
            if inner_node is None:
                self.scope[outer_node] = self.fixed_buffer(
                    Location(constant=torch.zeros(words)), words
                )
            else:
                scope[inner_node] = self.scope[outer_node] = self.new_buffer(words)
        for kernel in layer.backward:
            self.kernel(kernel, scope)


def _unpack(upload: int, buffer: int, offset: int, words: int) -> Dispatch:
    source = f"""\
@group(0) @binding(0) var<storage, read> upload: array<u32>;
@group(0) @binding(1) var<storage, read_write> out: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {{
  let i = id.x + id.y * groups.x * 64u;
  if (i < {words}u) {{ out[i] = upload[i + {offset}u]; }}
}}
"""
    groups = -(-words // 64)
    grid = (groups, 1, 1) if groups < 32768 else (32768, -(-groups // 32768), 1)
    return Dispatch(Shader(source, 2), (upload, buffer), grid, "unpack")


def _segments(
    dispatches: Sequence[Dispatch],
    outputs: Sequence[int | None],
    groups: Sequence[Sequence[int]],
) -> list[Segment]:
    """Return the segments: a group is read back once this group and all earlier groups are
    complete."""
    last_write = {
        n: index + 1 for index, dispatch in enumerate(dispatches) for n in dispatch.written
    }
    segments = []
    end = 0
    for group in groups:
        numbers = [outputs[output] for output in group]
        end = max([end, *(last_write.get(n, 0) for n in numbers if n is not None)])
        segments.append(Segment(end, tuple(group)))
    return segments


def _allocate(
    builder: _Builder, outputs: Sequence[int | None], segments: Sequence[Segment]
) -> tuple[tuple[Location, ...], tuple[int, ...]]:
    """Allocate a slot for each buffer; the slot is free again after the buffer's last reader."""
    last_use: dict[int, int] = {}
    for index, dispatch in enumerate(builder.dispatches):
        for number in dispatch.buffers:
            last_use[number] = index
    for segment in segments:
        output_buffers = (outputs[output] for output in segment.outputs)
        for number in (number for number in output_buffers if number is not None):
            last_use[number] = max(last_use.get(number, 0), segment.end - 1)
    last_uses: dict[int, list[int]] = defaultdict(list)
    for number, index in last_use.items():
        last_uses[index].append(number)
    slots: list[int] = []
    free: list[tuple[int, int]] = []  # (bytes, slot), sorted
    locations = dict(builder.fixed_locations)
    take: Callable[[int], int] = lambda nbytes: _take(nbytes, slots, free)  # noqa: E731
    for index, dispatch in enumerate(builder.dispatches):
        for number in dispatch.written:
            if number not in locations:
                locations[number] = Location(slot=take(builder.nbytes[number]))
        for finished_number in last_uses[index]:
            slot = locations[finished_number].slot
            if slot >= 0:
                insort(free, (slots[slot], slot))
    unused_location = Location(slot=0) if slots else Location(is_upload=True)
    numbered = tuple(
        locations.get(number, unused_location) for number in range(len(builder.nbytes))
    )
    return numbered, tuple(slots)


def _take(nbytes: int, slots: list[int], free: list[tuple[int, int]]) -> int:
    """Return the smallest free slot of one to two times the size, or a new slot."""
    index = bisect_left(free, (nbytes, 0))
    if index < len(free) and free[index][0] <= 2 * nbytes:
        return free.pop(index)[1]
    slots.append(nbytes)
    return len(slots) - 1


def memory_bytes(plan: Plan) -> int:
    """Return the total size of all slots."""
    return sum(plan.slots)
