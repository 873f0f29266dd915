"""Execute the integer operations of a kernel's workgroups, and check every array access.

An index must depend only on sizes and the invocation, and lie within its array. Between two
barriers no invocation may read an element that another writes, and no two may write the same
element. All invocations must reach each barrier. Software Vulkan runs invocations in lockstep,
so it would not show races.
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
"""In place of an invocation: none, or more than one, has accessed an element."""


def assert_valid_accesses(
    shader: Shader, grid: tuple[int, int, int], nbytes: Sequence[int]
) -> None:
    """Check the accesses of the first and the last workgroup.

    Each is executed with branches on floats taken always, never and alternately.

    Args:
        shader: A kernel of 32-bit floats.
        grid: Number of workgroups in x, y and z.
        nbytes: Size of each binding, in bytes.

    Raises:
        AssertionError: An access is invalid.
    """
    module = read_kernel(shader.source)
    assert len(nbytes) == shader.bindings
    padded_sizes = [-(-size // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES for size in nbytes]
    x, y, z = grid
    for group in {(0, 0, 0), (x - 1, y - 1, z - 1)}:
        for branches in ((True,), (False,), (True, False), (False, True)):
            execution = _CheckedExecution(module, group, padded_sizes, branches)
            execution.execute_block(module.body)
            if not execution.float_branches:
                break


class _CheckedExecution(WorkgroupExecution):
    """Checks accesses; `choices` says in turn which branches on floats are taken."""

    def __init__(
        self,
        module: Any,
        group: tuple[int, int, int],
        nbytes: Sequence[int],
        choices: Sequence[bool],
    ) -> None:
        super().__init__(module, group)
        self._nbytes = nbytes
        self._choices = choices
        self.float_branches = 0
        self._is_writing = False
        self._read_by: dict[str, Any] = {}
        self._written_by: dict[str, Any] = {}
        self._clear_accesses()

    def _clear_accesses(self) -> None:
        for array in self.module.arrays.values():
            if array.binding < 0:
                self._read_by[array.name] = np.full(array.elements, _NOBODY)
                self._written_by[array.name] = np.full(array.elements, _NOBODY)

    def execute(self, statement: Statement) -> None:
        if isinstance(statement, Barrier):
            assert self.active_lanes.all(), "a barrier that some invocations do not reach"
            self._clear_accesses()
        super().execute(statement)

    def branch(
        self, condition: KnownValues, then: Sequence[Statement], otherwise: Sequence[Statement]
    ) -> None:
        if condition is None:
            self.float_branches += 1
            if not self._choices[self.float_branches % len(self._choices)]:
                return
        super().branch(condition, then, otherwise)

    def assign(self, target: Expression, value: KnownValues) -> None:
        self._is_writing = not isinstance(target, Name)
        super().assign(target, value)
        self._is_writing = False

    def count(self, array: Array, indices: KnownValues) -> None:
        assert indices is not None, f"an index of {array.name} depends on the contents of a buffer"
        active_indices, lanes = indices[self.active_lanes], np.flatnonzero(self.active_lanes)
        elements = array.elements
        if array.binding >= 0:
            elements = self._nbytes[array.binding] // (4 * size_of(array.element))
        assert active_indices.min() >= 0
        largest = active_indices.max()
        assert largest < elements, f"{array.name}[{largest}] of {elements}"
        if array.binding < 0:
            self._check_races(array.name, active_indices, lanes)
        super().count(array, indices)

    def _check_races(self, name: str, indices: Any, lanes: Any) -> None:
        read, written = self._read_by[name], self._written_by[name]
        writers = written[indices]
        assert ((writers == _NOBODY) | (writers == lanes)).all(), f"another wrote {name}"
        if self._is_writing:
            readers = read[indices]
            assert ((readers == _NOBODY) | (readers == lanes)).all(), f"another reads {name}"
            assert len(np.unique(indices)) == len(indices), f"several write {name}"
            written[indices] = lanes
            return
        readers = read[indices]
        read[indices] = np.where((readers == _NOBODY) | (readers == lanes), lanes, _SEVERAL)
        # Where several lanes read one element now, only the last of them was stored.
        read[indices[read[indices] != lanes]] = _SEVERAL
