"""Compute a digest of a data set's samples, so that workers can check that their data is the same.

The worker whose script starts the run reads microbatches spread over the data, for a limited time.
The run spec records their number, and workers that join read the same ones. A microbatch that is
read is called a part: it need not be one of the run's microbatches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from protocol.base.errors import SamestepError
from worker.scripts.nested_batches import batch_digest

SECONDS: Final = 10.0
"""Time limit for reading each data set at the start of a run."""
_GOLDEN: Final = (math.sqrt(5) - 1) / 2
"""Multiples of this number, modulo 1, are evenly spread."""

Collate = Callable[[Any, range, int], Any]
"""Takes a data set, sample numbers and a seed; returns their batch."""


@dataclass(frozen=True, slots=True)
class DataDigest:
    """The digest of a data set, and how much of it was read.

    Attributes:
        digest: Digest of the samples that were read and of the number of samples; 64 hex digits.
        parts: Number of microbatches that were read.
        samples_read: Number of samples that were read.
        samples: Number of samples in the data set.
    """

    digest: str
    parts: int
    samples_read: int
    samples: int


def data_digest(data: Any, collate: Collate, part_samples: int, parts: int | None) -> DataDigest:
    """Read a data set and compute its digest.

    Args:
        data: The data set.
        collate: Makes a batch.
        part_samples: Samples per microbatch.
        parts: Number of microbatches to read; None: as many as `SECONDS` allow, at least one.
    """
    samples, deadline_s = len(data), time.monotonic() + SECONDS
    hasher = blake3(f"{samples} samples".encode())
    count = samples_read = 0
    for part in _spread(math.ceil(samples / part_samples)):
        if count == parts or (parts is None and count and time.monotonic() > deadline_s):
            break
        rows = range(part * part_samples, min((part + 1) * part_samples, samples))
        try:
            digest = batch_digest(collate(data, rows, part))
        except SamestepError:
            digest = "no batch"  # the error is reported when the batch is needed
        hasher.update(f"{part} {digest}\n".encode())
        count, samples_read = count + 1, samples_read + len(rows)
    return DataDigest(hasher.hexdigest(), count, samples_read, samples)


def _spread(count: int) -> Iterator[int]:
    """Yield every number below `count` once, so that each prefix is spread evenly."""
    stride = max(1, round(count * _GOLDEN))
    while math.gcd(stride, count) > 1:
        stride += 1
    return (number * stride % count for number in range(count))
