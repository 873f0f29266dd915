"""What this machine's processor is called, and what it can do, as the kernel tells it."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


def processor_name() -> str:
    """Its model; where that is not told, its architecture."""
    return _row("model name") or platform.processor() or platform.machine()


def processor_features() -> frozenset[str]:
    """Of x86: avx2, fma and the like; nothing where that is not told."""
    return frozenset(_row("flags").split())


@cache
def _row(wanted: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == wanted:
            return value.strip()
    return ""
