"""A module's tensors on the device: uploaded once in their storage format, shared by all plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from backends.base.interface import Array, Trainable
from backends.base.subtree_gradients import check_sizes
from backends.quantization.frozen_base import convert_to_float32
from backends.quantization.quantize import QuantizedMatrix, dequantize
from backends.wgpu.capture.substitution import named_tensors
from backends.wgpu.device.packing import tensor_words
from backends.wgpu.device.target import Buffer, CommandList, ComputeTarget, Copy
from backends.wgpu.graph.table_parts import RowPart, Tables, split_rows
from backends.wgpu.weights.host_copy import is_released, refuse_released_module, release
from backends.wgpu.weights.quantized_base import QuantizedBase


class Weights:
    """The module's tensors on the device; a tensor with several names is identified by the first.

    Attributes:
        module: The module on the host, with the values loaded last; frozen parameters are freed
            after their upload, unless the module is used after the run.
        base: The quantized parameters.
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
        refuse_released_module(trainable.module)
        self.module: torch.nn.Module = trainable.module
        self._device = device
        self._blocks = trainable.blocks
        self._tensors = named_tensors(self.module)
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
        self._released = set() if trainable.keeps_module else frozen
        first_name_by_id: dict[int, str] = {}
        self._first_names = {
            name: first_name_by_id.setdefault(id(t), name) for name, t in self._tensors.items()
        }
        self.base = QuantizedBase(self.module, trainable.base_dtype)
        convert_to_float32(self.module)  # parameters that are not quantized
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
            parts = split_rows(name, parameter.shape[0], nbytes, largest_bytes)
            if len(parts) > 1:
                tables[name] = parts
        return tables

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """The module's buffers, which are constant."""
        parameters = {id(parameter) for parameter in self.module.parameters()}
        return {name: t for name, t in self._tensors.items() if id(t) not in parameters}

    def make_value_reader(self, names: Iterable[str]) -> Callable[[], dict[str, torch.Tensor]]:
        """Return a function that returns these tensors' values, before and after their upload.

        The function stores quantized weights and dequantizes them at each call. It reads other
        frozen weights, which the host releases, back from the device. Tied tensors stay shared.
        """
        tensors = {name: self._tensors[name] for name in names}
        stored: dict[int, list[QuantizedMatrix]] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in stored:
                parts = (self.base.quantize(part) for part in self._names_on_device(name))
                stored[id(tensor)] = [part for part in parts if part is not None]

        def values() -> dict[str, torch.Tensor]:
            values_by_id: dict[int, torch.Tensor] = {}
            for name, tensor in tensors.items():
                if id(tensor) not in values_by_id:
                    dequantized = [
                        torch.from_numpy(dequantize(part)) for part in stored[id(tensor)]
                    ]
                    value = torch.cat(dequantized) if dequantized else self._value(name)
                    values_by_id[id(tensor)] = value.float() if value.is_floating_point() else value
            return {name: values_by_id[id(tensor)] for name, tensor in tensors.items()}

        return values

    def _names_on_device(self, name: str) -> list[str]:
        """Return the name of each part of a tensor, or of the whole tensor."""
        return [str(part) for part in self.tables.get(name, ())] or [name]

    def _value(self, name: str) -> torch.Tensor:
        """Return a tensor that is not quantized, from the device if the host has released it."""
        tensor = self._tensors[name]
        if not is_released(tensor):
            return tensor.detach()
        sizes = self.nbytes()
        parts = self._names_on_device(self._first_names[name])
        copies = [Copy(self._buffers[part], sizes[part]) for part in parts]
        flat = np.concatenate(self._device.run(CommandList([], []), copies).result())
        return torch.from_numpy(flat).view(tensor.shape)

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
        """Load new values of the trainable tensors; see `Program.load`.

        Raises:
            SamestepError: The arrays do not fit the blocks.
        """
        check_sizes(parameters, self._blocks)
        for block, values in zip(self._blocks, parameters, strict=True):
            for tensor, span in block.slices():
                value = torch.from_numpy(values[span].reshape(tensor.shape))
                with torch.no_grad():
                    self._tensors[tensor.name].copy_(value)
                self._upload(self._first_names[tensor.name], value)

    def _upload(self, name: str, value: torch.Tensor) -> None:
        """Upload a tensor's new values into its buffer, or into those of its parts."""
        parts = {str(part): value[part.first : part.end] for part in self.tables.get(name, ())}
        for part_name, values in (parts or {name: value}).items():
            if (buffer := self._buffers.get(part_name)) is not None:
                self._device.upload(buffer, values.numpy())

    def free(self) -> None:
        """Release the device's memory."""
        self._buffers.clear()
