"""Compile C to a shared library, with the compiler of the package `ziglang` or the system's `cc`.

Standard library only: the wheel build calls `build_kernels` in an otherwise empty environment. The
kernels are built when samestep is installed, never while it runs.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from protocol.base.errors import SamestepError
from protocol.exact.kernels.targets import FLAGS, FOLDER, TARGETS, library_path

_TIMEOUT_S: Final = 600


def zig() -> Path | None:
    """Return the compiler of the package `ziglang`, if it is installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "zig"


def compile_c(
    compiler: Sequence[str], flags: Iterable[str], sources: Iterable[Path], output: Path
) -> None:
    """Compile to the file `output`, atomically.

    Raises:
        SamestepError: The compiler failed.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-") as directory:
        result = output.with_suffix(f".{os.getpid()}")
        caches = {"ZIG_GLOBAL_CACHE_DIR": directory, "ZIG_LOCAL_CACHE_DIR": directory}
        command = [*compiler, *flags, "-o", str(result), *map(str, sources)]
        try:
            process = subprocess.run(  # noqa: S603  (a compiler, and our own text)
                command, env={**os.environ, **caches}, capture_output=True, timeout=_TIMEOUT_S,
                check=False,
            )  # fmt: skip
            if process.returncode:
                words = " ".join(process.stderr.decode(errors="replace").split())
                raise SamestepError(f"{compiler[0]} failed: {words[:400]}")
            result.replace(output)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SamestepError(f"{compiler[0]} failed: {error}") from None
        finally:
            result.unlink(missing_ok=True)


def build_kernels() -> list[Path]:
    """Build missing kernels beside their sources, and remove libraries of older sources.

    With zig, kernels are built for all targets; with `cc`, for the targets of this machine.

    Raises:
        SamestepError: There is no compiler, or it failed.
    """
    libraries = {target: library_path(target) for target in TARGETS}
    for path in FOLDER.glob("*.so"):
        if path not in libraries.values():
            path.unlink(missing_ok=True)
    zig_command, system = zig(), shutil.which("cc")
    if zig_command is None:
        libraries = {t: p for t, p in libraries.items() if t.machine == platform.machine()}
    missing = {target: path for target, path in libraries.items() if not path.exists()}
    for target, path in missing.items():
        compiler_flags: tuple[str, ...] = ("-s",)
        if zig_command is not None:
            machine = f"{target.machine}-linux-gnu"
            compiler_flags = ("-target", machine, "-fno-sanitize=all", "-s")
            compiler = [str(zig_command), "cc"]
        elif system is not None:
            compiler = [system]
        else:
            raise SamestepError(
                "expected a C compiler, found neither the package ziglang nor cc; "
                "pip install ziglang"
            )
        sources = sorted(FOLDER.glob("*.c"))
        compile_c(compiler, (*FLAGS, *compiler_flags, *target.flags), sources, path)
    return list(libraries.values())


if __name__ == "__main__":
    try:
        build_kernels()
    except SamestepError as failure:
        sys.exit(f"samestep: {failure}")
