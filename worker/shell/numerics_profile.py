"""The numerics profile: equal for two workers that give the same bits for the same microbatch.

It contains the gradients of a probe microbatch of each shape at the initial state. Workers with the
same probe may still differ later if their libraries, drivers or cards do. The profile therefore
also contains everything else that is known to decide bits.
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
"""Not part of the digest: the instruction set decides bits, not the processor's name."""


def probe_digest(program: Program, batches: Iterable[Batch], *, ranks: int = 1) -> str:
    """Return the digest of the gradients and losses of these microbatches at the loaded weights.

    Args:
        program: The compiled task.
        batches: The microbatches.
        ranks: Number of torchrun ranks; each computes every microbatch, and the sums are added.

    Returns:
        BLAKE3, 64 hex digits.
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
    """Return the digest of the rows and losses that a capturing task records of microbatches."""
    hasher = blake3()
    for batch in batches:
        captured = program.capture_rows(batch)
        hasher.update(struct.pack("<d", captured.loss_sum))
        hasher.update(captured.rows.tobytes())
    return hasher.hexdigest()


def library_versions(module: Any) -> dict[str, str]:
    """Return the versions of the packages that define a model's layers, by package name.

    Other loaded packages do not count: an earlier run may have imported them.

    Args:
        module: A torch module, or None.
    """
    layers = () if module is None else module.modules()
    packages = {type(layer).__module__.partition(".")[0] for layer in layers}
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    return {name: str(version) for name, version in versions.items() if version is not None}


def loss_version(module: Any) -> dict[str, str]:
    """Return the version of losses over a vocabulary; empty for models without an output head.

    Releases that divide such a loss into other parts give other bits, even if the probe is equal.

    Args:
        module: A torch module, or None.
    """
    if module is None:
        return {}
    from backends.losses import vocabulary_loss  # noqa: PLC0415  torch

    has_head = vocabulary_loss.output_head(module) is not None
    return {"vocabulary_loss": vocabulary_loss.VERSION} if has_head else {}


def numerics_digest(traits: Mapping[str, str], probe_digest: str) -> str:
    """Return the digest of everything that decides a gradient's bits.

    Args:
        traits: `Backend.numerics_profile` and the library versions, by name.
        probe_digest: Digest of this task's probe on this device.
    """
    deciding_traits = {key: value for key, value in traits.items() if key != _PROCESSOR}
    document = json.dumps({**deciding_traits, "probe": probe_digest}, sort_keys=True)
    return blake3(document.encode()).hexdigest()
