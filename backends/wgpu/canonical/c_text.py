"""A kernel as C: a loop over what would be invocations, over outputs and nothing else.

A kernel whose invocations know only their number becomes one loop, split at the length of a row
where the number is cut into coordinates, so that a compiler sees neighbours lie side by side. One
whose invocations work together is cut at its barriers: each piece runs for all of a workgroup
before the next does, and what lives longer than a piece has a place for each invocation.

The order of every sum is the kernel's own. C is compiled without contraction; `fma` is what the
convention says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from backends.wgpu.canonical.tree import (
    COMPARISONS,
    Application,
    Array,
    Assignment,
    Barrier,
    Binary,
    Component,
    Declare,
    Expression,
    For,
    Function,
    If,
    Index,
    Literal,
    Module,
    Name,
    NotRead,
    Return,
    Scope,
    Statement,
    Unary,
    size_of,
)

Change = Callable[[Expression], Expression | None]

_SHORTEST_ROW: Final = 8
"""Shorter ones are not worth a loop of their own."""
_C_TYPES: Final = {"f32": "float", "u32": "u32", "i32": "i32", "u64": "u64", "bool": "int"}
_BUILT_IN: Final = {
    "floor": "__builtin_floorf", "ceil": "__builtin_ceilf", "trunc": "__builtin_truncf",
    "round": "__builtin_rintf", "sqrt": "__builtin_sqrtf",
}  # fmt: skip
_PLACES: Final = {
    "global_invocation_id": "number", "local_invocation_id": "local", "workgroup_id": "group",
    "num_workgroups": "groups", "local_invocation_index": "local_x",
}  # fmt: skip
SIGNATURE: Final = (
    "void {name}(void *const *m, const u32 *bytes, usize first, usize last, u32 groups_x, "
    "u32 groups_y, u32 groups_z)"
)
"""Of a kernel: its buffers, their sizes, which workgroups, and how many there are."""

PRELUDE: Final = """\
typedef unsigned int u32; typedef int i32; typedef unsigned long long u64;
typedef __SIZE_TYPE__ usize;
typedef float vec2f __attribute__((ext_vector_type(2)));
typedef float vec4f __attribute__((ext_vector_type(4)));
typedef u32 vec4u __attribute__((ext_vector_type(4)));
typedef i32 vec4i __attribute__((ext_vector_type(4)));
typedef i32 vec4b __attribute__((ext_vector_type(4)));
#define INLINE static inline __attribute__((always_inline, unused))
INLINE u32 u32_of_f32(float x) { u32 y; __builtin_memcpy(&y, &x, 4); return y; }
INLINE float f32_of_u32(u32 x) { float y; __builtin_memcpy(&y, &x, 4); return y; }
#define PICK(kind) \\
  INLINE kind pick_##kind(kind no, kind yes, int which) { return which ? yes : no; }
