"""Describe the machine of a measurement, and print tables."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def describe() -> str:
    """Return CPU model, cores available to this process, and versions of relevant libraries."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    libraries = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch"))
    python = platform.python_version()
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Python {python}, {libraries}"


def peak_bytes(pid: int | str = "self") -> int:
    """Return the peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def print_heading(title: str) -> None:
    """Print the title, the command and the machine of a measurement."""
    name = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv else sys.argv[0]
    print(title)
    print("command:", " ".join(["python -m", name, *sys.argv[1:]]))
    print("machine:", describe())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns: the first flush left, the others flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    print()
    for row in (header, ["-" * width for width in widths], *rows):
        first_cell, *other_cells = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first_cell, *other_cells]).rstrip())
    print(flush=True)
