"""Digest of a data set's samples, by which workers know that they train on the same ones.

Whoever begins a run reads microbatches, spread over the data, for a stated time; how many it has
read stands in the run spec, and whoever joins reads as many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from protocol.base.errors import SamestepError
from samestep.nested import batch_digest

SECONDS: Final = 10.0
"""How long whoever begins a run reads each data set; small ones take less."""
_GOLDEN: Final = (math.sqrt(5) - 1) / 2

Collated = Callable[[Any, range, int], Any]
"""Takes a data set, samples, and a seed; gives their batch."""


@dataclass(frozen=True, slots=True)
class DataDigest:
    """What was read.

    Attributes:
        digest: Of the samples that were read, and how many there are in all; 64 hex digits.
        parts: Microbatches that were read.
        read: Samples in them.
        samples: In all.
    """

    digest: str
    parts: int
    read: int
    samples: int


def data_digest(data: Any, collated: Collated, part_samples: int, parts: int | None) -> DataDigest:
    """Read a data set.

    Args:
        data: It.
        collated: Makes a batch.
        part_samples: Of a microbatch.
        parts: How many to read; None: as many as `SECONDS` allow, at least one.
    """
    samples, until = len(data), time.monotonic() + SECONDS
    hasher = blake3(f"{samples} samples".encode())
    count = read = 0
    for part in _spread(math.ceil(samples / part_samples)):
        if count == parts or (parts is None and count and time.monotonic() > until):
            break
        rows = range(part * part_samples, min((part + 1) * part_samples, samples))
        try:
            digest = batch_digest(collated(data, rows, part))
        except SamestepError:
            digest = "no batch"  # found by whoever is to compute it
        hasher.update(f"{part} {digest}\n".encode())
        count, read = count + 1, read + len(rows)
    return DataDigest(hasher.hexdigest(), count, read, samples)


def _spread(count: int) -> Iterator[int]:
    """Every number below `count` once, the first ones spread evenly over all."""
    stride = max(1, round(count * _GOLDEN))
    while math.gcd(stride, count) > 1:
        stride += 1
    return (number * stride % count for number in range(count))
