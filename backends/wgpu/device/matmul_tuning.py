"""Choose the kernel of a matrix product, by estimate or by a cached measurement.

On a GPU the first few candidates are timed, and the fastest is cached in a file per adapter and
driver. On a software adapter the estimate decides: compiling the other candidates would cost more
than it saves. All candidates give the same bits (see `backends.wgpu.shaders.matmul`), so the cache
and the measurement affect speed only.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from backends.quantization.quantize import stored_bytes
from backends.wgpu.device.device import Device
from backends.wgpu.device.subgroups import measure_matmul_traits
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

_MOST_CANDIDATES: Final = 4
"""Limit on the kernels that are timed for a product."""
_MIN_MULTIPLICATIONS: Final = 2**26
"""Products with fewer multiplications take less time than the measurement noise."""

_MOST_BYTES: Final = 2**30
"""Limit on the memory of a measurement."""
_DISPATCHES: Final = 8
"""Dispatches of one timed submission."""
_REPEATS: Final = 3
"""Timed submissions per kernel; the shortest time counts."""


class MatmulTuner:
    """Chooses kernels for one device; caches choices in memory and, if measured, on disk.

    Attributes:
        traits: The device's properties that decide its kernels.
        measurement_count: Number of measurements so far.
    """

    def __init__(self, device: Device, directory: Path | None = None) -> None:
        """Load earlier measurements.

        Args:
            device: The device.
            directory: Directory of the cache files; by default `vulkan` in the user's cache.
        """
        self._device = device
        self.traits = measure_matmul_traits(device)
        self._should_measure = not device.adapter.software
        self._choices: dict[str, Choice] = {}
        self.measurement_count = 0
        self._path: Path | None = None
        if self._should_measure:
            self._path = _cache_path(device, directory)
            self._choices = _load_choices(self._path)

    def shader(self, problem: MatmulProblem) -> tuple[Shader, tuple[int, int, int]]:
        """Return the chosen kernel and its grid; see `matmul_shader`."""
        choice = self.choose_kernel(problem)
        if problem.finish is not None and isinstance(choice, Lanes):
            choice = candidates(problem, self.traits)[0]
        return matmul_shader(problem, choice)

    def choose_kernel(self, problem: MatmulProblem) -> Choice:
        """Return the chosen kernel; measure large products on first use."""
        key = repr(problem.tuning_key)
        if key not in self._choices:
            unfused = replace(problem, finish=None)  # the epilogue hardly affects the time
            likely_choices = candidates(unfused, self.traits)[:_MOST_CANDIDATES]
            multiplications = problem.batch * problem.m * problem.k * problem.n
            if self._should_measure and multiplications >= _MIN_MULTIPLICATIONS:
                self._choices[key] = self.measure_fastest(unfused, likely_choices)
                self._save()
            else:
                self._choices[key] = likely_choices[0]
        return self._choices[key]

    def measure_fastest(self, problem: MatmulProblem, choices: tuple[Choice, ...]) -> Choice:
        """Return the fastest candidate, measured on zeros; the first if memory does not suffice."""
        sizes = _buffer_bytes(problem)
        if sum(sizes) > _MOST_BYTES:
            return choices[0]
        try:
            buffers = [self._device.buffer(size) for size in sizes]
        except DeviceError:
            return choices[0]
        seconds = []
        for choice in choices:
            shader, grid = matmul_shader(problem, choice)
            dispatch = Dispatch(shader, tuple(range(len(sizes))), grid, "tuning")
            commands = self._device.prepare([dispatch] * _DISPATCHES, buffers)
            self._device.run(commands).result()
            durations = []
            for _ in range(_REPEATS):
                start = time.perf_counter()
                self._device.run(commands).result()
                durations.append(time.perf_counter() - start)
            seconds.append(min(durations))
        self.measurement_count += 1
        return choices[seconds.index(min(seconds))]

    def _save(self) -> None:
        """Write the cache file. If that fails, a later process measures again."""
        if self._path is None:
            return
        document = {
            key: [type(choice).__name__, *_sizes(choice)] for key, choice in self._choices.items()
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary_path = self._path.with_suffix(f".{os.getpid()}")
            temporary_path.write_text(
                json.dumps(document, indent=0, sort_keys=True), encoding="utf-8"
            )
            temporary_path.replace(self._path)
        except OSError:
            self._path = None


def _cache_path(device: Device, directory: Path | None) -> Path | None:
    try:
        folder = directory or cache_directory(os.environ) / "vulkan"
    except StorageFailed:
        return None
    traits = json.dumps(device.traits(), sort_keys=True)
    return folder / f"matmul-{blake3(traits.encode()).hexdigest()[:16]}.json"


def _load_choices(path: Path | None) -> dict[str, Choice]:
    """Load a cache file; empty if it is missing or malformed."""
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
    """Return the size of every binding."""
    left, right = sides(problem)

    def elements(batch: int, outer: int, inner: int, extent: int, offset: int) -> int:
        last_output = (problem.batch - 1) * batch + (extent - 1) * outer + (problem.k - 1) * inner
        return offset + last_output + 1

    a = elements(left.batch, left.outer, left.inner, left.extent, left.offset)
    b = elements(right.batch, right.outer, right.inner, right.extent, right.offset)
    form, result = problem.b_form, problem.result
    last_output = (
        (problem.batch - 1) * problem.m * problem.n + (problem.m - 1) * result.row + problem.n
    )
    # Rounded up to rows of 64, so that every storage type divides the size.
    stored = 4 * b if form is None else stored_bytes(-(-b // 64), 64, form.storage)
    return [4 * a, stored, 4 * (result.offset + last_output)]
