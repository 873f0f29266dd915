"""Compile C with the compiler in the package `ziglang`, and cache the result by its inputs.

The system's compiler, headers and libraries are not used. The few external functions (`fmaf` on
processors without FMA, `memcpy`) are already loaded in the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from blake3 import blake3

from protocol.base.errors import BackendUnavailable, SamestepError, StorageFailed
from protocol.machine.cache_directory import cache_directory
from protocol.machine.compiler import compile_c, zig
from protocol.machine.processor import processor_features

FLAGS: Final = (
    "-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fno-fast-math", "-fwrapv", "-fno-strict-aliasing", "-fno-sanitize=all", "-fPIC", "-shared",
    "-nostdlib", "-w",
)  # fmt: skip
"""No contraction and no reordering: only the source decides the bits."""
_INSTRUCTIONS: Final = "SAMESTEP_CPU_INSTRUCTIONS"
"""Environment variable for tests: avx512, avx2 or scalar instead of the best supported set."""


@dataclass(frozen=True, slots=True)
class Instructions:
    """The instruction set that code is compiled for. It affects speed, never the bits.

    Attributes:
        name: Name of the set.
        flags: Compiler flags.
        lanes: float32 values per vector.
        rows: Rows of a matrix product's register tile.
    """

    name: str
    flags: tuple[str, ...]
    lanes: int
    rows: int


SETS: Final = {
    "avx512": Instructions(
        "avx512", ("-march=x86_64_v4", "-mprefer-vector-width=512"), 16, 12
    ),
    "avx2": Instructions("avx2", ("-march=x86_64_v3",), 8, 6),
    "scalar": Instructions("scalar", ("-march=x86_64",), 4, 6),
    "neon": Instructions("neon", (), 4, 6),
}  # fmt: skip

_REQUIRED_FEATURES: Final = {
    "scalar": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "bmi2"}),
    "avx512": frozenset({
        "avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd",
    }),
}  # fmt: skip
"""Processor features that each set needs, slowest set first."""


@cache
def best_instructions() -> Instructions:
    """Return the best set that this processor supports; on x86, the set named in the environment.

    Raises:
        BackendUnavailable: No set fits this processor.
        SamestepError: The processor does not support the named set.
    """
    machine = platform.machine().lower()
    if machine in {"aarch64", "arm64"}:
        return SETS["neon"]
    if machine not in {"x86_64", "amd64"}:
        raise BackendUnavailable(
            "cpu",
            f"canonical arithmetic needs an x86-64 or arm64 processor, got {machine}; use another "
            "machine, or arithmetic: native",
        )
    features = processor_features()
    available = [name for name, required in _REQUIRED_FEATURES.items() if required <= features]
    requested = os.environ.get(_INSTRUCTIONS, available[-1])
    if requested not in available:
        available_names = " or ".join(available)
        raise SamestepError(
            f"{_INSTRUCTIONS}: expected {available_names}, which this processor supports, got "
            f"{requested!r}"
        )
    return SETS[requested]


def why_unavailable() -> str:
    """Return why canonical arithmetic cannot be compiled on this machine; empty if it can."""
    if zig() is None:
        return "ziglang is not installed; pip install 'samestep[canonical]'"
    if sys.platform != "linux":
        return f"canonical arithmetic on a CPU needs Linux, this is {sys.platform}"
    return ""


def compile_library(text: str, instruction_set: Instructions) -> ctypes.CDLL:
    """Load the library compiled from `text`, from the cache if possible.

    Raises:
        BackendUnavailable: There is no compiler.
        SamestepError: Compilation failed.
    """
    if reason := why_unavailable():
        raise BackendUnavailable("cpu", reason)
    compiler = zig()
    assert compiler is not None
    flags = (*FLAGS, *instruction_set.flags)
    version = _compiler_version(str(compiler.parent))
    key = blake3("\0".join((version, *flags, text)).encode()).hexdigest()[:32]
    try:
        folder = cache_directory(os.environ) / "canonical"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, StorageFailed):
        folder = Path(tempfile.mkdtemp(prefix="samestep-canonical-"))
    library = folder / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(prefix="samestep-") as directory:
            source = Path(directory) / "kernels.c"
            source.write_text(text, encoding="utf-8")
            compile_c([str(compiler), "cc"], flags, [source], library)
    return ctypes.CDLL(str(library))


@cache
def _compiler_version(directory: str) -> str:
    return Path(directory).parent.joinpath("ziglang").name + "".join(
        sorted(p.name for p in Path(directory).parent.glob("ziglang-*.dist-info"))
    )
