"""Run workgroups of a kernel on integers alone, and watch every access to an array.

An index must follow from sizes and the invocation, and lie within its array. Between two barriers
no invocation may read what another writes, and no two may write the same element. All invocations
must reach each barrier. Software Vulkan runs invocations in lockstep, so it would show none of
these faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from backends.wgpu.canonical.tree import Array, Barrier, Expression, Name, Statement, size_of
from backends.wgpu.device.device import BUFFER_ALIGNMENT_BYTES
from backends.wgpu.shaders.dispatch import Shader
from benchmarks.shader_counts import KnownValues, WorkgroupExecution, read_kernel

_NOBODY, _SEVERAL = -1, -2


def assert_valid_accesses(
    shader: Shader, grid: tuple[int, int, int], nbytes: Sequence[int]
) -> None:
    """Check the first and last workgroup; branches on floats are taken always, never, and
    alternately.

    Args:
        shader: A kernel of 32-bit floats.
        grid: Its workgroups.
        nbytes: Size of each binding.
    """
    module = read_kernel(shader.source)
    assert len(nbytes) == shader.bindings
    padded_sizes = [-(-size // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES for size in nbytes]
    x, y, z = grid
    for group in {(0, 0, 0), (x - 1, y - 1, z - 1)}:
        for branches in ((True,), (False,), (True, False), (False, True)):
            run = _Watched(module, group, padded_sizes, branches)
            run.execute_block(module.body)
            if not run.choices:
                break


class _Watched(WorkgroupExecution):
    def __init__(
        self,
        module: Any,
        group: tuple[int, int, int],
        nbytes: Sequence[int],
        choices: Sequence[bool],
    ) -> None:
        super().__init__(module, group)
        self._nbytes = nbytes
        self._taken = choices
        self.choices = 0
        self._writes = False
        self._read_by: dict[str, Any] = {}
        self._written_by: dict[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        for array in self.module.arrays.values():
            if array.binding < 0:
                self._read_by[array.name] = np.full(array.elements, _NOBODY)
                self._written_by[array.name] = np.full(array.elements, _NOBODY)

    def execute(self, statement: Statement) -> None:
        if isinstance(statement, Barrier):
            assert self.active_lanes.all(), "a barrier that not all come to"
            self._forget()
        super().execute(statement)

    def branch(
        self, condition: KnownValues, then: Sequence[Statement], otherwise: Sequence[Statement]
    ) -> None:
        if condition is None:
            self.choices += 1
            if not self._taken[self.choices % len(self._taken)]:
                return
        super().branch(condition, then, otherwise)

    def assign(self, target: Expression, value: KnownValues) -> None:
        self._writes = not isinstance(target, Name)
        super().assign(target, value)
        self._writes = False

    def count(self, array: Array, at: KnownValues) -> None:
        assert at is not None, f"an index of {array.name} depends on what a buffer holds"
        places, lanes = at[self.active_lanes], np.flatnonzero(self.active_lanes)
        elements = array.elements
        if array.binding >= 0:
            elements = self._nbytes[array.binding] // (4 * size_of(array.element))
        assert places.min() >= 0
        assert places.max() < elements, f"{array.name}[{places.max()}] of {elements}"
        if array.binding < 0:
            self._races(array.name, places, lanes)
        super().count(array, at)

    def _races(self, name: str, places: Any, lanes: Any) -> None:
        read, written = self._read_by[name], self._written_by[name]
        writers = written[places]
        assert ((writers == _NOBODY) | (writers == lanes)).all(), f"{name} was written by another"
        if self._writes:
            readers = read[places]
            assert ((readers == _NOBODY) | (readers == lanes)).all(), f"{name} is still read"
            assert len(np.unique(places)) == len(places), f"{name} is written twice"
            written[places] = lanes
            return
        before = read[places]
        one = np.where((before == _NOBODY) | (before == lanes), lanes, _SEVERAL)
        read[places] = one
        repeat = read[places]
        read[places[repeat != lanes]] = _SEVERAL
