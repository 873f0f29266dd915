"""What a program is made of on the device: shaders, and dispatches of them over buffers.

Plain values that plans are written in. They know neither a device nor torch, so that a plan can be
made, compared and counted anywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

WORKGROUPS_PER_DIMENSION: Final = 65_535
"""What every adapter offers; a larger grid is folded into its next dimension."""
SLICE_ALIGNMENT_BYTES: Final = 256
"""What every adapter can bind a part of a buffer at."""


_HALF: Final = re.compile(r"\bf16\b")


@dataclass(frozen=True, slots=True)
class Shader:
    """A WGSL module with one entry point, `main`.

    Attributes:
        source: The module; its storage buffers are `@group(0) @binding(i)`.
        bindings: How many there are. Binding i is the i-th buffer of a dispatch.
        writes: How many of them, the last ones, are outputs (read_write).
        in_bounds: Whether its text alone shows that every index lies in its array and every loop
            ends, whatever the buffers hold. Then a device adds no checks of its own.
    """

    source: str
    bindings: int
    writes: int = 1
    in_bounds: bool = False

    @property
    def module(self) -> str:
        """The source as a device takes it: what it needs beyond WGSL's core comes first."""
        return f"enable f16;\n{self.source}" if _HALF.search(self.source) else self.source


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One run of a shader.

    Attributes:
        shader: What runs.
        buffers: Numbers of the plan's buffers, one for each binding.
        grid: Workgroups in x, y and z; each at most WORKGROUPS_PER_DIMENSION.
        label: What it computes, for errors and measurements.
        strides: For several microbatches at once: for each buffer the bytes from one's slice to
            the next one's, 0 where all read the same.
        microbatches: How many at once.
    """

    shader: Shader
    buffers: tuple[int, ...]
    grid: tuple[int, int, int]
    label: str
    strides: tuple[int, ...] = ()
    microbatches: int = 1

    @property
    def written(self) -> tuple[int, ...]:
        """The buffers that it fills, or adds to."""
        return self.buffers[len(self.buffers) - self.shader.writes :]
