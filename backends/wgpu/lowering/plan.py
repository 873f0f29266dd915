"""A whole step, or forward, as dispatches over numbered buffers.

Layer calls are put in place of their nodes, each with buffers of its own for what it saves. Then
every buffer's life is known from its first writer to its last reader, and buffers that live at
different times share memory.
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
from backends.wgpu.graph.halves import words_of
from backends.wgpu.graph.values import elements_of
from backends.wgpu.lowering.kernels import Kernel
from backends.wgpu.lowering.layer_kernels import LayerKernels
from backends.wgpu.lowering.lowering import CallStep, LoweredGraph
from backends.wgpu.shaders.dispatch import Dispatch, Shader

_WORD_BYTES: Final = 4
_ALIGNMENT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Location:
    """What a buffer of a plan is.

    Exactly one is given.

    Attributes:
        tensor: A tensor of the module, by name.
        constant: A value known before the run.
        slot: Memory that is shared over time, by number.
        packed: The upload of the microbatch.
    """

    tensor: str = ""
    constant: torch.Tensor | None = None
    slot: int = -1
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Dispatches up to `end`, and the outputs that are read back then, by number of output."""

    end: int
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a device runs.

    Attributes:
        dispatches: In order.
        locations: What each buffer is.
        slots: Bytes of each slot.
        packed: Where each array, and last the seeds, lies in the upload, in words; None if unread.
        outputs: The buffer of each output; None for an output that is zero.
        elements: Of each output.
        segments: In order.
        nbytes: Of each buffer.
        at_once: How many microbatches there is room for: all slots, and the upload, hold so many
            slices.
        strides: Then of each buffer the bytes from a microbatch's slice to the next one's; 0 for
            what all read.
    """

    dispatches: tuple[Dispatch, ...]
    locations: tuple[Location, ...]
    slots: tuple[int, ...]
    packed: tuple[int | None, ...]
    words: int
    outputs: tuple[int | None, ...]
    elements: tuple[int, ...]
    segments: tuple[Segment, ...]
    nbytes: tuple[int, ...]
    at_once: int = 1
    strides: tuple[int, ...] = ()


def make_plan(
    capture: Capture,
    outer: LoweredGraph,
    layers: Sequence[LayerKernels],
    groups: Sequence[Sequence[int]],
    merge_kernels: Callable[[Sequence[Kernel]], Sequence[Kernel]] = lambda kernels: kernels,
) -> Plan:
    """Flatten and allocate.

    Args:
        capture: What was traced.
        outer: Its graph, lowered.
        layers: For each layer call its kind's kernels.
        groups: Outputs that are read back together, in the order they are wanted.
        merge_kernels: Puts kernels that follow each other into fewer dispatches.
    """
    builder = _Builder(layers)
    packed, words = builder.bind_inputs(capture, outer)
    for _, steps in groupby(outer.steps, type):
        kernels_and_calls = [*steps]
        for kernel in merge_kernels(
            [step for step in kernels_and_calls if isinstance(step, Kernel)]
        ):
            builder.kernel(kernel, builder.scope)
        for step in (step for step in kernels_and_calls if isinstance(step, CallStep)):
            (builder.layer_forward if step.forward else builder.layer_backward)(step)
    outputs = tuple(None if node is None else builder.scope[node] for node in outer.outputs)
    segments = _segments(builder.dispatches, outputs, groups)
    places, slots = _allocate(builder, outputs, segments)
    elements = tuple(0 if node is None else elements_of(node) for node in outer.outputs)
    return Plan(
        tuple(builder.dispatches),
        places,
        slots,
        packed,
        words,
        outputs,
        elements,
        tuple(segments),
        tuple(builder.nbytes),
    )


@dataclass(slots=True)
class _Builder:
    """Dispatches over buffers that are all distinct as yet."""

    layers: Sequence[LayerKernels]
    dispatches: list[Dispatch] = field(default_factory=list)
    fixed: dict[int, Location] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)
    scope: dict[fx.Node, int] = field(default_factory=dict)
    saved: dict[int, dict[fx.Node, int]] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)

    def new(self, words: int) -> int:
        """A buffer of so many words."""
        self.nbytes.append(max(-(-words * _WORD_BYTES // _ALIGNMENT_BYTES), 1) * _ALIGNMENT_BYTES)
        return len(self.nbytes) - 1

    def fix(self, location: Location, words: int) -> int:
        """A buffer that is not shared."""
        number = self.new(words)
        self.fixed[number] = location
        return number

    def constant(self, value: torch.Tensor) -> int:
        """The same buffer for the same tensor."""
        if id(value) not in self.constants:
            self.constants[id(value)] = self.fix(Location(constant=value), value.numel())
        return self.constants[id(value)]

    def bind_inputs(
        self, capture: Capture, outer: LoweredGraph
    ) -> tuple[tuple[int | None, ...], int]:
        """Tensors and constants; arrays are unpacked from the upload by a kernel each."""
        read = {node for step in outer.steps for node in step.reads}
        tensors, varying = (
            outer.inputs[: len(capture.tensors)],
            outer.inputs[len(capture.tensors) :],
        )
        for name, node in zip(capture.tensors, tensors, strict=True):
            if node in read:
                self.scope[node] = self.fix(Location(tensor=name), elements_of(node))
        for node, value in outer.constants.items():
            self.scope[node] = self.constant(value)
        seeds, *arrays = varying
        offsets: list[int | None] = []
        offset = 0
        upload = self.fix(Location(packed=True), 0)
        for node in (*arrays, seeds):
            if node not in read or node in outer.constants:
                offsets.append(None)
                continue
            words = 2 * capture.seeds if node is seeds else elements_of(node)
            self.scope[node] = self.new(words)
            self.dispatches.append(_unpack(upload, self.scope[node], offset, words))
            offsets.append(offset)
            offset += words
        return tuple(offsets), offset

    def kernel(self, kernel: Kernel, scope: dict[fx.Node, int]) -> None:
        """One dispatch, over the buffers that the scope says."""
        for node in kernel.writes:
            if node not in scope:
                scope[node] = self.new(words_of(node, elements_of(node)))
        buffers = tuple(scope[node] for node in (*kernel.reads, *kernel.writes))
        self.dispatches.append(Dispatch(kernel.shader, buffers, kernel.grid, kernel.label))

    def layer_forward(self, step: CallStep) -> None:
        """The kernels of a layer's forward; what they make is kept for its backward."""
        layer = self.layers[step.call]
        inputs = zip(layer.inputs, step.reads, strict=False)
        scope = {inner: self.scope[outer] for inner, outer in inputs}
        for node, value in layer.constants.items():
            scope[node] = self.constant(value)
        self.saved[step.call] = dict(scope)
        for index, outer_node in step.writes.items():
            inner_node = layer.results[index]
            words = words_of(inner_node, elements_of(inner_node))
            scope[inner_node] = self.scope[outer_node] = self.new(words)
        for kernel in layer.forward:
            self.kernel(kernel, scope)
        if not layer.checkpoint:
            self.saved[step.call] = scope

    def layer_backward(self, step: CallStep) -> None:
        """The kernels of a layer's backward."""
        layer = self.layers[step.call]
        scope = self.saved.pop(step.call)
        tangents = layer.inputs[len(layer.inputs) - len(step.reads) :]
        for inner, outer in zip(tangents, step.reads, strict=True):
            scope[inner] = self.scope[outer]
        for index, outer_node in step.writes.items():
            inner_node = layer.gradients[index]
            words = words_of(outer_node, elements_of(outer_node))
            if inner_node is None:
                self.scope[outer_node] = self.fix(Location(constant=torch.zeros(words)), words)
            else:
                scope[inner_node] = self.scope[outer_node] = self.new(words)
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
    """Each group is read back as soon as it and all before it are complete."""
    last_write = {n: at + 1 for at, dispatch in enumerate(dispatches) for n in dispatch.written}
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
    """A slot for each buffer; a slot is free again when the last reader is done."""
    last: dict[int, int] = {}
    for at, dispatch in enumerate(builder.dispatches):
        for number in dispatch.buffers:
            last[number] = at
    for segment in segments:
        output_buffers = (outputs[output] for output in segment.outputs)
        for number in (number for number in output_buffers if number is not None):
            last[number] = max(last.get(number, 0), segment.end - 1)
    last_uses: dict[int, list[int]] = defaultdict(list)
    for number, at in last.items():
        last_uses[at].append(number)
    slots: list[int] = []
    free: list[tuple[int, int]] = []  # (bytes, slot), sorted
    locations = dict(builder.fixed)
    take: Callable[[int], int] = lambda nbytes: _take(nbytes, slots, free)  # noqa: E731
    for at, dispatch in enumerate(builder.dispatches):
        for number in dispatch.written:
            if number not in locations:
                locations[number] = Location(slot=take(builder.nbytes[number]))
        for number_done in last_uses[at]:
            slot = locations[number_done].slot
            if slot >= 0:
                insort(free, (slots[slot], slot))
    unused = Location(slot=0) if slots else Location(packed=True)
    numbered = tuple(locations.get(number, unused) for number in range(len(builder.nbytes)))
    return numbered, tuple(slots)


def _take(nbytes: int, slots: list[int], free: list[tuple[int, int]]) -> int:
    """The smallest free slot that is large enough and not twice as large; else a new one."""
    at = bisect_left(free, (nbytes, 0))
    if at < len(free) and free[at][0] <= 2 * nbytes:
        return free.pop(at)[1]
    slots.append(nbytes)
    return len(slots) - 1


def memory_bytes(plan: Plan) -> int:
    """Of all slots together."""
    return sum(plan.slots)
