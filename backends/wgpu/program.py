"""A task on a Vulkan device: plans for each shape of batch over one set of weights."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from backends.interface import Array, Batch, BlockGradient, Loss, Sums, Trainable
from backends.stream import GradientStream
from backends.wgpu.additivity import refuse_loss_that_does_not_add_up
from backends.wgpu.capture import Capture, capture_forward, capture_step
from backends.wgpu.device import Buffer, Copy, Device, Prepared, Readback
from backends.wgpu.kernels import MatmulShader
from backends.wgpu.layer_kernels import LayerKernels, lower_layer
from backends.wgpu.lowering import lower
from backends.wgpu.packing import from_words, pack, seed_words, tensor_words
from backends.wgpu.plan import Plan, make_plan
from backends.wgpu.stand_in import StandIn
from backends.wgpu.substitution import named_tensors
from protocol.errors import SamestepError

_DISPATCHES: Final = 128
"""Of one submission: cards end programs that run for seconds, and an abandoned microbatch ends
with the submission that runs."""
_AHEAD: Final = 3
"""Submissions that wait for the device, so that it never waits for us."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A part of a plan that is submitted at once, and what it brings back."""

    prepared: Prepared
    copies: tuple[Copy, ...]
    segment: int | None


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan on the device."""

    plan: Plan
    capture: Capture
    upload: Buffer
    submissions: tuple[Submission, ...]


class VulkanProgram:
    """A torch module captured for the device. See `backends.interface.Program`."""

    def __init__(
        self, device: Device, trainable: Trainable, cooperative: bool, matmul: MatmulShader
    ) -> None:
        if trainable.module is None or trainable.loss is None:
            raise SamestepError("the vulkan backend needs a torch module and a loss")
        self._device = device
        self._trainable = trainable
        self._module: torch.nn.Module = trainable.module
        self._loss = trainable.loss
        self._cooperative = cooperative
        self._matmul = matmul
        self._blocks = trainable.blocks
        self._trained = [tensor.name for block in self._blocks for tensor in block.tensors]
        self._resident: dict[str, Buffer] = {}
        self._slots: list[Buffer] = []
        self._plans: dict[Any, Ready] = {}
        self._lock = threading.RLock()
        self._names = _first_names(self._module)
        self._running: _Running | None = None

    def check(self, example: Batch) -> None:
        """Make the plan of a training step for batches like this one.

        Raises:
            SamestepError: The step cannot be captured, or an operator has no rule.
        """
        _check_parameters(self._module, self._trainable)
        arrays = {name: torch.from_numpy(a) for name, a in example.arrays.items()}
        refuse_loss_that_does_not_add_up(self._module, self._loss, arrays)
        self._step(example)

    def load(self, parameters: list[Array]) -> None:
        """Upload new values; see `Program.load`.

        Raises:
            SamestepError: The arrays do not fit the blocks.
        """
        sizes = [len(values) for values in parameters]
        expected = [block.elements for block in self._blocks]
        if sizes != expected:
            raise SamestepError(f"expected blocks of {expected} elements, got {sizes}")
        held = dict(self._module.named_parameters())
        with self._lock, torch.no_grad():
            for block, values in zip(self._blocks, parameters, strict=True):
                for tensor, place in block.slices():
                    held[tensor.name].copy_(torch.from_numpy(values[place].reshape(tensor.shape)))
                    resident = self._resident.get(self._names[tensor.name])
                    if resident is not None:
                        self._device.upload(resident, values[place])

    def gradients(self, batch: Batch, seed: int) -> GradientStream:
        """One microbatch; see `Program.gradients`."""
        if any(array.shape[:1] == (0,) for array in batch.arrays.values()):
            return GradientStream(self._zeros(batch), lambda: None)
        with self._lock:
            ready = self._step(batch)
            running = _Running(self._device, ready, self._packed(ready, batch.arrays, seed))
            self._running = running
        return GradientStream(self._items(ready, running, batch.weight), running.stop)

    def evaluate(self, batch: Batch) -> Sums:
        """Evaluation sums; the model's forward runs on the device, the sums on the host.

        Raises:
            SamestepError: The task has no evaluation, or it needs more of the model than a call.
        """
        if self._trainable.evaluate is None:
            raise SamestepError("this task has no evaluation")
        stand_in = StandIn(self._module, self.forward)
        arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
        with torch.no_grad():
            return self._trainable.evaluate(stand_in, arrays)

    def close(self) -> None:
        """Abandon what runs and let go of the device's memory; the device stays open."""
        with self._lock:
            if self._running is not None:
                self._running.stop()
            self._plans.clear()
            self._resident.clear()
            self._slots.clear()

    def _items(
        self, ready: Ready, running: _Running, weight: float
    ) -> Iterator[BlockGradient | Loss]:
        last = len(self._blocks) - 1
        loss = 0.0
        for segment in range(len(self._blocks)):
            arrays = running.next()
            if arrays is None:
                return
            number = last - segment
            if number == 0:
                loss = float(arrays.pop()[0])
            yield BlockGradient(number, self._flat(ready, number, arrays))
        yield Loss(loss, weight)

    def _flat(self, ready: Ready, number: int, arrays: list[Array]) -> Array:
        """The block's gradient; tensors that the loss does not reach are zeros."""
        outputs = ready.plan.outputs
        base = 1 + sum(len(block.tensors) for block in self._blocks[:number])
        rest = iter(arrays)
        parts = [
            np.zeros(tensor.elements, np.float32) if outputs[base + i] is None else next(rest)
            for i, tensor in enumerate(self._blocks[number].tensors)
        ]
        return np.concatenate(parts) if len(parts) > 1 else np.array(parts[0])

    def _zeros(self, batch: Batch) -> Iterator[BlockGradient | Loss]:
        for number in reversed(range(len(self._blocks))):
            yield BlockGradient(number, np.zeros(self._blocks[number].elements, np.float32))
        yield Loss(0.0, batch.weight)

    def _step(self, batch: Batch) -> Ready:
        shapes = tuple((name, a.shape, str(a.dtype)) for name, a in sorted(batch.arrays.items()))
        if shapes not in self._plans:
            arrays = {name: torch.from_numpy(a) for name, a in batch.arrays.items()}
            capture = capture_step(self._module, self._loss, self._trained, arrays)
            groups: list[list[int]] = []
            first = 1
            for block in self._blocks:
                groups.insert(0, list(range(first, first + len(block.tensors))))
                first += len(block.tensors)
            groups[-1].append(0)  # the loss comes with the last block
            self._plans[shapes] = self._ready(capture, groups)
        return self._plans[shapes]

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        key = (str(structure), tuple(_signature(leaf) for leaf in leaves))
        tensors = {str(i): x.numpy() for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        with self._lock:
            if key not in self._plans:
                capture = capture_forward(self._module, args, kwargs)
                (last,) = (n for n in capture.graph.graph.nodes if n.op == "output")
                count = len(last.args[0])
                self._plans[key] = self._ready(capture, [list(range(count))])
            ready = self._plans[key]
            arrays = _Running(self._device, ready, self._packed(ready, tensors, 0)).next()
        assert arrays is not None
        assert ready.capture.results is not None
        results = [
            from_words(array, like.shape, like.dtype)
            for array, like in zip(arrays, ready.capture.outputs, strict=True)
        ]
        return pytree.tree_unflatten(results, ready.capture.results)

    def _ready(self, capture: Capture, groups: Sequence[Sequence[int]]) -> Ready:
        """Lower, plan, and make all that the device needs."""
        lowered: dict[int, LayerKernels] = {}
        for kind in capture.kinds:
            if id(kind) not in lowered:
                lowered[id(kind)] = lower_layer(kind, self._cooperative, self._matmul)
        layers = [lowered[id(kind)] for kind in capture.kinds]
        held = named_tensors(self._module)
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        known = [None if name in parameters else held[name] for name in capture.tensors]
        others = len(capture.arrays) + 1
        outer = lower(capture.graph, [*known, *[None] * others], self._cooperative, self._matmul)
        plan = make_plan(capture, outer, layers, groups)
        upload = self._device.buffer(4 * plan.words)
        buffers = self._buffers(plan, upload)
        return Ready(plan, capture, upload, tuple(self._submissions(plan, buffers)))

    def _buffers(self, plan: Plan, upload: Buffer) -> list[Buffer]:
        held = named_tensors(self._module)
        slots = self._take_slots(plan.slots)
        buffers = []
        for place in plan.places:
            if place.packed:
                buffers.append(upload)
            elif place.tensor:
                if place.tensor not in self._resident:
                    self._resident[place.tensor] = self._uploaded(held[place.tensor])
                buffers.append(self._resident[place.tensor])
            elif place.constant is not None:
                buffers.append(self._uploaded(place.constant))
            else:
                buffers.append(slots[place.slot])
        return buffers

    @staticmethod
    def _packed(ready: Ready, arrays: Mapping[str, NDArray[Any]], seed: int) -> NDArray[np.uint32]:
        plan, capture = ready.plan, ready.capture
        seeds = seed_words(seed, capture.seeds)
        return pack(capture.arrays, plan.packed, plan.words, arrays, seeds)

    def _take_slots(self, sizes: Sequence[int]) -> list[Buffer]:
        """Memory for a plan's slots. Plans run one after the other, so they share it."""
        free = sorted(self._slots, key=lambda buffer: buffer.nbytes)
        found: dict[int, Buffer] = {}
        for slot in sorted(range(len(sizes)), key=lambda slot: -sizes[slot]):
            fitting = [b for b in free if sizes[slot] <= b.nbytes <= 2 * sizes[slot]]
            if fitting:
                found[slot] = fitting[0]
                free.remove(fitting[0])
            else:
                found[slot] = self._device.buffer(sizes[slot])
                self._slots.append(found[slot])
        return [found[slot] for slot in range(len(sizes))]

    def _uploaded(self, tensor: torch.Tensor) -> Buffer:
        words = tensor_words(tensor)
        buffer = self._device.buffer(words.nbytes)
        self._device.upload(buffer, words)
        return buffer

    def _submissions(self, plan: Plan, buffers: list[Buffer]) -> Iterator[Submission]:
        start = 0
        for number, segment in enumerate(plan.segments):
            while segment.end - start > _DISPATCHES:
                part = plan.dispatches[start : start + _DISPATCHES]
                yield Submission(self._device.prepare(part, buffers), (), None)
                start += _DISPATCHES
            copies = []
            for output in segment.outputs:
                held = plan.outputs[output]
                if held is not None:
                    copies.append(Copy(buffers[held], 4 * plan.elements[output]))
            part = plan.dispatches[start : segment.end]
            yield Submission(self._device.prepare(part, buffers), tuple(copies), number)
            start = segment.end


def _first_names(module: torch.nn.Module) -> dict[str, str]:
    """For every name of a tensor the first one it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in named_tensors(module).items()}


def _signature(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return repr(leaf)


def _check_parameters(module: torch.nn.Module, trainable: Trainable) -> None:
    held = dict(module.named_parameters())
    for block in trainable.blocks:
        for tensor in block.tensors:
            found = held.get(tensor.name)
            if found is None:
                raise SamestepError(f"the module has no {tensor.name!r}, which is in a block")
            if found.dtype != torch.float32 or tuple(found.shape) != tensor.shape:
                raise SamestepError(
                    f"expected {tensor.name!r} as float32 of shape {tensor.shape}, got "
                    f"{found.dtype} of shape {tuple(found.shape)}; trainable tensors are float32"
                )
            if not found.requires_grad:
                raise SamestepError(f"expected {tensor.name!r} not frozen: it is in a block")
    for name, layer in module.named_modules():
        if getattr(layer, "track_running_stats", False):
            raise SamestepError(
                f"{name!r} ({type(layer).__name__}) keeps running statistics, which no replica "
                "could follow; use LayerNorm or GroupNorm"
            )


class _Running:
    """One run of a plan, submitted a few parts ahead of what is read."""

    def __init__(self, device: Device, ready: Ready, words: NDArray[np.uint32]) -> None:
        self._device = device
        self._left = deque(ready.submissions)
        self._flying: deque[tuple[Submission, Readback]] = deque()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        if words.size:
            device.upload(ready.upload, words)
        self._submit()

    def next(self) -> list[Array] | None:
        """What the next segment brings; None once stopped."""
        with self._lock:
            while not self._stopped.is_set():
                submission, readback = self._flying.popleft()
                arrays = readback.result()
                self._submit()
                if submission.segment is not None:
                    return arrays
        return None

    def stop(self) -> None:
        """Submit no more, and wait for what runs."""
        self._stopped.set()
        with self._lock:
            self._left.clear()
            while self._flying:
                self._flying.popleft()[1].result()

    def _submit(self) -> None:
        while self._left and len(self._flying) < _AHEAD:
            part = self._left.popleft()
            self._flying.append((part, self._device.run(part.prepared, part.copies)))