PICK(float) PICK(u32) PICK(i32) PICK(int) PICK(vec4f) PICK(vec4u) PICK(vec4i)
INLINE vec4f pick4_vec4f(vec4f no, vec4f yes, vec4b which) {
  return (vec4f)(((vec4b)no & ~which) | ((vec4b)yes & which));
}
INLINE usize pick_usize(usize no, usize yes, int which) { return which ? yes : no; }
INLINE float most_f32(float a, float b) { return a > b ? a : b; }
INLINE float least_f32(float a, float b) { return a < b ? a : b; }
INLINE vec4f most_vec4f(vec4f a, vec4f b) { return pick4_vec4f(b, a, a > b); }
INLINE vec4f least_vec4f(vec4f a, vec4f b) { return pick4_vec4f(b, a, a < b); }
INLINE i32 most_i32(i32 a, i32 b) { return a > b ? a : b; }
INLINE i32 least_i32(i32 a, i32 b) { return a < b ? a : b; }
INLINE usize most_u32(usize a, usize b) { return a > b ? a : b; }
INLINE usize least_u32(usize a, usize b) { return a < b ? a : b; }
INLINE i32 abs_i32(i32 x) { return x < 0 ? -x : x; }
INLINE i32 whole(float x) {
  if (!(x >= -2147483648.0f)) return x != x ? 0 : -2147483647 - 1;
  return x >= 2147483648.0f ? 2147483647 : (i32)x;
}
INLINE u32 natural(float x) { return x >= 4294967296.0f ? 4294967295u : x > 0.0f ? (u32)x : 0u; }
INLINE i32 div_i32(i32 a, i32 b) { return b == 0 || (b == -1 && a == -2147483647 - 1) ? a : a / b; }
INLINE i32 mod_i32(i32 a, i32 b) { return b == 0 || b == -1 ? 0 : a % b; }
INLINE u32 div_u32(u32 a, u32 b) { return b ? a / b : a; }
INLINE u32 mod_u32(u32 a, u32 b) { return b ? a % b : 0u; }
INLINE u32 leading_zeros(u32 x) { return x ? (u32)__builtin_clz(x) : 32u; }
INLINE i32 bits_i32(i32 x, u32 at, u32 count) {
  return (i32)((u32)x << (32u - at - count)) >> (32u - count);
}
INLINE u32 bits_u32(u32 x, u32 at, u32 count) { return (x >> at) & ((1u << count) - 1u); }
"""
FUSED: Final = """\
INLINE float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE vec4f fma_vec4f(vec4f a, vec4f b, vec4f c) { return __builtin_elementwise_fma(a, b, c); }
"""
SEPARATE: Final = """\
INLINE float fma_f32(float a, float b, float c) { return a * b + c; }
INLINE vec4f fma_vec4f(vec4f a, vec4f b, vec4f c) { return a * b + c; }
"""


def c_functions(functions: Iterable[Function], prefix: str = "") -> str:
    """Functions that read no buffer, each before those that call it."""
    return "\n".join(_Text({}, prefix).function(each) for each in functions)


def c_kernel(module: Module, name: str) -> str:
    """A kernel of the signature above, and the functions that it has for itself."""
    return _Kernel(module, name).text()


@dataclass(slots=True)
class _Text:
    """Expressions and statements of one scope.

    Attributes:
        arrays: Buffers and workgroup memory.
        prefix: Of the names of the kernel's own functions.
        own: Names of these.
        lanes: Variables that have a place for each invocation.
        wide: Whether u32 variables are indices, that a compiler shall see as whole addresses.
    """

    arrays: Mapping[str, Array]
    prefix: str = ""
    own: frozenset[str] = frozenset()
    reading: frozenset[str] = frozenset()
    lanes: set[str] = field(default_factory=set)
    lane: str = "lane"
    wide: bool = False
    end: str = "return;"

    def function(self, given: Function) -> str:
        """One function."""
        parameters = [f"{_c_type(kind)} v_{name}" for name, kind in given.parameters]
        if given.name in self.reading:
            parameters = ["void *const *m", "const u32 *bytes", *parameters]
        body = "\n".join(self.statements(given.body))
        inner = "\n".join(self.pointers()) if given.name in self.reading else ""
        head = f"INLINE {_c_type(given.type)} {self.prefix}{given.name}({', '.join(parameters)})"
        return f"{head} {{\n{inner}\n{body}\n}}"

    def pointers(self) -> Iterator[str]:
        """The buffers by name."""
        for array in self.arrays.values():
            if array.binding >= 0:
                kind = _c_type(array.element)
                const = "" if array.writes else "const "
                yield (
                    f"{const}{kind} *restrict v_{array.name} = ({const}{kind} *)m[{array.binding}];"
                    f" (void)v_{array.name};"
                )

    # Statements.

    def statements(self, body: Iterable[Statement]) -> Iterator[str]:
        for statement in body:
            yield from self.statement(statement)

    def statement(self, given: Statement) -> Iterator[str]:
        match given:
            case Declare():
                yield self.declared(given) + ";"
            case Assignment():
                yield self.assigned(given) + ";"
            case If(condition, then, otherwise):
                yield f"if ({self.of(condition)}) {{"
                yield from self.statements(then)
                if otherwise:
                    yield "} else {"
                    yield from self.statements(otherwise)
                yield "}"
            case For(first, condition, step, body):
                start = self.declared(first) if first else ""
                after = self.assigned(step) if step else ""
                yield f"for ({start}; {self.of(condition)}; {after}) {{"
                yield from self.statements(body)
                yield "}"
            case Return(value):
                yield self.end if value is None else f"return {self.of(value)};"
            case Scope(body):
                yield "{"
                yield from self.statements(body)
                yield "}"
            case Barrier():
                raise NotRead("a kernel has a barrier where not all of a workgroup come by")

    def declared(self, given: Declare) -> str:
        if given.name in self.lanes:
            value = "0" if given.value is None else self.of(given.value)
            return f"v_{given.name}[{self.lane}] = {value}"
        value = "" if given.value is None else f" = {self.of(given.value)}"
        return f"{self.variable(given.type)} v_{given.name}{value}"

    def variable(self, kind: str) -> str:
        """Type of a variable of the body."""
        return "usize" if kind == "u32" and self.wide else _c_type(kind)

    def assigned(self, given: Assignment) -> str:
        return f"{self.of(given.target)} = {self.of(given.value)}"

    # Expressions.

    def of(self, given: Expression) -> str:
        match given:
            case Literal():
                return _literal(given)
            case Name("local_x"):
                return "local_x"
            case Name(name):
                place = f"[{self.lane}]" if name in self.lanes else ""
                return f"v_{name}{place}"
            case Unary(sign, of, kind):
                if sign == "!" and size_of(kind) > 1:
                    sign = "~"
                return f"({sign}{self.of(of)})"
            case Binary():
                return self.binary(given)
            case Application():
                return self.call(given)
            case Index(of, at):
                return f"{self.of(of)}[{self.of(at)}]"
            case Component(of, name):
                if isinstance(of, Name) and of.name in _PLACES.values():
                    return f"{of.name}_{name}"
                return f"{self.of(of)}[{'xyzw'.index(name)}]"

    def binary(self, given: Binary) -> str:
        sign, left, right = given.sign, self.of(given.left), self.of(given.right)
        if sign in {"&&", "||"} and not _reads(given.right):
            sign = sign[0]
        whole = given.type in {"u32", "i32"} and sign not in COMPARISONS
        if whole and sign in {"/", "%"} and not _is_number(given.right):
            return f"{'div' if sign == '/' else 'mod'}_{given.type}({left}, {right})"
        if sign in {"<<", ">>"} and not _is_number(given.right):
            right = f"({right} & {63 if given.type == 'u64' else 31}u)"
        kinds = {given.left.type, given.right.type}
        if sign in COMPARISONS and "u32" in kinds and self.wide:
            return (
                f"((u32){left} {sign} (u32){right})"
                if _may_wrap(given)
                else f"({left} {sign} {right})"
            )
        if given.type == "u32" and self.wide and sign in {"-", "<<", "^", "|", "&", ">>"}:
            return f"((u32)((u32){left} {sign} (u32){right}))"
        return f"({left} {sign} {right})"

    def call(self, given: Application) -> str:
        name, kind = given.name, given.type
        arguments = [self.of(x) for x in given.arguments]
        first = given.arguments[0].type if given.arguments else ""
        listed = ", ".join(arguments)
        if name in self.own:
            more = "m, bytes, " if name in self.reading else ""
            return f"{self.prefix}{name}({more}{listed})"
        if name == "bitcast":
            return self.bits(kind, first, listed)
        if name in _C_TYPES:
            return self.converted(kind, first, listed)
        if name.startswith("vec"):
            if len(arguments) > 1:
                return f"(({kind}){{{listed}}})"
            if size_of(first) == 1:
                return f"(({kind})({f'-({listed})' if kind == 'vec4b' else listed}))"
            return f"__builtin_convertvector({listed}, {kind})"
        if name == "select":
            if size_of(given.arguments[2].type) > 1:
                return f"pick4_{kind}({listed})"
            picked = "usize" if kind == "u32" and self.wide else _c_type(kind)
            return f"pick_{picked}({listed})"
        if name in {"max", "min"}:
            return f"{'most' if name == 'max' else 'least'}_{kind}({listed})"
        if name == "clamp":
            x, low, high = arguments
            return f"least_{kind}(most_{kind}({x}, {low}), {high})"
        if name == "fma":
            return f"fma_{kind}({listed})"
        if name in _BUILT_IN and kind == "f32":
            return f"{_BUILT_IN[name]}({listed})"
        if name == "abs":
            return f"__builtin_fabsf({listed})" if kind == "f32" else f"abs_{kind}({listed})"
        if name == "any":
            return "(" + " | ".join(f"{listed}[{i}]" for i in range(4)) + ") != 0"
        if name == "arrayLength":
            reference = given.arguments[0]
            assert isinstance(reference, Unary)
            assert isinstance(reference.of, Name)
            array = self.arrays[reference.of.name]
            return f"(bytes[{array.binding}] / {4 * size_of(array.element)}u)"
        if name == "extractBits":
            return f"bits_{kind}({listed})"
        if name == "countLeadingZeros":
            return f"leading_zeros({listed})"
        if name in _PLAIN:
            return f"{name}({listed})"
        raise NotRead(f"a kernel calls {name!r} of {kind}")

    def bits(self, kind: str, first: str, listed: str) -> str:
        if size_of(kind) > 1:
            return f"(({kind})({listed}))"
        if kind == first:
            return listed
        if kind == "f32":
            return f"f32_of_u32((u32)({listed}))"
        if first == "f32":
            return f"(({_C_TYPES[kind]})u32_of_f32({listed}))"
        return f"(({_C_TYPES[kind]})({listed}))"

    def converted(self, kind: str, first: str, listed: str) -> str:
        if kind == "bool":
            return f"({listed} != 0)"
        if first == "f32" and kind in {"i32", "u32"}:
            return f"{'whole' if kind == 'i32' else 'natural'}({listed})"
        if kind == "f32" and first == "u32":
            return f"((float)(u32)({listed}))"
        return f"(({_C_TYPES[kind]})({listed}))"


_PLAIN: set[str] = set()
"""Functions that all kernels have: those of the library, by name."""


def know(names: Iterable[str]) -> None:
    """Functions that every text may call."""
    _PLAIN.update(names)


def _c_type(kind: str) -> str:
    return _C_TYPES.get(kind, kind)


def _literal(given: Literal) -> str:
    if given.type in {"f32", "float"}:
        number = float(np.float32(given.value))
        return f"({number.hex()}f)"
    if given.type == "bool":
        return str(int(given.value))
    if given.type == "u32":
        return f"{given.value}u"
    return f"({given.value})" if given.value != -(2**31) else "(-2147483647 - 1)"


def _is_number(given: Expression) -> bool:
    return isinstance(given, Literal) and bool(given.value)


def _may_wrap(given: Expression) -> bool:
    return any(isinstance(x, Binary) and x.sign == "-" for x in walk(given))


def _reads(given: Expression) -> bool:
    """Whether it reads memory, or divides: then it must not be computed for nothing."""
    return any(
        isinstance(x, Index) or (isinstance(x, Binary) and x.sign == "%") for x in walk(given)
    )


def walk(given: Expression) -> Iterator[Expression]:
    """An expression and all its parts."""
    yield given
    match given:
        case Unary(_, of) | Component(of):
            yield from walk(of)
        case Binary(_, left, right) | Index(left, right):
            yield from walk(left)
            yield from walk(right)
        case Application(_, arguments):
            for argument in arguments:
                yield from walk(argument)


def expressions(body: Iterable[Statement]) -> Iterator[Expression]:
    """All expressions of statements, whole."""
    for statement in body:
        match statement:
            case Declare(value=value) | Return(value):
                if value is not None:
                    yield value
            case Assignment(target, value):
                yield from (target, value)
            case If(condition, then, otherwise):
                yield condition
                yield from expressions((*then, *otherwise))
            case For(first, condition, step, inner):
                yield condition
                yield from expressions([x for x in (first, step) if x is not None])
                yield from expressions(inner)
            case Scope(inner):
                yield from expressions(inner)


def _names(body: Iterable[Statement]) -> set[str]:
    return {x.name for e in expressions(body) for x in walk(e) if isinstance(x, Name)}


def _has_barrier(body: Iterable[Statement]) -> bool:
    for statement in body:
        match statement:
            case Barrier():
                return True
            case If(_, then, otherwise):
                if _has_barrier((*then, *otherwise)):
                    return True
            case For(body=inner) | Scope(inner):
                if _has_barrier(inner):
                    return True
    return False


class _Kernel:
    """One kernel's text."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        self.width = module.workgroup
        own = frozenset(each.name for each in module.functions)
        buffers = {each.name for each in module.arrays.values() if each.binding >= 0}
        reading: set[str] = set()
        for _ in module.functions:  # a function that calls one that reads
            for each in module.functions:
                calls = {
                    x.name
                    for e in expressions(each.body)
                    for x in walk(e)
                    if isinstance(x, Application)
                }
                if _names(each.body) & buffers or calls & reading:
                    reading.add(each.name)
        places = {name: _PLACES[built_in] for name, built_in in module.inputs.items()}
        self.body = tuple(_renamed(module.body, places))
        self.text_of = _Text(
            module.arrays, f"{name}_", own, frozenset(reading), wide=True, end="continue;"
        )
        self.functions = _Text(module.arrays, f"{name}_", own, frozenset(reading))

    def text(self) -> str:
        """The whole."""
        functions = [self.functions.function(each) for each in _in_order(self.module.functions)]
        linear = self._linear()
        body = linear if linear is not None else self._by_workgroups()
        shared = [
            f"{_c_type(a.element)} v_{a.name}[{a.elements}] __attribute__((aligned(64)));"
            for a in self.module.arrays.values()
            if a.binding < 0
        ]
        head = SIGNATURE.format(name=self.name)
        return "\n".join([*functions, head + " {", *self.text_of.pointers(), *shared, *body, "}"])

    # Kernels whose invocations know only their number.

    def _linear(self) -> list[str] | None:
        body = self.body
        if not body or not isinstance(body[0], Declare) or _has_barrier(body):
            return None
        number, value = body[0], body[0].value
        if number.changes or value is None or not _is_linear(value):
            return None
        rest: Sequence[Statement] = body[1:]
        if _names(rest) & {"number", "local", "local_x", "group", "groups"}:
            return None
        rest, limit = self._limited(rest, number.name)
        end = f"usize high = last * {self.width}u;"
        lines = [f"usize low = first * {self.width}u;", end]
        if limit:
            lines.append(f"if (high > {limit}) high = {limit};")
        row = _row_of(rest, number.name)
        if row:
            return [*lines, *self._rows(rest, number.name, row)]
        lines.append(
            f"for (usize v_{number.name} = low; v_{number.name} < high; v_{number.name}++) {{"
        )
        return [*lines, *self.text_of.statements(rest), "}"]

    def _limited(self, body: Sequence[Statement], number: str) -> tuple[Sequence[Statement], str]:
        """Without the test whether there is such an output, and how many there are."""
        if body and isinstance(body[0], If) and isinstance(body[0].condition, Binary):
            test, condition = body[0], body[0].condition
            mine = isinstance(condition.left, Name) and condition.left.name == number
            if mine and condition.sign == ">=" and test.then == (Return(None),):
                return body[1:], self.text_of.of(condition.right)
            if mine and condition.sign == "<" and len(body) == 1 and not test.otherwise:
                return test.then, self.text_of.of(condition.right)
        return body, ""

    def _rows(self, body: Sequence[Statement], number: str, row: int) -> Iterator[str]:
        yield f"for (usize v_row = low / {row}u; v_row * {row}u < high; v_row++) {{"
        yield f"usize from = v_row * {row}u < low ? low - v_row * {row}u : 0;"
        yield f"usize to = high - v_row * {row}u < {row}u ? high - v_row * {row}u : {row}u;"
        yield "for (usize v_column = from; v_column < to; v_column++) {"
        yield from self.text_of.statements(_by_rows(body, number, row))
        yield "}"
        yield "}"

    # Kernels of workgroups.

    def _by_workgroups(self) -> list[str]:
        lines = ["for (usize at = first; at < last; at++) {"]
        lines += [
            "const u32 group_x = at % groups_x; const u32 group_z = at / groups_x / groups_y;"
        ]
        lines += ["const u32 group_y = at / groups_x % groups_y;"]
        lines += ["(void)group_x; (void)group_y; (void)group_z;"]
        lines += self._pieces(self.body)
        return [*lines, "}"]

    def _pieces(self, body: Sequence[Statement]) -> list[str]:
        """Statements of a scope that all invocations come by."""
        lines: list[str] = []
        piece: list[Statement] = []

        def close() -> None:
            if piece:
                lines.extend(self._piece(piece))
                piece.clear()

        shared = self._lived(body)
        for statement in body:
            if isinstance(statement, Declare) and statement.name in shared:
                if self._is_uniform(statement):
                    close()
                    lines.append(self.text_of.declared(statement) + ";")
                    continue
                lines_of = f"{_c_type(statement.type)} v_{statement.name}[{self.width}];"
                close()
                lines.append(lines_of)
                self.text_of.lanes.add(statement.name)
                piece.append(statement)
                continue
            if isinstance(statement, Barrier):
                close()
            elif self._together(statement):
                close()
                lines += self._uniform(statement)
            else:
                piece.append(statement)
        close()
        return lines

    def _lived(self, body: Sequence[Statement]) -> set[str]:
        """Variables of a scope that are read in more than one piece: here all of them, if there
        is more than one."""
        several = any(isinstance(x, Barrier) or self._together(x) for x in body)
        return {x.name for x in body if isinstance(x, Declare)} if several else set()

    def _is_uniform(self, given: Declare) -> bool:
        if given.changes or given.value is None:
            return False
        return self._same_for_all(given.value)

    def _same_for_all(self, given: Expression) -> bool:
        for part in walk(given):
            if isinstance(part, Name) and (
                part.name in {"number", "local", "local_x"}
                or part.name in self.text_of.lanes
                or part.name in self.module.arrays
            ):
                return False
        return True

    def _together(self, given: Statement) -> bool:
        """Whether invocations must stay together within it."""
        match given:
            case If(_, then, otherwise):
                return any(map(self._together, (*then, *otherwise))) or _has_barrier((given,))
            case For(body=inner):
                return (
                    _has_barrier((given,))
                    or self._striding(given)
                    or any(map(self._together, inner))
                )
            case Scope(inner):
                return any(map(self._together, inner)) or _has_barrier(inner)
        return False

    def _striding(self, given: For) -> bool:
        """Whether each invocation takes every so manieth term: `r = x + local.x; r += width`."""
        first, step = given.first, given.step
        if first is None or step is None or not isinstance(first.value, Binary):
            return False
        added, start = step.value, first.value
        return (
            isinstance(added, Binary)
            and added.sign == "+"
            and added.right == Literal(self.width, "u32")
            and start.sign == "+"
            and start.right == Component(Name("local", "vec3u"), "x", "u32")
            and self._same_for_all(start.left)
            and isinstance(given.condition, Binary)
            and given.condition.sign == "<"
            and self._same_for_all(given.condition.right)
        )

    def _uniform(self, given: Statement) -> list[str]:
        """One that all invocations take alike."""
        text = self.text_of
        match given:
            case If(condition, then, otherwise):
                lines = [f"if ({self._of_first(condition)}) {{", *self._pieces(then)]
                if otherwise:
                    lines += ["} else {", *self._pieces(otherwise)]
                return [*lines, "}"]
            case For() if self._striding(given):
                return self._strides(given)
            case For(first, condition, step, body):
                start = text.declared(first) if first else ""
                after = text.assigned(step) if step else ""
                head = f"for ({start}; {self._of_first(condition)}; {after}) {{"
                return [head, *self._pieces(body), "}"]
            case Scope(body):
                return ["{", *self._pieces(body), "}"]
        raise NotRead("a kernel has a statement that invocations take together")

    def _of_first(self, condition: Expression) -> str:
        """What is the same for all, as the first invocation has it."""
        self.text_of.lane = "0"
        text = self.text_of.of(condition)
        self.text_of.lane = "lane"
        return text

    def _strides(self, given: For) -> list[str]:
        """All invocations take their terms side by side."""
        first, condition = given.first, given.condition
        assert first is not None
        assert isinstance(first.value, Binary)
        assert isinstance(condition, Binary)
        low, high = self.text_of.of(first.value.left), self.text_of.of(condition.right)
        body = [*self.text_of.statements(given.body)]
        name, width = f"v_{first.name}", self.width
        loop = f"for (usize lane = 0; lane < {{}}; lane++) {{{{ const usize {name} = base + lane;"
        return [
            "{",
            f"usize base = {low}; const usize end = {high};",
            f"for (; base + {width}u <= end; base += {width}u)",
            loop.format(f"{width}u"), *body, "}",
            "if (base < end)",
            loop.format("end - base"), *body, "}",
            "}",
        ]  # fmt: skip

    def _piece(self, piece: Sequence[Statement]) -> list[str]:
        """What each invocation does by itself."""
        used = _names(piece)
        lines = [f"for (usize lane = 0; lane < {self.width}u; lane++) {{"]
        if "local" in used or "local_x" in used:
            lines.append("const usize local_x = lane; (void)local_x;")
        if "number" in used:
            lines.append(f"const usize number_x = group_x * {self.width}u + lane;")
            lines.append("const usize number_y = group_y; (void)number_x; (void)number_y;")
        lines += self.text_of.statements(piece)
        return [*lines, "}"]


