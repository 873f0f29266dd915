"""The frozen base of a module as the device keeps it: few bits, under the names of its tensors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from backends.base.frozen_base import frozen_base
from backends.base.quantise import STORAGE, Quantised, dequantise, quantise, stored_bytes
from backends.wgpu.capture.capture import Capture, Kind
from backends.wgpu.graph.opaque import LAYER_FORWARD
from backends.wgpu.graph.table_parts import Tables
from backends.wgpu.shaders.narrow import Narrow
from backends.wgpu.weights.host_copy import release
from protocol.spec.sections.model import BaseDtype

Forms = tuple[Narrow | None, ...]


class BaseLayout:
    """Which weights are stored narrower, and how: by shapes alone, so that plans need no values."""

    def __init__(self, module: torch.nn.Module, base_dtype: BaseDtype) -> None:
        self._storage = STORAGE[base_dtype]
        self._shapes: dict[str, tuple[int, int]] = {}
        if self._storage != "f32":
            self._shapes = {
                name: (parameter.shape[0], parameter.shape[1])
                for name, parameter in frozen_base(module).items()
            }

    def cut(self, tables: Tables) -> None:
        """Know the parts of these tables by their own names."""
        for name in tables.keys() & self._shapes.keys():
            columns = self._shapes[name][1]
            self._shapes |= {str(part): (part.rows, columns) for part in tables[name]}

    def nbytes(self, name: str) -> int | None:
        """Of a stored weight on the device."""
        shape = self._shapes.get(name)
        return None if shape is None else stored_bytes(*shape, self._storage)

    def forms(self, capture: Capture) -> Forms:
        """How the device holds each of the capture's tensors."""
        return tuple(
            Narrow.of_shape(*self._shapes[name], self._storage) if name in self._shapes else None
            for name in capture.tensors
        )

    def layer_forms(self, capture: Capture) -> list[tuple[Kind, Forms]]:
        """For each layer call its kind, and how its inputs are held."""
        tensors = [node for node in capture.graph.graph.nodes if node.op == "placeholder"]
        outer = dict(zip(tensors, self.forms(capture), strict=False))
        found: dict[int, Forms] = {}
        for node in capture.graph.graph.nodes:
            if node.target is LAYER_FORWARD:
                inputs, number = node.args
                found[int(number)] = tuple(outer.get(tensor) for tensor in inputs)
        return [(kind, found.get(i, ())) for i, kind in enumerate(capture.kinds)]


class NarrowBase(BaseLayout):
    """Stored weights by name; empty where they stay float32.

    The module's own copy of each goes at once, and the stored one when it is fetched for upload.
    """

    def __init__(self, module: torch.nn.Module, base_dtype: BaseDtype) -> None:
        super().__init__(module, base_dtype)
        held = dict(module.named_parameters())
        self._stored: dict[str, Quantised] = {}
        for name in self._shapes:
            values = held[name].detach().cpu().float().numpy()
            self._stored[name] = quantise(values, self._storage)
            del values
            release(held[name])

    def cut(self, tables: Tables) -> None:
        """Know the parts of these tables by their own names."""
        super().cut(tables)
        for name in tables.keys() & self._stored.keys():
            whole = self._stored.pop(name)
            self._stored |= {str(part): whole.part(part.first, part.end) for part in tables[name]}

    def value(self, name: str) -> torch.Tensor | None:
        """What a stored weight stands for; None for what stays float32 or is on the device."""
        stored = self._stored.get(name)
        return None if stored is None else torch.from_numpy(dequantise(stored))

    def take_words(self, name: str) -> NDArray[np.uint32] | None:
        """A stored weight as it is uploaded, which is once; None for what stays float32."""
        stored = self._stored.pop(name, None)
        return None if stored is None else stored.packed()
