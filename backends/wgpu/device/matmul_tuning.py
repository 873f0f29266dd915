"""Which kernel computes a product on this adapter: expected, or measured once and kept.

On a GPU the first few candidates are timed on the device, and the quickest is written to a file per
adapter and driver, so that the next start knows it. On a software adapter the estimate alone
decides: compiling the others would cost more than they could win. All candidates give the same
bits (see `backends.wgpu.shaders.matmul`), so nothing but time depends on the file or on a
measurement.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from backends.base.quantise import stored_bytes
from backends.wgpu.device.device import Device
from backends.wgpu.device.subgroups import matmul_traits
from backends.wgpu.shaders.dispatch import Dispatch, Shader
from backends.wgpu.shaders.matmul.shader import (
    Choice,
    Lanes,
    MatmulProblem,
    Tiles,
    candidates,
    matmul_shader,
)
from backends.wgpu.shaders.matmul.side import sides
from protocol.base.errors import DeviceError, StorageFailed
from protocol.machine.cache_directory import cache_directory

_TRIED: Final = 4
_WORTH_PRODUCTS: Final = 2**26
"""Smaller products take less time than the measurement's noise."""

_MEASURED_BYTES: Final = 2**30
_DISPATCHES: Final = 8
_REPEATS: Final = 3


class MatmulTuner:
    """The choices of one device, remembered for the process and, if measured, on disk."""

    def __init__(self, device: Device, directory: Path | None = None) -> None:
        """Take what an earlier process measured.

        Args:
            device: Where products are computed.
            directory: Of the files; by default `vulkan` in the user's cache.
        """
        self._device = device
        self.traits = matmul_traits(device)
        self._measure = not device.adapter.software
        self._chosen: dict[str, Choice] = {}
        self.measured = 0
        self._path: Path | None = None
        if self._measure:
            self._path = _path(device, directory)
            self._chosen = _load(self._path)

    def shader(self, problem: MatmulProblem) -> tuple[Shader, tuple[int, int, int]]:
        """The chosen kernel and its grid: `matmul_shader` for this adapter."""
        choice = self.choice(problem)
        if problem.finish is not None and isinstance(choice, Lanes):
            choice = candidates(problem, self.traits)[0]
        return matmul_shader(problem, choice)

    def choice(self, problem: MatmulProblem) -> Choice:
        """The chosen kernel; measured now if it is worth it and was not yet."""
        key = repr(problem.tuning_key)
        if key not in self._chosen:
            plain = replace(problem, finish=None)  # it takes no part in how long the sums take
            best = candidates(plain, self.traits)[:_TRIED]
            products = problem.batch * problem.m * problem.k * problem.n
            if self._measure and products >= _WORTH_PRODUCTS:
                self._chosen[key] = self.quickest(plain, best)
                self._save()
            else:
                self._chosen[key] = best[0]
        return self._chosen[key]

    def quickest(self, problem: MatmulProblem, tried: tuple[Choice, ...]) -> Choice:
        """Time these on the device, over zeros; the first where memory does not allow it."""
        sizes = _buffer_bytes(problem)
        if sum(sizes) > _MEASURED_BYTES:
            return tried[0]
        try:
            buffers = [self._device.buffer(size) for size in sizes]
        except DeviceError:
            return tried[0]
        seconds = []
        for choice in tried:
            shader, grid = matmul_shader(problem, choice)
            dispatch = Dispatch(shader, tuple(range(len(sizes))), grid, "tuning")
            prepared = self._device.prepare([dispatch] * _DISPATCHES, buffers)
            self._device.run(prepared).result()
            timed = []
            for _ in range(_REPEATS):
                start = time.perf_counter()
                self._device.run(prepared).result()
                timed.append(time.perf_counter() - start)
            seconds.append(min(timed))
        self.measured += 1
        return tried[seconds.index(min(seconds))]

    def _save(self) -> None:
        """Write what is known; a cache that cannot be written costs only time."""
        if self._path is None:
            return
        document = {
            key: [type(choice).__name__, *_sizes(choice)] for key, choice in self._chosen.items()
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            half = self._path.with_suffix(f".{os.getpid()}")
            half.write_text(json.dumps(document, indent=0, sort_keys=True), encoding="utf-8")
            half.replace(self._path)
        except OSError:
            self._path = None


def _path(device: Device, directory: Path | None) -> Path | None:
    try:
        folder = directory or cache_directory(os.environ) / "vulkan"
    except StorageFailed:
        return None
    traits = json.dumps(device.traits(), sort_keys=True)
    return folder / f"matmul-{blake3(traits.encode()).hexdigest()[:16]}.json"


def _load(path: Path | None) -> dict[str, Choice]:
    """What a file holds; nothing if it is not there or not as it was written."""
    kinds: dict[str, type[Choice]] = {"Tiles": Tiles, "Lanes": Lanes}
    if path is None:
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): kinds[row[0]](*row[1:]) for key, row in document.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _sizes(choice: Choice) -> tuple[int, ...]:
    if isinstance(choice, Tiles):
        return (
            choice.rows,
            choice.columns,
            choice.depth,
            choice.rows_per_invocation,
            choice.columns_per_invocation,
        )
    return choice.rows, choice.columns, choice.swap, choice.subgroup


def _buffer_bytes(problem: MatmulProblem) -> list[int]:
    """Of every binding."""
    left, right = sides(problem)

    def elements(batch: int, outer: int, inner: int, extent: int, offset: int) -> int:
        last = (problem.batch - 1) * batch + (extent - 1) * outer + (problem.k - 1) * inner
        return offset + last + 1

    a = elements(left.batch, left.outer, left.inner, left.extent, left.offset)
    b = elements(right.batch, right.outer, right.inner, right.extent, right.offset)
    form, into = problem.b_form, problem.result
    last = (problem.batch - 1) * problem.m * problem.n + (problem.m - 1) * into.row + problem.n
    # As if stored in rows of eight, which every form divides.
    stored = 4 * b if form is None else stored_bytes(-(-b // 64), 64, form.storage)
    return [4 * a, stored, 4 * (into.offset + last)]
