"""A module's tensors on the device: uploaded once in their storage format, shared by all plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from backends.base.frozen_base import widen
from backends.base.interface import Array, Trainable
from backends.base.subtree_gradients import check_sizes
from backends.wgpu.capture.substitution import named_tensors
from backends.wgpu.device.packing import tensor_words
from backends.wgpu.device.target import Buffer, ComputeTarget
from backends.wgpu.graph.table_parts import RowPart, Tables, row_parts
from backends.wgpu.weights.host_copy import refuse_released, release
from backends.wgpu.weights.narrow_base import NarrowBase


class Weights:
    """The module's tensors; a tensor with several names is identified by the first.

    Attributes:
        module: The module on the host, with the values loaded last; frozen parameters are freed
            after their upload unless the module is returned to the user.
        base: Parameters in narrow storage.
        tables: Parts of each table that is larger than one buffer; each part has its own name.
    """

    def __init__(self, device: ComputeTarget, trainable: Trainable, largest_bytes: int) -> None:
        """Prepare without uploading.

        Args:
            device: The device.
            trainable: The task.
            largest_bytes: Largest size of a buffer.

        Raises:
            SamestepError: Another program has taken the module's frozen weights.
        """
        assert trainable.module is not None
        refuse_released(trainable.module)
        self.module: torch.nn.Module = trainable.module
        self._device = device
        self._blocks = trainable.blocks
        self._tensors = named_tensors(self.module)
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
        self._released = set() if trainable.given_back else frozen
        first: dict[int, str] = {}
        self._first_names = {
            name: first.setdefault(id(t), name) for name, t in self._tensors.items()
        }
        self.base = NarrowBase(self.module, trainable.base_dtype)
        widen(self.module)  # parameters without narrow storage
        self.tables: Tables = self._split(largest_bytes)
        self._parts = {str(part): part for parts in self.tables.values() for part in parts}
        self.base.split(self.tables)
        self._buffers: dict[str, Buffer] = {}

    def _split(self, largest_bytes: int) -> Tables:
        tables: dict[str, list[RowPart]] = {}
        for name, parameter in self.module.named_parameters():
            if parameter.dim() != 2:
                continue
            nbytes = self.base.nbytes(name) or 4 * parameter.numel()
            parts = row_parts(name, parameter.shape[0], nbytes, largest_bytes)
            if len(parts) > 1:
                tables[name] = parts
        return tables

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """The module's buffers, which are constant."""
        parameters = {id(parameter) for parameter in self.module.parameters()}
        return {name: t for name, t in self._tensors.items() if id(t) not in parameters}

    def values(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return values of tensors that the host still has; tied tensors stay shared, and narrow
        storage is widened."""
        values_by_id: dict[int, torch.Tensor] = {}
        tensors = {name: self._tensors[name] for name in names}
        for name, tensor in tensors.items():
            if id(tensor) not in values_by_id:
                parts = [str(part) for part in self.tables.get(name, ())] or [name]
                stored = [x for part in parts if (x := self.base.value(part)) is not None]
                value = torch.cat(stored) if stored else tensor.detach()
                values_by_id[id(tensor)] = value.float() if value.is_floating_point() else value
        return {name: values_by_id[id(tensor)] for name, tensor in tensors.items()}

    def nbytes(self) -> Mapping[str, int]:
        """Return the size of each tensor, and of each part of a table, on the device."""
        elements = {name: self._tensors[name].numel() for name in self._first_names.values()}
        for name, part in self._parts.items():
            elements[name] = part.rows * self._tensors[part.table].shape[1]
        return {name: self.base.nbytes(name) or 4 * count for name, count in elements.items()}

    def buffer(self, name: str) -> Buffer:
        """Return the buffer of a tensor or part; upload it on first use."""
        if name not in self._buffers:
            part = self._parts.get(name)
            words = self.base.take_words(name)
            if words is None:
                values = (
                    self._tensors[part.table][part.first : part.end]
                    if part
                    else self._tensors[name]
                )
                words = tensor_words(values)
            self._buffers[name] = self._device.buffer(words.nbytes)
            self._device.upload(self._buffers[name], words)
            self._release(part.table if part else name)
        return self._buffers[name]

    def _release(self, name: str) -> None:
        """Free the host's copy of a frozen parameter that is uploaded completely."""
        parts = [str(part) for part in self.tables.get(name, ())]
        if name in self._released and all(part in self._buffers for part in parts):
            release(self._tensors[name])

    def load(self, parameters: Sequence[Array]) -> None:
        """Take new values of the trainable tensors; see `Program.load`.

        Raises:
            SamestepError: The arrays do not fit the blocks.
        """
        check_sizes(parameters, self._blocks)
        for block, values in zip(self._blocks, parameters, strict=True):
            for tensor, place in block.slices():
                value = torch.from_numpy(values[place].reshape(tensor.shape))
                with torch.no_grad():
                    self._tensors[tensor.name].copy_(value)
                self._upload(self._first_names[tensor.name], value)

    def _upload(self, name: str, value: torch.Tensor) -> None:
        """What is on the device of a tensor, whole or in parts."""
        pieces = {str(part): value[part.first : part.end] for part in self.tables.get(name, ())}
        for piece, values in (pieces or {name: value}).items():
            if (buffer := self._buffers.get(piece)) is not None:
                self._device.upload(buffer, values.numpy())

    def forget(self) -> None:
        """Let go of the device's memory."""
        self._buffers.clear()
