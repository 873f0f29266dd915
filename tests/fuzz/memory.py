"""How much memory this process takes while something goes on, as the system counts it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
_SELF: Final = Path("/proc/self")
_FORGET_PEAK: Final = "5"
"""For clear_refs of proc(5): the peak starts anew at what is resident now."""


class Growth:
    """Of resident memory from the start on, at its peak.

    Attributes:
        peak_bytes: Known at the end.
    """

    peak_bytes = 0


@contextlib.contextmanager
def measured_growth() -> Iterator[Growth]:
    """Measure the body."""
    growth = Growth()
    gc.collect()
    before = _of_self("VmRSS")
    (_SELF / "clear_refs").write_text(_FORGET_PEAK)
    yield growth
    growth.peak_bytes = _of_self("VmHWM") - before


def _of_self(field: str) -> int:
    for line in (_SELF / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(field)
