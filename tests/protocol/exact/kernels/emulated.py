"""Kernels of another processor, run by qemu in a separate process."""

from __future__ import annotations

import ctypes
import mmap
import struct
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protocol.exact.kernels import library
from protocol.exact.kernels.library import Library
from protocol.exact.kernels.targets import FLAGS, FOLDER, BuildTarget
from protocol.machine.compiler import compile_c, zig

ARENA_BYTES = 1 << 23
_SPACE_BYTES = 1 << 20  # for each array


class EmulatedLibrary(Library):
    """Like `Library`; arrays travel through a file that both processes map."""

    def __init__(self, target: BuildTarget, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target = target
        program, arena = folder / "kernels", folder / "arena"
        flags = [flag for flag in FLAGS if flag not in {"-shared", "-nostdlib"}]
        flags += ["-target", f"{target.machine}-linux-musl", "-static", "-fno-sanitize=all"]
        sources = [*FOLDER.glob("*.c"), Path(__file__).with_suffix(".c")]
        compile_c([str(zig()), "cc"], [*flags, *target.flags], sources, program)
        arena.write_bytes(bytes(ARENA_BYTES))
        with arena.open("r+b") as file:
            self._arena = mmap.mmap(file.fileno(), 0)
        self._process = subprocess.Popen(
            [f"qemu-{target.machine}", program, arena], text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._arrays: list[np.ndarray] = []
        self._c: Any = SimpleNamespace(
            **{name: partial(self._call, name) for name in library._PROTOTYPES}
        )
        monkeypatch.setattr(library, "_address", self._record_array)
        self._address = library._address

    def _record_array(self, array: np.ndarray) -> int:
        self._arrays.append(array)
        address: int = array.__array_interface__["data"][0]
        return address

    def _call(self, name: str, *arguments: Any) -> int:
        arrays, self._arrays = self._arrays, []
        array_by_offset = {}
        for number, array in enumerate(arrays):
            address = array.__array_interface__["data"][0]
            offset = number * _SPACE_BYTES + address % 64  # keeps the alignment
            array_by_offset[offset] = array
            self._arena[offset : offset + array.nbytes] = array.tobytes()
        command = [name]
        for argument, kind in zip(arguments, library._PROTOTYPES[name][0], strict=True):
            if kind is ctypes.c_float:
                command.append(f"n{struct.unpack('<I', struct.pack('<f', argument))[0]}")
            elif argument is None or kind is not ctypes.c_void_p:
                command.append(f"n{int(argument or 0)}")
            else:
                command.append(f"p{_offset(argument, array_by_offset)}")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*command, file=self._process.stdin, flush=True)
        result = int(self._process.stdout.readline())
        for offset, array in array_by_offset.items():
            if array.flags.writeable:
                raw = np.frombuffer(self._arena, np.uint8, array.nbytes, offset)
                array.reshape(-1).view(np.uint8)[:] = raw
        return result

    def end(self) -> None:
        """End the process."""
        self._process.communicate(timeout=30)
        assert self._process.returncode == 0


def _offset(address: int, array_by_offset: dict[int, np.ndarray]) -> int:
    """Return the file offset of the data at this address."""
    starts = {
        array.__array_interface__["data"][0]: offset for offset, array in array_by_offset.items()
    }
    if address in starts:
        return starts[address]
    start = max(start for start in starts if start < address)
    return starts[start] + address - start
