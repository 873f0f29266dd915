"""Reference implementations of the custom operators in torch on the CPU.

They are written for clarity, not for speed, and from the operators' definitions, not from the
shaders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from backends.wgpu.graph import threefry


def keep(seed: torch.Tensor, shape: Sequence[int], drop: float, site: int) -> torch.Tensor:
    """Return a dropout mask: zero with probability `drop`, else 1 / (1 - drop)."""
    mask = _words(seed, shape, site) >= np.uint32(threefry.threshold(drop))
    return torch.as_tensor(mask.astype(np.float32) * np.float32(1.0 / (1.0 - drop)))


def uniform(seed: torch.Tensor, shape: Sequence[int], site: int) -> torch.Tensor:
    """Return the upper 24 bits of each random word as a number in [0, 1)."""
    words = _words(seed, shape, site) >> np.uint32(8)
    return torch.as_tensor(words.astype(np.float32) * np.float32(2.0**-24))


def _words(seed: torch.Tensor, shape: Sequence[int], site: int) -> threefry.Words:
    low, high = (int(word) & 0xFFFFFFFF for word in seed.tolist())
    return threefry.words((low, high), site, math.prod(shape)).reshape(tuple(shape))


_RULES: Final[dict[str, Callable[..., torch.Tensor]]] = {"keep": keep, "uniform": uniform}


@cache
def register() -> Any:
    """Register the implementations with torch, for the CPU."""
    library: Any = torch.library.Library("samestep", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    for name, rule in _RULES.items():
        library.impl(name, rule)
    return library
