"""Tensors of a module that forward changes: running statistics, codebooks, teachers, counters.

Each microbatch starts from the values that the last step committed; they are restored after the
microbatch. Workers exchange the change that a microbatch made, times the microbatch's weight, so an
unchanged buffer keeps its bits. All microbatches of a step must change a counter by the same
amount.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.base.interface import Array, CounterMismatch
from protocol.base.errors import DataError
from protocol.spec.manifest import Block, TensorSpec

LARGEST_COUNT: Final = 1 << 24
"""Integers up to this are exact in float32."""
_PERTURBATION: Final = 1 + 2**-6, 2**-10
"""Factor and summand that perturb trained weights during the search for tensors that forward
changes."""
_LARGEST_CHANGE: Final = 1 << 16
"""Largest change of a counter in one step: its mean over microbatches must round to the same
integer."""


@dataclass(slots=True)
class _Buffer:
    """One tensor that forward changes.

    Attributes:
        block: Number of the tensor's block.
        name: Name in the module's state.
        holder: The submodule's dict with the tensor, where forward may put another tensor.
        key: Key of the tensor in `holder`.
        tensor: The tensor itself.
        committed: The tensor's value at the start of the step.
    """

    block: int
    name: str
    holder: dict[str, Any]
    key: str
    tensor: torch.Tensor
    committed: torch.Tensor

    @property
    def is_counter(self) -> bool:
        return not self.tensor.is_floating_point()

    def change(self) -> torch.Tensor:
        """Return the change since the start of the step, in the tensor's shape; int64 for a
        counter."""
        value: torch.Tensor = self.holder[self.key]
        if value.shape != self.committed.shape or value.dtype != self.committed.dtype:
            raise DataError(
                f"expected the buffer {self.name!r} to stay {_describe(self.committed)}, got "
                f"{_describe(value)}; give it its final shape and type when the module is built"
            )
        if self.is_counter:
            return value.long() - self.committed.long()
        return value.detach() - self.committed

    def is_unchanged(self) -> bool:
        """Whether the value has the committed bits; NaN equals NaN."""
        value = self.holder[self.key].detach().to(self.committed.device)
        if value.shape != self.committed.shape or value.dtype != self.committed.dtype:
            return False
        return torch.equal(value.nan_to_num(), self.committed.nan_to_num())

    def restore(self) -> None:
        if self.holder[self.key] is not self.tensor:
            self.holder[self.key] = self.tensor
        self.tensor.copy_(self.committed)


class StepBuffers:
    """The tensors of a manifest's blocks of kind `buffers` and `counters`.

    Args:
        module: The module that has the tensors, with their values at the start of the first step.
        blocks: The manifest's blocks.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._counts: dict[str, list[int]] = {}
        self._buffers = [
            _buffer(module, number, tensor)
            for number, block in enumerate(blocks)
            if not block.is_trained
            for tensor in block.tensors
        ]

    def load(self, values: Sequence[Array]) -> None:
        """Start the next step from these values: one flat float32 array per block."""
        self._counts.clear()
        by_name = {
            tensor.name: values[number][part].reshape(tensor.shape)
            for number, block in enumerate(self._blocks)
            if not block.is_trained
            for tensor, part in block.slices()
        }
        with torch.no_grad():
            for buffer in self._buffers:
                value = by_name[buffer.name]
                value = np.rint(value, out=value.copy()) if buffer.is_counter else value
                buffer.committed.copy_(torch.from_numpy(value))
        self._restore()

    @contextmanager
    def restore_afterwards(self) -> Iterator[None]:
        """Context after which the buffers have the values of the step's start again."""
        try:
            yield
        finally:
            self._restore()

    def changes(self, weight: float) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yield the changes that a microbatch has made: block, name, and the flat float32 change
        times the microbatch's weight.

        Raises:
            CounterMismatch: An earlier microbatch of the step has changed a counter by another
                amount.
            DataError: Forward has changed a buffer's shape or type, or a counter is too large.
        """
        with torch.no_grad():
            for buffer in self._buffers:
                change = buffer.change()
                if buffer.is_counter:
                    self._check_count(buffer, change)
                yield buffer.block, buffer.name, change.reshape(-1).float() * weight

    def _check_count(self, counter: _Buffer, change: torch.Tensor) -> None:
        counts = change.reshape(-1).tolist()
        expected = self._counts.setdefault(counter.name, counts)
        for expected_count, actual_count in zip(expected, counts, strict=True):
            if expected_count != actual_count:
                raise CounterMismatch(counter.name, expected_count, actual_count)
        largest_value = int((counter.committed.long() + change).abs().max()) if counts else 0
        if largest_value > LARGEST_COUNT or any(abs(count) > _LARGEST_CHANGE for count in counts):
            raise DataError(
                f"expected the counter {counter.name!r} within {LARGEST_COUNT}, and changes of at "
                f"most {_LARGEST_CHANGE}, got {largest_value} after a change by "
                f"{max(counts, key=abs)}; keep large numbers in a float32 buffer"
            )

    def _restore(self) -> None:
        with torch.no_grad():
            for buffer in self._buffers:
                buffer.restore()


def find_changed_tensors(module: nn.Module, forward: Callable[[], object]) -> list[str]:
    """Return the names of buffers and frozen parameters that a call writes, and restore them.

    The trained weights are perturbed for the call: otherwise an average of teacher and student
    would not change a teacher that equals its student.
    """
    tensors = _untrained_tensors(module)
    specs = [TensorSpec(name=name, shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
    buffers = [_buffer(module, 0, spec, on_host=True) for spec in specs]
    versions = [buffer.tensor._version for buffer in buffers]  # noqa: SLF001
    with _perturb_trained_weights(module):
        forward()
    changed_names = [
        buffer.name
        for buffer, version in zip(buffers, versions, strict=True)
        if buffer.tensor._version != version or not buffer.is_unchanged()  # noqa: SLF001
    ]
    with torch.no_grad():
        for buffer in buffers:
            buffer.restore()
    return changed_names


@contextmanager
def _perturb_trained_weights(module: nn.Module) -> Iterator[None]:
    trained_parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    saved_values = [parameter.detach().clone() for parameter in trained_parameters]
    factor, summand = _PERTURBATION
    with torch.no_grad():
        for parameter in trained_parameters:
            parameter.mul_(factor).add_(summand)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(trained_parameters, saved_values, strict=True):
                parameter.copy_(values)


def buffer_blocks(module: nn.Module, names: Sequence[str], elements: int) -> tuple[Block, ...]:
    """Divide the named tensors into blocks: floats, about `elements` in each block, then counters.

    These blocks come first in a manifest, so they are sent last: a microbatch's changes are known
    only after its backward.

    Raises:
        DataError: A floating-point tensor is not float32.
    """
    tensors = _untrained_tensors(module)
    floats: list[list[TensorSpec]] = []
    counters = []
    for name in names:
        tensor = tensors[name]
        spec = TensorSpec(name=name, shape=tuple(tensor.shape))
        if not tensor.is_floating_point():
            counters.append(spec)
            continue
        if tensor.dtype != torch.float32:
            raise DataError(
                f"expected {name!r}, which changes in forward, in float32, got {tensor.dtype}; "
                "convert it with .float()"
            )
        if not floats or sum(tensor_spec.elements for tensor_spec in floats[-1]) >= elements:
            floats.append([])
        floats[-1].append(spec)
    blocks = [
        Block(name=f"buffers.{number}", kind="buffers", tensors=tuple(part))
        for number, part in enumerate(floats)
    ]
    if counters:
        blocks.append(Block(name="counters", kind="counters", tensors=tuple(counters)))
    return tuple(blocks)


def _untrained_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    frozen_parameters = {
        name: parameter
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
    return {**frozen_parameters, **dict(module.named_buffers())}


def _buffer(module: nn.Module, block: int, tensor: TensorSpec, *, on_host: bool = False) -> _Buffer:
    path, _, key = tensor.name.rpartition(".")
    try:
        owner: Any = module.get_submodule(path)
    except AttributeError:
        owner = module
    holder = owner._buffers if key in owner._buffers else owner._parameters  # noqa: SLF001
    cached = holder.get(key)
    if cached is None or tuple(cached.shape) != tensor.shape:
        raise DataError(
            f"expected a buffer {tensor.name!r} of shape {tensor.shape} in the module, found none"
        )
    committed = cached.detach().to("cpu" if on_host else cached.device, copy=True)
    return _Buffer(block, tensor.name, holder, key, cached, committed)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
