"""Counts from a kernel's text: barriers, bytes, and bank conflicts of workgroup memory.

One workgroup is executed with integers only: indices, loops and guards are known, floats are not,
and a branch that depends on one is taken. Of a long loop, the first three iterations and the last
are executed. So this needs no device, and says nothing about time.

Workgroup memory is modeled as in cards: 32 banks of 4 bytes; a vec4 of eight neighbors, or a word
of thirty-two, are served at once if those in one bank are the same.
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

Known = NDArray[np.int64] | None
"""Of each invocation; None for a float, or what depends on one."""

_BANKS: Final = 32
_WORD_BYTES: Final = 4
_LIKE_ROUNDS: Final = 3
"""Of a loop; if all invocations have more, these but the last count like the last of them."""
_SIDE_BY_SIDE: Final = re.compile(r"which >= (\d+)u && which < (\d+)u")
_UNSIGNED: Final = 2**32
_FINISH: Final = re.compile(r"fn (\w*finish)\(i: u32, product: f32\) \{\n(.*?)\n\}", re.DOTALL)
_RETURNING: Final = r"fn \1(i: u32, product: f32) -> f32 {\n\2\nreturn product;\n}"
_CALL: Final = re.compile(r"(?<!fn )\b(\w*finish)\(")
"""A function without a result is nothing that canonical arithmetic reads."""
_TWO: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": lambda a, b: a // np.where(b == 0, 1, b),
    "%": lambda a, b: a % np.where(b == 0, 1, b), "&": np.bitwise_and, "|": np.bitwise_or,
    "^": np.bitwise_xor, "<<": np.left_shift, ">>": np.right_shift, "==": np.equal,
    "!=": np.not_equal, "<": np.less, ">": np.greater, "<=": np.less_equal,
    ">=": np.greater_equal, "&&": np.logical_and, "||": np.logical_or,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a workgroup, or of all.

    Attributes:
        barriers: Passed by a workgroup.
        bytes_moved: Read and written in the device's memory; one access of a workgroup counts each
            element once.
        accesses: Of workgroup memory, as few as could be.
        served: As many as it takes.
    """

    barriers: int = 0
    bytes_moved: int = 0
    accesses: int = 0
    served: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Both."""
        return Counts(
            self.barriers + other.barriers, self.bytes_moved + other.bytes_moved,
            self.accesses + other.accesses, self.served + other.served,
        )  # fmt: skip

    def times(self, count: int) -> Counts:
        """So many."""
        return Counts(
            self.barriers * count, self.bytes_moved * count, self.accesses * count,
            self.served * count,
        )  # fmt: skip


def counts_of(shader: Shader, grid: tuple[int, int, int]) -> Counts:
    """Of a whole dispatch: as many workgroups like the first; of kernels side by side the first of
    each.

    Raises:
        NotRead: The kernel has what is not known.
    """
    groups = math.prod(grid)
    parts = [(int(first), int(end)) for first, end in _SIDE_BY_SIDE.findall(shader.source)]
    total = Counts()
    for first, end in parts or [(0, groups)]:
        total += _one_workgroup(shader.source, first).times(end - first)
    return total


@cache
def _one_workgroup(source: str, number: int) -> Counts:
    module = read_kernel(source)
    run = Run(module, (number, 0, 0))
    run.block(module.body)
    return run.counts


def read_kernel(source: str) -> tree.Module:
    """The kernel as a tree.

    Raises:
        NotRead: It has what is not known.
    """
    return tree.read_module(_CALL.sub(r"let done = \1(", _FINISH.sub(_RETURNING, source)))


class _Returned(Exception):
    """A function has its value."""


class Run:
    """Of one workgroup: `group` of the grid."""

    def __init__(self, module: tree.Module, group: tuple[int, int, int]) -> None:
        self.module = module
        self.counts = Counts()
        self._functions = {each.name: each for each in module.functions}
        lanes = np.arange(module.workgroup, dtype=np.int64)
        zero = np.zeros_like(lanes)
        built_ins: dict[str, Any] = {
            "workgroup_id": tuple(zero + place for place in group),
            "local_invocation_id": (lanes, zero, zero),
            "global_invocation_id": (lanes + group[0] * module.workgroup, zero, zero),
            "num_workgroups": (zero + 1, zero + 1, zero + 1),
            "local_invocation_index": lanes,
        }
        self._values: dict[str, Any] = {
            name: built_ins.get(built_in) for name, built_in in module.inputs.items()
        }
        self.here = np.ones(module.workgroup, dtype=bool)
        self._result: Known = None
        self._last_round = Counts()

    def block(self, body: Sequence[tree.Statement]) -> None:
        """Statements, in order."""
        for statement in body:
            if self.here.any():
                self.statement(statement)

    def statement(self, statement: tree.Statement) -> None:
        """One of them."""
        match statement:
            case tree.Declare(name, _, value):
                self._values[name] = None if value is None else self._of(value)
            case tree.Assignment(target, value):
                self.assign(target, self._of(value))
            case tree.If(condition, then, otherwise):
                self.choose(self._of(condition), then, otherwise)
            case tree.For():
                self._for(statement)
            case tree.Scope(body):
                self.block(body)
            case tree.Barrier():
                self.counts = replace(self.counts, barriers=self.counts.barriers + 1)
            case tree.Return(value):
                if value is not None:
                    self._result = self._of(value)
                    raise _Returned
                self.here = np.zeros_like(self.here)

    def assign(self, target: tree.Expression, value: Known) -> None:
        """A new value of a variable, or of an element."""
        if isinstance(target, tree.Name):
            before = self._values.get(target.name)
            if value is not None and before is not None and not self.here.all():
                value = np.where(self.here, value, before)
            self._values[target.name] = value
        else:
            self._of(target)  # an element: counted like a read

    def choose(
        self, condition: Known, then: Sequence[tree.Statement], otherwise: Sequence[tree.Statement]
    ) -> None:
        """A choice; one that depends on a float is taken."""
        before = self.here
        if condition is None:
            self.block(then)
            self.here = before
            return
        lanes = []
        for branch_lanes, body in ((condition != 0, then), (condition == 0, otherwise)):
            self.here = before & branch_lanes
            if self.here.any():
                self.block(body)
            lanes.append(self.here)
        self.here = lanes[0] | lanes[1]

    def _for(self, loop: tree.For) -> None:
        before = self.here
        if loop.first is not None:
            self.statement(loop.first)
        for round_ in itertools.count():
            if round_ == _LIKE_ROUNDS:
                self._skip_to_the_last(loop)
            counted = self.counts
            goes_on = self._of(loop.condition)
            if goes_on is None:
                self.block(loop.body)
                break
            self.here = self.here & (goes_on != 0)
            if not self.here.any():
                break
            self.block(loop.body)
            if loop.step is not None:
                self.statement(loop.step)
            self._last_round = Counts(
                self.counts.barriers - counted.barriers,
                self.counts.bytes_moved - counted.bytes_moved,
                self.counts.accesses - counted.accesses, self.counts.served - counted.served,
            )  # fmt: skip
        self.here = before

    def _skip_to_the_last(self, loop: tree.For) -> None:
        """Count all rounds but that like the one before, if all invocations have as many."""
        if loop.first is None or loop.step is None:
            return
        places = [self._values[loop.first.name]]
        goes_on = self._of(loop.condition)
        while goes_on is not None and goes_on[self.here].all():
            self.statement(loop.step)
            places.append(self._values[loop.first.name])
            goes_on = self._of(loop.condition)
        alike = goes_on is not None and not goes_on[self.here].any() and len(places) > 1
        self._values[loop.first.name] = places[-2] if alike else places[0]
        if alike:
            self.counts += self._last_round.times(len(places) - 2)

    def _of(self, expression: tree.Expression) -> Any:
        match expression:
            case tree.Literal(value, kind):
                whole = kind in {"u32", "i32", "int", "bool"}
                return np.full(len(self.here), int(value), np.int64) if whole else None
            case tree.Name(name):
                return self._values.get(name)
            case tree.Unary(sign, of):
                inner = self._of(of)
                if inner is None or sign == "&":
                    return None
                return {"-": lambda x: -x, "!": lambda x: x == 0, "~": lambda x: ~x}[sign](inner)
            case tree.Binary(sign, left, right):
                return self._both(sign, self._of(left), self._of(right), expression.type)
            case tree.Application():
                return self._call(expression)
            case tree.Index(of, at):
                return self._element(of, self._of(at))
            case tree.Component(of, name):
                vector = self._of(of)
                return vector["xyz".index(name)] if isinstance(vector, tuple) else None

    @staticmethod
    def _both(sign: str, one: Any, two: Any, kind: str) -> Known:
        if one is None or two is None or isinstance(one, tuple) or isinstance(two, tuple):
            return None
        value = np.asarray(_TWO[sign](one, two)).astype(np.int64)
        return value % _UNSIGNED if kind == "u32" else value

    def _call(self, application: tree.Application) -> Any:
        values = [self._of(each) for each in application.arguments]
        function = self._functions.get(application.name)
        if function is not None:
            outer, result = self._values, self._result
            self._values = {
                name: value for (name, _), value in zip(function.parameters, values, strict=True)
            }
            with suppress(_Returned):
                self.block(function.body)
            returned, self._values, self._result = self._result, outer, result
            return returned
        if any(value is None for value in values) or tree.size_of(application.type) > 1:
            return None
        if application.name in {"min", "max"}:
            return (np.minimum if application.name == "min" else np.maximum)(*values)
        if application.name == "select":
            return np.where(values[2] != 0, values[1], values[0])
        return values[0] if application.name in {"u32", "i32"} else None

    def _element(self, of: tree.Expression, at: Known) -> None:
        if isinstance(of, tree.Name) and of.name in self.module.arrays:
            self.count(self.module.arrays[of.name], at)
        else:
            self._of(of)

    def count(self, array: tree.Array, at: Known) -> None:
        """An access of the invocations that are here."""
        nbytes = _WORD_BYTES * tree.size_of(array.element) * (2 if array.element == "u64" else 1)
        if array.binding >= 0:
            here = int(self.here.sum()) if at is None else len(np.unique(at[self.here]))
            moved = self.counts.bytes_moved + here * nbytes
            self.counts = replace(self.counts, bytes_moved=moved)
            return
        least, most = _served(at, self.here, nbytes)
        self.counts += Counts(accesses=least, served=most)


def _served(at: Known, here: NDArray[np.bool_], nbytes: int) -> tuple[int, int]:
    """In how many turns a workgroup's access could be served, and is."""
    together = _BANKS * _WORD_BYTES // nbytes
    least = most = 0
    for first in range(0, len(here), together):
        lanes = here[first : first + together]
        if not lanes.any():
            continue
        least += 1
        if at is None:
            most += 1
            continue
        places = np.unique(at[first : first + together][lanes])
        most += int(np.bincount(places % together).max())
    return least, most
