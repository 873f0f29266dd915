"""Shaders, and their dispatches over buffers.

Plain values, independent of devices and torch, so that plans can be made, compared and counted
without a device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

WORKGROUPS_PER_DIMENSION: Final = 65_535
"""Limit that every adapter supports; a larger grid is folded into the next dimension."""
SLICE_ALIGNMENT_BYTES: Final = 256
"""Alignment of buffer slices that every adapter supports."""


_HALF_TYPE: Final = re.compile(r"\bf16\b")


@dataclass(frozen=True, slots=True)
class Shader:
    """A WGSL module with one entry point, `main`.

    Attributes:
        source: The module; its storage buffers are `@group(0) @binding(i)`.
        bindings: Number of bindings. Binding i is the i-th buffer of a dispatch.
        writes: Number of outputs (read_write), which are the last bindings.
        in_bounds: Whether every index is in bounds and every loop ends for any content of the
            buffers. The device then adds no bounds checks.
    """

    source: str
    bindings: int
    writes: int = 1
    in_bounds: bool = False

    @property
    def module(self) -> str:
        """The source with the `enable` directives that the source needs."""
        return f"enable f16;\n{self.source}" if _HALF_TYPE.search(self.source) else self.source


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One run of a shader.

    Attributes:
        shader: The shader.
        buffers: Numbers of the plan's buffers, one per binding.
        grid: Workgroups in x, y and z; each at most WORKGROUPS_PER_DIMENSION.
        label: Description of the computation, for errors and measurements.
        strides: For several microbatches: per buffer, the distance in bytes between the slices of
            consecutive microbatches; 0 if all microbatches read the same memory.
        microbatches: Number of microbatches that the dispatch processes.
    """

    shader: Shader
    buffers: tuple[int, ...]
    grid: tuple[int, int, int]
    label: str
    strides: tuple[int, ...] = ()
    microbatches: int = 1

    @property
    def written(self) -> tuple[int, ...]:
        """The buffers that the dispatch writes."""
        return self.buffers[len(self.buffers) - self.shader.writes :]
