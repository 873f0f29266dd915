"""The quantized frozen base of a module on the device, under the names of its tensors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from backends.quantization.frozen_base import frozen_base
from backends.quantization.mapped_weights import quantize_tensor
from backends.quantization.quantize import STORAGE, QuantizedMatrix, stored_bytes
from backends.wgpu.capture.capture import Capture, Kind
from backends.wgpu.graph.opaque import LAYER_FORWARD
from backends.wgpu.graph.table_parts import Tables
from backends.wgpu.shaders.quantized_layout import QuantizedLayout
from backends.wgpu.weights.host_copy import release
from protocol.spec.sections.model import BaseDtype

Layouts = tuple[QuantizedLayout | None, ...]


class BaseLayout:
    """The quantized weights and their layouts. They follow from shapes alone, so plans need no
    values."""

    def __init__(self, module: torch.nn.Module, base_dtype: BaseDtype) -> None:
        self._storage = STORAGE[base_dtype]
        self._shapes: dict[str, tuple[int, int]] = {}
        if self._storage != "f32":
            self._shapes = {
                name: (parameter.shape[0], parameter.shape[1])
                for name, parameter in frozen_base(module).items()
                if parameter.dim() == 2  # stacks of experts are refused in the trace
            }

    def split(self, tables: Tables) -> None:
        """Register the parts of these tables as separately named weights."""
        for name in tables.keys() & self._shapes.keys():
            columns = self._shapes[name][1]
            self._shapes |= {str(part): (part.rows, columns) for part in tables[name]}

    def nbytes(self, name: str) -> int | None:
        """Return the size of a quantized weight on the device, None if the tensor is not
        quantized."""
        shape = self._shapes.get(name)
        return None if shape is None else stored_bytes(*shape, self._storage)

    def layouts(self, capture: Capture) -> Layouts:
        """Return the layout of each of the capture's tensors, None if not quantized."""
        return tuple(
            QuantizedLayout.of_shape(*self._shapes[name], self._storage)
            if name in self._shapes
            else None
            for name in capture.tensors
        )

    def layer_layouts(self, capture: Capture) -> list[tuple[Kind, Layouts]]:
        """Return each kind of layer call with the layouts of its inputs."""
        tensors = [node for node in capture.graph.graph.nodes if node.op == "placeholder"]
        outer = dict(zip(tensors, self.layouts(capture), strict=False))
        layouts_by_kind: dict[int, Layouts] = {}
        for node in capture.graph.graph.nodes:
            if node.target is LAYER_FORWARD:
                inputs, number = node.args
                layouts_by_kind[int(number)] = tuple(outer.get(tensor) for tensor in inputs)
        return [(kind, layouts_by_kind.get(i, ())) for i, kind in enumerate(capture.kinds)]


class QuantizedBase(BaseLayout):
    """The quantized weights of the frozen base by name; empty if the base stays float32.

    A weight is quantized when it is uploaded, so the host never stores the quantized base. Until
    then this object has the weight as it was read, which takes no memory if it is mapped from a
    file; the module no longer has it.
    """

    def __init__(self, module: torch.nn.Module, base_dtype: BaseDtype) -> None:
        super().__init__(module, base_dtype)
        parameters = dict(module.named_parameters())
        self._sources: dict[str, torch.Tensor] = {}
        for name in self._shapes:
            self._sources[name] = parameters[name].detach()
            release(parameters[name])

    def split(self, tables: Tables) -> None:
        """Register the parts of these tables as separately named weights."""
        super().split(tables)
        for name in tables.keys() & self._sources.keys():
            table = self._sources.pop(name)
            self._sources |= {str(part): table[part.first : part.end] for part in tables[name]}

    def quantize(self, name: str) -> QuantizedMatrix | None:
        """Return a quantized weight before its upload; None if it stays float32 or has been
        uploaded."""
        source = self._sources.get(name)
        return None if source is None else quantize_tensor(source, self._storage)

    def take_words(self, name: str) -> NDArray[np.uint32] | None:
        """Return the words of a weight to upload, once; None if it stays float32."""
        source = self._sources.pop(name, None)
        return None if source is None else quantize_tensor(source, self._storage).pack()