def _in_order(functions: Sequence[Function]) -> list[Function]:
    """Each after those that it calls."""
    left, found = {each.name: each for each in functions}, list[Function]()

    def take(function: Function) -> None:
        if left.pop(function.name, None) is None:
            return
        for expression in expressions(function.body):
            for part in walk(expression):
                if isinstance(part, Application) and part.name in left:
                    take(left[part.name])
        found.append(function)

    for function in functions:
        take(function)
    return found


def _is_linear(given: Expression) -> bool:
    """`id.x`, or `id.x + id.y * (what a row of the grid has)`."""
    x = Component(Name("number", "vec3u"), "x", "u32")
    y = Component(Name("number", "vec3u"), "y", "u32")
    if given == x:
        return True
    if not isinstance(given, Binary) or given.sign != "+" or given.left != x:
        return False
    return any(part == y for part in walk(given.right))


def _row_of(body: Sequence[Statement], number: str) -> int:
    """The shortest row that the number is cut into, if longer ones are whole rows of it."""
    sizes = set()
    for expression in expressions(body):
        for part in walk(expression):
            if isinstance(part, Binary) and part.sign in {"/", "%"} and _is_it(part.left, number):
                if not isinstance(part.right, Literal):
                    return 0
                sizes.add(int(part.right.value))
    shortest = min(sizes, default=0)
    if shortest < _SHORTEST_ROW or any(size % shortest for size in sizes):
        return 0
    return shortest


