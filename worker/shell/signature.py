"""The numeric signature: whether two workers give the same bits for the same microbatch.

What decides is the bits themselves: the gradients of a probe microbatch of each shape at the
initial state. Two workers whose bits agree there may still differ later if their libraries,
drivers or cards do, so what is known to decide bits is part of it too.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from blake3 import blake3

from backends.base.interface import Batch, BlockGradient, Loss, Program

_PROBE_SEED: Final = 0
_PROCESSOR: Final = "processor"
"""Its name decides nothing by itself: what it computes with is the instruction set."""


def probe_digest(program: Program, batches: Iterable[Batch], *, ranks: int = 1) -> str:
    """Digest of the gradients and the loss of these microbatches, with the values now loaded.

    Args:
        program: Of the device.
        batches: The microbatches, one after the other.
        ranks: Of a group: each of so many computes every microbatch, and they are added up.
    """
    hasher = blake3()
    for batch in batches:
        for item in program.gradients([(batch, _PROBE_SEED)] * ranks):
            if isinstance(item, Loss):
                hasher.update(struct.pack("<dd", item.loss_sum, item.weight))
            elif isinstance(item, BlockGradient):
                hasher.update(struct.pack("<I", item.block))
                hasher.update(item.values.astype("<f4", copy=False).tobytes())
    return hasher.hexdigest()


def rows_probe(program: Program, batches: Iterable[Batch]) -> str:
    """The same of a task that trains nothing: what it keeps of these microbatches."""
    hasher = blake3()
    for batch in batches:
        captured = program.rows(batch)
        hasher.update(struct.pack("<d", captured.loss_sum))
        hasher.update(captured.rows.tobytes())
    return hasher.hexdigest()


def library_versions(module: Any) -> dict[str, str]:
    """The versions of the packages that a model's layers come from, by name.

    Of these alone, not of all that is loaded: another run may have left a library behind.

    Args:
        module: A torch module, or None.
    """
    layers = () if module is None else module.modules()
    packages = {type(layer).__module__.partition(".")[0] for layer in layers}
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    return {name: str(version) for name, version in versions.items() if version is not None}


def signature_digest(traits: Mapping[str, str], probe_digest: str) -> str:
    """Digest of all that decides a gradient's bits.

    Args:
        traits: What the backend says of itself (`Backend.signature`), and of the libraries.
        probe_digest: Of this task on this device.
    """
    deciding = {key: value for key, value in traits.items() if key != _PROCESSOR}
    document = json.dumps({**deciding, "probe": probe_digest}, sort_keys=True)
    return blake3(document.encode()).hexdigest()
