"""The numeric signature: whether two workers give the same bits for the same microbatch.

What decides is the bits themselves: the gradients of a probe microbatch at the initial state. Two
workers whose bits agree there may still differ on other shapes if their libraries do, so what is
known to decide bits is part of it too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Final

from blake3 import blake3

from backends.base.interface import Batch, BlockGradient, Loss, Program

_PROBE_SEED: Final = 0
_NAMES_ONLY: Final = frozenset({"name"})
"""A processor's or card's name decides nothing by itself."""


def probe_digest(program: Program, batch: Batch) -> str:
    """Digest of the gradients and the loss of one microbatch, with the values now loaded."""
    hasher = blake3()
    for item in program.gradients([(batch, _PROBE_SEED)]):
        if isinstance(item, Loss):
            hasher.update(struct.pack("<dd", item.loss_sum, item.weight))
        elif isinstance(item, BlockGradient):
            hasher.update(struct.pack("<I", item.block))
            hasher.update(item.values.astype("<f4", copy=False).tobytes())
    return hasher.hexdigest()


def signature_digest(traits: Mapping[str, str], probe_digest: str) -> str:
    """Digest of all that decides a gradient's bits.

    Args:
        traits: What the backend says of itself (`Backend.signature`).
        probe_digest: Of this task on this device.
    """
    deciding = {key: value for key, value in traits.items() if key not in _NAMES_ONLY}
    document = json.dumps({**deciding, "probe": probe_digest}, sort_keys=True)
    return blake3(document.encode()).hexdigest()
