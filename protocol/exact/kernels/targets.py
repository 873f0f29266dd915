"""Build targets of the C files: processors, compiler flags and file names.

Standard library only: the wheel build imports this in an otherwise empty environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent

FLAGS: Final = (
    "-std=c11", "-O3", "-ffp-contract=off", "-fno-fast-math", "-fno-math-errno",
    "-fno-trapping-math", "-fwrapv", "-fno-strict-aliasing", "-fPIC", "-shared", "-nostdlib", "-g0",
)  # fmt: skip
"""IEEE 754 defines + - * / sqrt; the compiler must not contract or reorder them."""


@dataclass(frozen=True, slots=True)
class BuildTarget:
    """A library to build.

    Attributes:
        name: The instruction set.
        machine: The `platform.machine()` on which it runs.
        flags: Compiler flags in addition to `FLAGS`.
        features: Processor features that it needs, as numpy names them.
    """

    name: str
    machine: str
    flags: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()


TARGETS: Final = (
    BuildTarget(
        "avx512", "x86_64",
        ("-mavx512f", "-mavx512cd", "-mavx512bw", "-mavx512dq", "-mavx512vl",
         "-mprefer-vector-width=512"),
        frozenset({"AVX512F", "AVX512CD", "AVX512BW", "AVX512DQ", "AVX512VL"}),
    ),
    BuildTarget("avx2", "x86_64", ("-mavx2",), frozenset({"AVX2"})),
    BuildTarget("sse2", "x86_64"),
    BuildTarget("neon", "aarch64"),
)  # fmt: skip
"""Best first."""


def library_path(target: BuildTarget) -> Path:
    """Return the path of a target's library, named by the digest of its sources and flags, so that
    a library built from other sources is never loaded."""
    digest = sha256("\0".join((*FLAGS, *target.flags)).encode() + sources()).hexdigest()
    return FOLDER / f"{target.name}-{digest[:16]}.so"


@cache
def sources() -> bytes:
    """Return the concatenated C sources, in order of their names."""
    return b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))
