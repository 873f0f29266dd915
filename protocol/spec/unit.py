"""Describe the unit on which a run's gradients depend: a sample, a microbatch or a whole step."""

from __future__ import annotations

from protocol.spec.manifest import Manifest
from protocol.spec.sections.tasks import BatchSpec


def unit_text(batch: BatchSpec, manifest: Manifest | None) -> str:
    """Describe the unit on which gradients depend, and count the tensors that forward changes.

    Args:
        batch: The section `batch` of the run spec.
        manifest: The run's manifest; None before a worker is ready.
    """
    if batch.unit == "microbatch":
        text = f"microbatch of {batch.microbatch} samples: its size is part of the result"
    elif manifest is not None and manifest.embeddings is not None:
        text = f"step of {batch.samples} samples, compared with each other"
    else:
        text = f"sample, computed {batch.microbatch} at a time"
    blocks = () if manifest is None else manifest.blocks
    if buffer_count := sum(len(block.tensors) for block in blocks if not block.is_trained):
        tensors = "tensor" if buffer_count == 1 else "tensors"
        text += f"; {buffer_count} {tensors} that forward changes, averaged in each step"
    return text
