"""The frozen base of a module as the device keeps it: few bits, under the names of its tensors."""

from __future__ import annotations

import torch
from numpy.typing import NDArray

from backends.frozen_base import STORAGE, frozen_base, round_frozen_base
from backends.quantise import Quantised, quantise
from backends.wgpu.capture import Capture, Kind
from backends.wgpu.narrow import Narrow
from backends.wgpu.opaque import LAYER_FORWARD
from protocol.run_spec import BaseDtype

Forms = tuple[Narrow | None, ...]


class NarrowBase:
    """Stored weights by name; empty where they stay float32.

    The module's own weights become what the stored ones stand for, since the host reads them too.
    """

    def __init__(self, module: torch.nn.Module, base_dtype: BaseDtype) -> None:
        storage = STORAGE[base_dtype]
        self._stored: dict[str, Quantised] = {}
        if storage != "f32":
            for name, parameter in frozen_base(module).items():
                values = parameter.detach().cpu().float().numpy()
                self._stored[name] = quantise(values, storage)
            round_frozen_base(module, base_dtype)

    def words(self, name: str) -> NDArray | None:  # type: ignore[type-arg]
        """A stored weight as it is uploaded."""
        stored = self._stored.get(name)
        return None if stored is None else stored.packed()

    def nbytes(self, name: str) -> int | None:
        """Of a stored weight on the device."""
        stored = self._stored.get(name)
        return None if stored is None else stored.nbytes

    def forms(self, capture: Capture) -> Forms:
        """How the device holds each of the capture's tensors."""
        return tuple(
            Narrow.of(self._stored[name]) if name in self._stored else None
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
