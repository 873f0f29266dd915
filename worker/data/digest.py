"""BLAKE3 over named arrays: says whether two machines read the same thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray


def digest_arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Over sorted names, types, shapes and little-endian bytes in C order."""
    hasher = blake3()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        hasher.update(f"{name}\0{little.dtype.str}\0{little.shape}\0".encode())
        hasher.update(little.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()
