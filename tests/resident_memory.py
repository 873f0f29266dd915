"""Measure how much a process's resident memory grows during an operation."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

MIB: Final = 1 << 20
_RESET_PEAK: Final = "5"
"""Value for clear_refs of proc(5): reset the peak to the current resident size."""


class Growth:
    """Growth of resident memory since the start.

    Attributes:
        peak_bytes: Peak growth; known at the end.
        remaining_bytes: Growth that remains at the end; negative if memory was returned.
    """

    peak_bytes = 0
    remaining_bytes = 0


@contextlib.contextmanager
def measured_growth(process: int | Literal["self"] = "self") -> Iterator[Growth]:
    """Measure a process of this user during the `with` block."""
    growth, directory = Growth(), Path("/proc") / str(process)
    gc.collect()
    start_bytes = _resident(directory, "VmRSS")
    (directory / "clear_refs").write_text(_RESET_PEAK)
    yield growth
    growth.peak_bytes = _resident(directory, "VmHWM") - start_bytes
    growth.remaining_bytes = _resident(directory, "VmRSS") - start_bytes


def _resident(directory: Path, field: str) -> int:
    for line in (directory / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(field)
