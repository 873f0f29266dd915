"""Counts from a kernel's text: barriers, bytes, and bank conflicts of workgroup memory.

One workgroup is executed on integers only: indices, loops and guards are computed, floats are
unknown, and a branch that depends on a float is taken. Of a long loop, the first three iterations
and the last are executed. This needs no device, and measures no time.

Workgroup memory is modeled as on cards, with 32 banks of 4 bytes. Accesses of eight neighboring
invocations to a vec4, or of thirty-two to a word, take one turn unless two different words are in
one bank.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.wgpu.canonical import tree
from backends.wgpu.shaders.dispatch import Shader

KnownValues = NDArray[np.int64] | None
"""The value in each invocation; None for a float, or for a value that depends on a float."""

_BANKS: Final = 32
_WORD_BYTES: Final = 4
_EXECUTED_ITERATIONS: Final = 3
"""Number of executed iterations of a loop; if all invocations have more, the remaining iterations
are counted like the last of these.
"""
_KERNEL_RANGE: Final = re.compile(r"which >= (\d+)u && which < (\d+)u")
_UNSIGNED: Final = 2**32
_FINISH_FUNCTION: Final = re.compile(
    r"fn (\w*finish)\(i: u32, product: f32\) \{\n(.*?)\n\}", re.DOTALL
)
_WITH_RESULT: Final = r"fn \1(i: u32, product: f32) -> f32 {\n\2\nreturn product;\n}"
_FINISH_CALL: Final = re.compile(r"(?<!fn )\b(\w*finish)\(")
"""The parser of canonical arithmetic needs functions with results."""
_BINARY_OPERATIONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": lambda a, b: a // np.where(b == 0, 1, b),
    "%": lambda a, b: a % np.where(b == 0, 1, b), "&": np.bitwise_and, "|": np.bitwise_or,
    "^": np.bitwise_xor, "<<": np.left_shift, ">>": np.right_shift, "==": np.equal,
    "!=": np.not_equal, "<": np.less, ">": np.greater, "<=": np.less_equal,
    ">=": np.greater_equal, "&&": np.logical_and, "||": np.logical_or,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one workgroup, or of a dispatch.

    Attributes:
        barriers: Barriers that a workgroup passes.
        bytes_moved: Bytes read and written in the device's memory; one access of a workgroup counts
            each element once.
        accesses: Turns to access workgroup memory, if there were no bank conflicts.
        served_accesses: Turns to access workgroup memory, with bank conflicts.
    """

    barriers: int = 0
    bytes_moved: int = 0
    accesses: int = 0
    served_accesses: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the sum of both counts."""
        return Counts(
            self.barriers + other.barriers, self.bytes_moved + other.bytes_moved,
            self.accesses + other.accesses, self.served_accesses + other.served_accesses,
        )  # fmt: skip

    def times(self, count: int) -> Counts:
        """Return the counts of `count` repetitions."""
        return Counts(
            self.barriers * count, self.bytes_moved * count, self.accesses * count,
            self.served_accesses * count,
        )  # fmt: skip


def counts_of(shader: Shader, grid: tuple[int, int, int]) -> Counts:
    """Return the counts of a dispatch, assuming that all workgroups of a kernel equal its first
    one.

    Raises:
        UnsupportedKernel: The kernel has unsupported syntax.
    """
    groups = math.prod(grid)
    parts = [(int(start), int(end)) for start, end in _KERNEL_RANGE.findall(shader.source)]
    total = Counts()
    for start, end in parts or [(0, groups)]:
        total += _one_workgroup(shader.source, start).times(end - start)
    return total


@cache
def _one_workgroup(source: str, number: int) -> Counts:
    module = read_kernel(source)
    execution = WorkgroupExecution(module, (number, 0, 0))
    execution.execute_block(module.body)
    return execution.counts


def read_kernel(source: str) -> tree.Module:
    """Parse a kernel.

    Raises:
        UnsupportedKernel: The kernel has unsupported syntax.
    """
    return tree.read_module(
        _FINISH_CALL.sub(r"let done = \1(", _FINISH_FUNCTION.sub(_WITH_RESULT, source))
    )


class _Returned(Exception):
    """Raised to return from a function."""


class WorkgroupExecution:
    """Executes one workgroup; `group` is its position in the grid."""

    def __init__(self, module: tree.Module, group: tuple[int, int, int]) -> None:
        self.module = module
        self.counts = Counts()
        self._functions = {function.name: function for function in module.functions}
        lanes = np.arange(module.workgroup, dtype=np.int64)
        zero = np.zeros_like(lanes)
        built_ins: dict[str, Any] = {
            "workgroup_id": tuple(zero + index for index in group),
            "local_invocation_id": (lanes, zero, zero),
            "global_invocation_id": (lanes + group[0] * module.workgroup, zero, zero),
            "num_workgroups": (zero + 1, zero + 1, zero + 1),
            "local_invocation_index": lanes,
        }
        self._values: dict[str, Any] = {
            name: built_ins.get(built_in) for name, built_in in module.inputs.items()
        }
        self.active_lanes = np.ones(module.workgroup, dtype=bool)
        self._result: KnownValues = None
        self._last_iteration = Counts()

    def execute_block(self, body: Sequence[tree.Statement]) -> None:
        """Execute statements in order."""
        for statement in body:
            if self.active_lanes.any():
                self.execute(statement)

    def execute(self, statement: tree.Statement) -> None:
        """Execute one statement."""
        match statement:
            case tree.Declare(name, _, value):
                self._values[name] = None if value is None else self._evaluate(value)
            case tree.Assignment(target, value):
                self.assign(target, self._evaluate(value))
            case tree.If(condition, then, otherwise):
                self.branch(self._evaluate(condition), then, otherwise)
            case tree.For():
                self._for(statement)
            case tree.Scope(body):
                self.execute_block(body)
            case tree.Barrier():
                self.counts = replace(self.counts, barriers=self.counts.barriers + 1)
            case tree.Return(value):
                if value is not None:
                    self._result = self._evaluate(value)
                    raise _Returned
                self.active_lanes = np.zeros_like(self.active_lanes)

    def assign(self, target: tree.Expression, value: KnownValues) -> None:
        """Assign a value to a variable or an element."""
        if isinstance(target, tree.Name):
            old_value = self._values.get(target.name)
            if value is not None and old_value is not None and not self.active_lanes.all():
                value = np.where(self.active_lanes, value, old_value)
            self._values[target.name] = value
        else:
            self._evaluate(target)  # an element: counted like a read

    def branch(
        self,
        condition: KnownValues,
        then_statements: Sequence[tree.Statement],
        else_statements: Sequence[tree.Statement],
    ) -> None:
        """Execute an `if`; a branch is taken if its condition depends on a float."""
        lanes_before = self.active_lanes
        if condition is None:
            self.execute_block(then_statements)
            self.active_lanes = lanes_before
            return
        lanes = []
        for branch_lanes, body in (
            (condition != 0, then_statements),
            (condition == 0, else_statements),
        ):
            self.active_lanes = lanes_before & branch_lanes
            if self.active_lanes.any():
                self.execute_block(body)
            lanes.append(self.active_lanes)
        self.active_lanes = lanes[0] | lanes[1]

    def _for(self, loop: tree.For) -> None:
        lanes_before = self.active_lanes
        if loop.first is not None:
            self.execute(loop.first)
        for iteration in itertools.count():
            if iteration == _EXECUTED_ITERATIONS:
                self._skip_to_last_iteration(loop)
            counts_before = self.counts
            condition = self._evaluate(loop.condition)
            if condition is None:
                self.execute_block(loop.body)
                break
            self.active_lanes = self.active_lanes & (condition != 0)
            if not self.active_lanes.any():
                break
            self.execute_block(loop.body)
            if loop.step is not None:
                self.execute(loop.step)
            self._last_iteration = Counts(
                self.counts.barriers - counts_before.barriers,
                self.counts.bytes_moved - counts_before.bytes_moved,
                self.counts.accesses - counts_before.accesses,
                self.counts.served_accesses - counts_before.served_accesses,
            )  # fmt: skip
        self.active_lanes = lanes_before

    def _skip_to_last_iteration(self, loop: tree.For) -> None:
        """Count the remaining iterations like the previous one, if all invocations have the same
        number."""
        if loop.first is None or loop.step is None:
            return
        loop_values = [self._values[loop.first.name]]
        condition = self._evaluate(loop.condition)
        while condition is not None and condition[self.active_lanes].all():
            self.execute(loop.step)
            loop_values.append(self._values[loop.first.name])
            condition = self._evaluate(loop.condition)
        is_uniform = (
            condition is not None
            and not condition[self.active_lanes].any()
            and len(loop_values) > 1
        )
        self._values[loop.first.name] = loop_values[-2] if is_uniform else loop_values[0]
        if is_uniform:
            self.counts += self._last_iteration.times(len(loop_values) - 2)

    def _evaluate(self, expression: tree.Expression) -> Any:
        match expression:
            case tree.Literal(value, kind):
                is_integer = kind in {"u32", "i32", "int", "bool"}
                return np.full(len(self.active_lanes), int(value), np.int64) if is_integer else None
            case tree.Name(name):
                return self._values.get(name)
            case tree.Unary(sign, of):
                inner = self._evaluate(of)
                if inner is None or sign == "&":
                    return None
                return {"-": lambda x: -x, "!": lambda x: x == 0, "~": lambda x: ~x}[sign](inner)
            case tree.Binary(sign, left, right):
                return self._apply_binary(
                    sign, self._evaluate(left), self._evaluate(right), expression.type
                )
            case tree.Application():
                return self._call(expression)
            case tree.Index(of, at):
                return self._element(of, self._evaluate(at))
            case tree.Component(of, name):
                vector = self._evaluate(of)
                return vector["xyz".index(name)] if isinstance(vector, tuple) else None

    @staticmethod
    def _apply_binary(sign: str, left: Any, right: Any, kind: str) -> KnownValues:
        if left is None or right is None or isinstance(left, tuple) or isinstance(right, tuple):
            return None
        value = np.asarray(_BINARY_OPERATIONS[sign](left, right)).astype(np.int64)
        return value % _UNSIGNED if kind == "u32" else value

    def _call(self, application: tree.Application) -> Any:
        values = [self._evaluate(argument) for argument in application.arguments]
        function = self._functions.get(application.name)
        if function is not None:
            outer, result = self._values, self._result
            self._values = {
                name: value for (name, _), value in zip(function.parameters, values, strict=True)
            }
            with suppress(_Returned):
                self.execute_block(function.body)
            return_value, self._values, self._result = self._result, outer, result
            return return_value
        if any(value is None for value in values) or tree.size_of(application.type) > 1:
            return None
        if application.name in {"min", "max"}:
            return (np.minimum if application.name == "min" else np.maximum)(*values)
        if application.name == "select":
            return np.where(values[2] != 0, values[1], values[0])
        return values[0] if application.name in {"u32", "i32"} else None

    def _element(self, array: tree.Expression, indices: KnownValues) -> None:
        if isinstance(array, tree.Name) and array.name in self.module.arrays:
            self.count(self.module.arrays[array.name], indices)
        else:
            self._evaluate(array)

    def count(self, array: tree.Array, indices: KnownValues) -> None:
        """Count an access of the active invocations."""
        nbytes = _WORD_BYTES * tree.size_of(array.element) * (2 if array.element == "u64" else 1)
        if array.binding >= 0:
            active_count = (
                int(self.active_lanes.sum())
                if indices is None
                else len(np.unique(indices[self.active_lanes]))
            )
            moved_bytes = self.counts.bytes_moved + active_count * nbytes
            self.counts = replace(self.counts, bytes_moved=moved_bytes)
            return
        minimum, turns = _service_turns(indices, self.active_lanes, nbytes)
        self.counts += Counts(accesses=minimum, served_accesses=turns)


def _service_turns(
    indices: KnownValues, active_lanes: NDArray[np.bool_], nbytes: int
) -> tuple[int, int]:
    """Return the turns of a workgroup's access without and with bank conflicts."""
    lanes_per_turn = _BANKS * _WORD_BYTES // nbytes
    minimum = turns = 0
    for start in range(0, len(active_lanes), lanes_per_turn):
        lanes = active_lanes[start : start + lanes_per_turn]
        if not lanes.any():
            continue
        minimum += 1
        if indices is None:
            turns += 1
            continue
        addresses = np.unique(indices[start : start + lanes_per_turn][lanes])
        turns += int(np.bincount(addresses % lanes_per_turn).max())
    return minimum, turns