def _is_it(given: Expression, number: str) -> bool:
    return isinstance(given, Name) and given.name == number


def _by_rows(body: Iterable[Statement], number: str, row: int) -> Iterator[Statement]:
    """The number as `row` times its length and `column`."""
    rows, column = Name("row", "u32"), Name("column", "u32")

    def change(given: Expression) -> Expression | None:
        if _is_it(given, number):
            whole = Binary("*", rows, Literal(row, "u32"), "u32")
            return Binary("+", whole, column, "u32")
        if isinstance(given, Binary) and given.sign in {"/", "%"} and _is_it(given.left, number):
            assert isinstance(given.right, Literal)
            times = Literal(int(given.right.value) // row, "u32")
            one = times.value == 1
            if given.sign == "/":
                return rows if one else Binary("/", rows, times, "u32")
            if one:
                return column
            within = Binary("%", rows, times, "u32")
            return Binary("+", Binary("*", within, Literal(row, "u32"), "u32"), column, "u32")
        return None

    return changed(body, change)


def _renamed(body: Iterable[Statement], names: Mapping[str, str]) -> Iterator[Statement]:
    def change(given: Expression) -> Expression | None:
        if isinstance(given, Name) and given.name in names:
            return Name(names[given.name], given.type)
        return None

    return changed(body, change)


def changed_expression(given: Expression, change: Change) -> Expression:
    """With parts put in place of others, from above."""
    new = change(given)
    if new is not None:
        return new
    match given:
        case Unary(_, of):
            return replace(given, of=changed_expression(of, change))
        case Component(of):
            return replace(given, of=changed_expression(of, change))
        case Binary(_, left, right):
            left, right = changed_expression(left, change), changed_expression(right, change)
            return replace(given, left=left, right=right)
        case Index(of, at):
            return replace(
                given, of=changed_expression(of, change), at=changed_expression(at, change)
            )
        case Application(_, arguments):
            return replace(given, arguments=tuple(changed_expression(x, change) for x in arguments))
    return given


def changed(body: Iterable[Statement], change: Change) -> Iterator[Statement]:
    """Statements with expressions changed."""
    for statement in body:
        match statement:
            case Declare():
                yield _declared_otherwise(statement, change)
            case Assignment():
                yield _assigned_otherwise(statement, change)
            case If(condition, then, otherwise):
                yield If(
                    changed_expression(condition, change),
                    (*changed(then, change),),
                    (*changed(otherwise, change),),
                )
            case For(first, condition, step, inner):
                start = None if first is None else _declared_otherwise(first, change)
                after = None if step is None else _assigned_otherwise(step, change)
                whether = changed_expression(condition, change)
                yield For(start, whether, after, (*changed(inner, change),))
            case Return(value):
                yield Return(None if value is None else changed_expression(value, change))
            case Scope(inner):
                yield Scope((*changed(inner, change),))
            case _:
                yield statement


def _declared_otherwise(given: Declare, change: Change) -> Declare:
    if given.value is None:
        return given
    return replace(given, value=changed_expression(given.value, change))


def _assigned_otherwise(given: Assignment, change: Change) -> Assignment:
    target = changed_expression(given.target, change)
    return Assignment(target, changed_expression(given.value, change))
