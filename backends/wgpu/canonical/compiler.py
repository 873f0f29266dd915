"""C into machine code: by the compiler in the package `ziglang`, kept by what went in.

No compiler of the system is used, and none of its headers or libraries: what the texts call beside
each other (`fmaf` where a processor has no such instruction, `memcpy`) is in the process already.
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
"""Never a contraction, never a reordering: what decides bits is in the text alone."""
_INSTRUCTIONS: Final = "SAMESTEP_CPU_INSTRUCTIONS"
"""Environment: avx512, avx2 or scalar instead of the best that this processor has. For tests."""


@dataclass(frozen=True, slots=True)
class Instructions:
    """What code is made for. It decides speed, and no bit.

    Attributes:
        name: Of the set.
        flags: For the compiler.
        lanes: float32 values of a vector.
        rows: Of a tile of a product that fits the registers.
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

_NEEDED: Final = {
    "scalar": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "bmi2"}),
    "avx512": frozenset({
        "avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd",
    }),
}  # fmt: skip
"""What a processor must have, worst set first."""


@cache
def instructions() -> Instructions:
    """The best set that this processor has, or the one that the environment names.

    Raises:
        BackendUnavailable: There is none for this processor.
    """
    machine = platform.machine().lower()
    if machine in {"aarch64", "arm64"}:
        return SETS["neon"]
    if machine not in {"x86_64", "amd64"}:
        raise BackendUnavailable("cpu", f"there is no canonical arithmetic for {machine}")
    found = processor_features()
    there = [name for name, needed in _NEEDED.items() if needed <= found]
    named = os.environ.get(_INSTRUCTIONS, there[-1])
    if named not in there:
        offered = " or ".join(there)
        raise SamestepError(
            f"expected {_INSTRUCTIONS} {offered}, as this processor has, got {named!r}"
        )
    return SETS[named]


def why_not() -> str:
    """Why this machine has no compiler for canonical arithmetic; empty if it has."""
    if zig() is None:
        return "ziglang is not installed; pip install 'samestep[canonical]'"
    if sys.platform != "linux":
        return f"canonical arithmetic on a CPU needs Linux, this is {sys.platform}"
    return ""


def compiled(text: str, made_for: Instructions) -> ctypes.CDLL:
    """The library of this text, compiled now if it was not yet.

    Raises:
        BackendUnavailable: There is no compiler here.
        SamestepError: It refused the text.
    """
    if reason := why_not():
        raise BackendUnavailable("cpu", reason)
    compiler = zig()
    assert compiler is not None
    flags = (*FLAGS, *made_for.flags)
    version = _version(str(compiler.parent))
    key = blake3("\0".join((version, *flags, text)).encode()).hexdigest()[:32]
    try:
        folder = cache_directory(os.environ) / "canonical"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, StorageFailed):
        folder = Path(tempfile.mkdtemp(prefix="samestep-canonical-"))
    made = folder / f"{key}.so"
    if not made.exists():
        with tempfile.TemporaryDirectory(prefix="samestep-") as own:
            source = Path(own) / "kernels.c"
            source.write_text(text, encoding="utf-8")
            compile_c([str(compiler), "cc"], flags, [source], made)
    return ctypes.CDLL(str(made))


@cache
def _version(directory: str) -> str:
    return Path(directory).parent.joinpath("ziglang").name + "".join(
        sorted(p.name for p in Path(directory).parent.glob("ziglang-*.dist-info"))
    )
