"""The CPU as a compute target: kernels are compiled and run by several threads.

This is the counterpart of `backends.wgpu.device.device.Device`. Submissions run in order, in a
dedicated thread. The instruction set and the number of threads do not affect the bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from backends.wgpu.canonical import products, team
from backends.wgpu.canonical.c_text import FUSED, PRELUDE, SEPARATE, c_kernel
from backends.wgpu.canonical.compiler import Instructions, best_instructions, compile_library
from backends.wgpu.canonical.convention import Convention
from backends.wgpu.canonical.library import c_library, use_library
from backends.wgpu.canonical.tree import read_module
from backends.wgpu.device.adapters import Adapter
from backends.wgpu.device.target import Buffer, CommandList, Copy
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.matmul.problem import MatmulProblem
from protocol.base.errors import DeviceError
from protocol.machine.processor import processor_name

_ALIGNMENT_BYTES: Final = 64
_LARGEST_BYTES: Final = 2**32 - 16
"""Kernels use 32-bit indices."""
_PIECES_PER_THREAD: Final = 4
"""Pieces of a kernel per thread, to balance the load."""
_SMALLEST_PIECE: Final = 16
"""Least number of workgroups in a piece: smaller pieces cost more than they gain."""


class _Call(ctypes.Structure):
    _fields_ = (
        ("run", ctypes.c_void_p), ("buffers", ctypes.c_void_p), ("bytes", ctypes.c_void_p),
        ("groups", ctypes.c_size_t), ("piece", ctypes.c_size_t),
        ("groups_x", ctypes.c_uint32), ("groups_y", ctypes.c_uint32),
        ("groups_z", ctypes.c_uint32), ("unused", ctypes.c_uint32),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShader(Shader):
    """A matrix product, which the CPU computes with `products.TEXT`."""

    problem: MatmulProblem


def product_shader(problem: MatmulProblem) -> tuple[Shader, tuple[int, int, int]]:
    """Return the shader of a matrix product; the grid is unused."""
    return ProductShader(repr(problem), 3, problem=problem), (1, 1, 1)


class _CpuCommandList(CommandList):
    """Calls that are ready to run, also as a C array."""

    __slots__ = ("array", "counters")

    def __init__(self, calls: list[_Call], references: list[Any]) -> None:
        super().__init__(calls, references)
        self.array = (_Call * len(calls))(*calls)
        self.counters = np.zeros((2, max(1, len(calls))), np.uint32)

    def __add__(self, other: CommandList) -> CommandList:
        return _CpuCommandList(self.calls + other.calls, self._references + other._references)


class _Readback:
    def __init__(self, future: Future[list[NDArray[np.float32]]]) -> None:
        self._future = future

    def result(self) -> list[NDArray[np.float32]]:
        return self._future.result()


class CpuTarget:
    """The CPU as a target that follows one convention."""

    def __init__(
        self, convention: Convention, threads: int = 1, instruction_set: Instructions | None = None
    ) -> None:
        """Compile the library that all programs share.

        Args:
            convention: The convention to follow.
            threads: Number of computing threads.
            instruction_set: Instruction set; by default the best that the processor supports.

        Raises:
            BackendUnavailable: There is no compiler, or no instruction set for this processor.
        """
        self.convention, self.threads = convention, threads
        self.instruction_set = instruction_set or best_instructions()
        self.adapter = Adapter(processor_name(), "other", "CPU", "", 0, 0, 0, None)
        definitions = (
            f"#define FUSED {int(convention.fused)}\n#define LANES {self.instruction_set.lanes}\n"
            f"#define ROWS {self.instruction_set.rows}\n"
        )
        arithmetic = FUSED if convention.fused else SEPARATE
        self._preamble = definitions + PRELUDE + arithmetic + c_library()
        library = compile_library(self._preamble + team.TEXT + products.TEXT, self.instruction_set)
        self._run_calls = library.run_calls
        self._pack_panels, self._products = (
            _address(library, x) for x in ("pack_panels", "products")
        )
        self._libraries = [library]
        self._kernels: dict[str, int] = {}
        self._panel_buffer = self.buffer(4)
        self._order = ThreadPoolExecutor(1, "canonical")
        self._team = ThreadPoolExecutor(max(1, threads - 1), "canonical")

    @property
    def largest_buffer_bytes(self) -> int:
        """Largest size of a buffer."""
        return _LARGEST_BYTES

    def buffer(self, nbytes: int) -> Buffer:
        """Allocate zeroed memory of at least `nbytes` bytes.

        Raises:
            DeviceError: Out of memory.
        """
        size = max(1, -(-nbytes // 16)) * 16
        try:
            memory = np.zeros(size + _ALIGNMENT_BYTES, np.uint8)
        except MemoryError:
            raise DeviceError(self.adapter.name, "out of memory") from None
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        return Buffer(size, memory[start : start + size])

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        """Fill the buffer from its start, before any later submission runs."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

        def write() -> None:
            buffer.handle[: flat.nbytes] = flat

        self._order.submit(write).result()

    def prepare(self, dispatches: Sequence[Dispatch], buffers: Sequence[Buffer]) -> CommandList:
        """Compile kernels that are not compiled yet, and bind buffers."""
        self._compile([item.shader for item in dispatches])
        calls: list[_Call] = []
        references: list[Any] = []
        for dispatch in dispatches:
            bound = [buffers[n] for n in dispatch.buffers]
            references.append(bound)
            if isinstance(dispatch.shader, ProductShader):
                calls += self._product(dispatch.shader.problem, bound, references)
            else:
                calls.append(self._kernel(dispatch, bound, references))
        return _CpuCommandList(calls, references)

    def run(self, commands: CommandList, copies: Sequence[Copy] = ()) -> _Readback:
        """Start the dispatches and then copy buffers back; returns immediately."""
        return _Readback(self._order.submit(self._run, commands, tuple(copies)))

    def close(self) -> None:
        """Stop the threads."""
        self._order.shutdown(cancel_futures=True)
        self._team.shutdown()

    # The methods below run in the submission thread.

    def _run(self, commands: CommandList, copies: tuple[Copy, ...]) -> list[NDArray[np.float32]]:
        if commands.calls:
            assert isinstance(commands, _CpuCommandList)
            commands.counters.fill(0)
            claimed, completed = (ctypes.c_void_p(row.ctypes.data) for row in commands.counters)
            arguments = (
                commands.array, ctypes.c_size_t(len(commands.calls)), claimed, completed,
                ctypes.c_uint32(self.threads), ctypes.c_uint32(self.convention.flushes),
            )  # fmt: skip
            helpers = [
                self._team.submit(self._run_calls, *arguments) for _ in range(self.threads - 1)
            ]
            self._run_calls(*arguments)
            wait(helpers)
        return [
            copy.buffer.handle[start : start + copy.nbytes].copy().view(np.float32)
            for copy in copies
            for start in (copy.buffer.offset + copy.offset,)
        ]

    def _compile(self, shaders: Sequence[Shader]) -> None:
        new_sources: dict[str, str] = {}
        for shader in shaders:
            if isinstance(shader, ProductShader) or shader.source in self._kernels:
                continue
            name = f"k{blake3(shader.source.encode()).hexdigest()[:24]}"
            new_sources[shader.source] = name
        if not new_sources:
            return
        texts = [
            c_kernel(use_library(read_module(text)), name) for text, name in new_sources.items()
        ]
        library = compile_library(self._preamble + "\n".join(texts), self.instruction_set)
        self._libraries.append(library)
        self._kernels |= {text: _address(library, name) for text, name in new_sources.items()}

    def _kernel(self, dispatch: Dispatch, bound: Sequence[Buffer], references: list[Any]) -> _Call:
        pointers = _pointers(bound)
        sizes = (ctypes.c_uint32 * len(bound))(*(buffer.nbytes for buffer in bound))
        references += [pointers, sizes]
        x, y, z = dispatch.grid
        return self._call(
            self._kernels[dispatch.shader.source], pointers, sizes, (x, y, z), _SMALLEST_PIECE
        )

    def _product(
        self, problem: MatmulProblem, bound: Sequence[Buffer], references: list[Any]
    ) -> list[_Call]:
        product = products.plan_product(
            problem, self.instruction_set.lanes, self.instruction_set.rows
        )
        if 4 * product.packed_words > self._panel_buffer.nbytes:
            self._panel_buffer = self.buffer(4 * product.packed_words)
        pointers, numbers = _pointers([*bound, self._panel_buffer]), product.words()
        references += [self._panel_buffer, pointers, numbers]
        calls = []
        if product.panels:
            grid = product.panels, 1, 1
            calls.append(self._call(self._pack_panels, pointers, numbers, grid, 1))
        grid = product.tiles, 1, 1
        return [*calls, self._call(self._products, pointers, numbers, grid, 1)]

    def _call(
        self, run: int, pointers: Any, sizes: Any, grid: tuple[int, int, int], smallest_piece: int
    ) -> _Call:
        groups = grid[0] * grid[1] * grid[2]
        piece = max(smallest_piece, -(-groups // (_PIECES_PER_THREAD * self.threads)))
        return _Call(
            run, ctypes.addressof(pointers), ctypes.addressof(sizes), groups, piece, *grid, 0
        )


def _pointers(buffers: Sequence[Buffer]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(buffers))(
        *(buffer.handle.ctypes.data + buffer.offset for buffer in buffers)
    )


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
