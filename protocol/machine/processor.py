"""The processor's name, features and usable cores, as the kernel reports them."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


def processor_name() -> str:
    """Return the processor's model, or its architecture if the model is unknown."""
    return _row("model name") or platform.processor() or platform.machine()


def processor_features() -> frozenset[str]:
    """Return x86 feature flags such as avx2 and fma; empty if unknown."""
    return frozenset(_row("flags").split())


@cache
def _row(label: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == label:
            return value.strip()
    return ""


def usable_cores() -> int:
    """Return the number of cores that this process may use; all cores if unknown."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
