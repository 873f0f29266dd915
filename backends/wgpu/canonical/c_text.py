"""Print a kernel as C: loops over invocations.

A kernel that uses only its invocation's number becomes one loop. Where the number is divided into
coordinates, the loop is split at the row length, so that the compiler sees contiguous accesses. A
kernel with workgroup memory is split into sections at its barriers: each section runs for a whole
workgroup before the next section starts, and a variable used in several sections becomes an array
over invocations.

Every sum is evaluated in the kernel's order. C is compiled without contraction; the convention
defines `fma`.
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
    Return,
    Scope,
    Statement,
    Unary,
    UnsupportedKernel,
    size_of,
)

Change = Callable[[Expression], Expression | None]

_SHORTEST_ROW: Final = 8
"""Minimum length of a row for which an inner loop is faster."""
_C_TYPES: Final = {"f32": "float", "u32": "u32", "i32": "i32", "u64": "u64", "bool": "int"}
_BUILT_IN: Final = {
    "floor": "__builtin_floorf", "ceil": "__builtin_ceilf", "trunc": "__builtin_truncf",
    "round": "__builtin_rintf", "sqrt": "__builtin_sqrtf",
}  # fmt: skip
_BUILT_IN_VALUES: Final = {
    "global_invocation_id": "number", "local_invocation_id": "local", "workgroup_id": "group",
    "num_workgroups": "groups", "local_invocation_index": "local_x",
}  # fmt: skip
SIGNATURE: Final = (
    "void {name}(void *const *m, const u32 *bytes, usize first, usize last, u32 groups_x, "
    "u32 groups_y, u32 groups_z)"
)
"""Signature of a kernel: buffers, their sizes in bytes, a range of workgroups, and the grid."""

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
INLINE float max_f32(float a, float b) { return a > b ? a : b; }
INLINE float min_f32(float a, float b) { return a < b ? a : b; }
INLINE vec4f max_vec4f(vec4f a, vec4f b) { return pick4_vec4f(b, a, a > b); }
INLINE vec4f min_vec4f(vec4f a, vec4f b) { return pick4_vec4f(b, a, a < b); }
INLINE i32 max_i32(i32 a, i32 b) { return a > b ? a : b; }
INLINE i32 min_i32(i32 a, i32 b) { return a < b ? a : b; }
INLINE usize max_u32(usize a, usize b) { return a > b ? a : b; }
INLINE usize min_u32(usize a, usize b) { return a < b ? a : b; }
INLINE i32 abs_i32(i32 x) { return x < 0 ? -x : x; }
INLINE i32 saturate_i32(float x) {
  if (!(x >= -2147483648.0f)) return x != x ? 0 : -2147483647 - 1;
  return x >= 2147483648.0f ? 2147483647 : (i32)x;
}
INLINE u32 saturate_u32(float x) {
  return x >= 4294967296.0f ? 4294967295u : x > 0.0f ? (u32)x : 0u;
}
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
    """Print functions that read no buffer, callees first."""
    return "\n".join(_Printer({}, prefix).function(function) for function in functions)


def c_kernel(module: Module, name: str) -> str:
    """Print a kernel with `SIGNATURE`, preceded by its local functions."""
    return _Kernel(module, name).text()


@dataclass(slots=True)
class _Printer:
    """Print the expressions and statements of one scope.

    Attributes:
        arrays: Buffers and workgroup memory.
        prefix: Prefix of the names of the kernel's local functions.
        local_functions: Names of the kernel's local functions.
        buffer_readers: Local functions that read a buffer, directly or through a call.
        lanes: Variables that are arrays over invocations.
        lane: Index of the current invocation in these arrays, in C.
        wide_indices: Whether u32 variables become `usize`, so that the compiler sees plain
            addressing.
        end: Statement that ends an invocation.
    """

    arrays: Mapping[str, Array]
    prefix: str = ""
    local_functions: frozenset[str] = frozenset()
    buffer_readers: frozenset[str] = frozenset()
    lanes: set[str] = field(default_factory=set)
    lane: str = "lane"
    wide_indices: bool = False
    end: str = "return;"

    def function(self, node: Function) -> str:
        """Print one function."""
        parameters = [f"{_c_type(kind)} v_{name}" for name, kind in node.parameters]
        if node.name in self.buffer_readers:
            parameters = ["void *const *m", "const u32 *bytes", *parameters]
        body = "\n".join(self.statements(node.body))
        inner = "\n".join(self.pointers()) if node.name in self.buffer_readers else ""
        head = f"INLINE {_c_type(node.type)} {self.prefix}{node.name}({', '.join(parameters)})"
        return f"{head} {{\n{inner}\n{body}\n}}"

    def pointers(self) -> Iterator[str]:
        """Declare a pointer for each buffer."""
        for array in self.arrays.values():
            if array.binding >= 0:
                kind = _c_type(array.element)
                const = "" if array.is_writable else "const "
                yield (
                    f"{const}{kind} *restrict v_{array.name} = ({const}{kind} *)m[{array.binding}];"
                    f" (void)v_{array.name};"
                )

    # Statements.

    def statements(self, body: Iterable[Statement]) -> Iterator[str]:
        for statement in body:
            yield from self.statement(statement)

    def statement(self, node: Statement) -> Iterator[str]:
        match node:
            case Declare():
                yield self.declaration(node) + ";"
            case Assignment():
                yield self.assignment(node) + ";"
            case If(condition, then, otherwise):
                yield f"if ({self.expression(condition)}) {{"
                yield from self.statements(then)
                if otherwise:
                    yield "} else {"
                    yield from self.statements(otherwise)
                yield "}"
            case For(first, condition, step, body):
                start = self.declaration(first) if first else ""
                step_text = self.assignment(step) if step else ""
                yield f"for ({start}; {self.expression(condition)}; {step_text}) {{"
                yield from self.statements(body)
                yield "}"
            case Return(value):
                yield self.end if value is None else f"return {self.expression(value)};"
            case Scope(body):
                yield "{"
                yield from self.statements(body)
                yield "}"
            case Barrier():
                raise UnsupportedKernel(
                    "a kernel has a barrier in control flow that differs within a workgroup"
                )

    def declaration(self, node: Declare) -> str:
        if node.name in self.lanes:
            value = "0" if node.value is None else self.expression(node.value)
            return f"v_{node.name}[{self.lane}] = {value}"
        value = "" if node.value is None else f" = {self.expression(node.value)}"
        return f"{self.variable(node.type)} v_{node.name}{value}"

    def variable(self, kind: str) -> str:
        """Return the C type of a variable of this type."""
        return "usize" if kind == "u32" and self.wide_indices else _c_type(kind)

    def assignment(self, node: Assignment) -> str:
        return f"{self.expression(node.target)} = {self.expression(node.value)}"

    # Expressions.

    def expression(self, node: Expression) -> str:
        match node:
            case Literal():
                return _literal(node)
            case Name("local_x"):
                return "local_x"
            case Name(name):
                lane_index = f"[{self.lane}]" if name in self.lanes else ""
                return f"v_{name}{lane_index}"
            case Unary(sign, operand, kind):
                if sign == "!" and size_of(kind) > 1:
                    sign = "~"
                return f"({sign}{self.expression(operand)})"
            case Binary():
                return self.binary(node)
            case Application():
                return self.call(node)
            case Index(operand, at):
                return f"{self.expression(operand)}[{self.expression(at)}]"
            case Component(operand, name):
                if isinstance(operand, Name) and operand.name in _BUILT_IN_VALUES.values():
                    return f"{operand.name}_{name}"
                return f"{self.expression(operand)}[{'xyzw'.index(name)}]"

    def binary(self, node: Binary) -> str:
        sign, left, right = node.sign, self.expression(node.left), self.expression(node.right)
        if sign in {"&&", "||"} and not _is_unsafe_to_speculate(node.right):
            sign = sign[0]
        is_integer = node.type in {"u32", "i32"} and sign not in COMPARISONS
        if is_integer and sign in {"/", "%"} and not _is_number(node.right):
            return f"{'div' if sign == '/' else 'mod'}_{node.type}({left}, {right})"
        if sign in {"<<", ">>"} and not _is_number(node.right):
            right = f"({right} & {63 if node.type == 'u64' else 31}u)"
        kinds = {node.left.type, node.right.type}
        if sign in COMPARISONS and "u32" in kinds and self.wide_indices:
            return (
                f"((u32){left} {sign} (u32){right})"
                if _may_underflow(node)
                else f"({left} {sign} {right})"
            )
        if node.type == "u32" and self.wide_indices and sign in {"-", "<<", "^", "|", "&", ">>"}:
            return f"((u32)((u32){left} {sign} (u32){right}))"
        return f"({left} {sign} {right})"

    def call(self, node: Application) -> str:
        name, kind = node.name, node.type
        arguments = [self.expression(x) for x in node.arguments]
        first_type = node.arguments[0].type if node.arguments else ""
        argument_list = ", ".join(arguments)
        if name in self.local_functions:
            context = "m, bytes, " if name in self.buffer_readers else ""
            return f"{self.prefix}{name}({context}{argument_list})"
        if name == "bitcast":
            return self.bits(kind, first_type, argument_list)
        if name in _C_TYPES:
            return self.conversion(kind, first_type, argument_list)
        if name.startswith("vec"):
            if len(arguments) > 1:
                return f"(({kind}){{{argument_list}}})"
            if size_of(first_type) == 1:
                return f"(({kind})({f'-({argument_list})' if kind == 'vec4b' else argument_list}))"
            return f"__builtin_convertvector({argument_list}, {kind})"
        if name == "select":
            if size_of(node.arguments[2].type) > 1:
                return f"pick4_{kind}({argument_list})"
            picked = "usize" if kind == "u32" and self.wide_indices else _c_type(kind)
            return f"pick_{picked}({argument_list})"
        if name in {"max", "min"}:
            return f"{'max' if name == 'max' else 'min'}_{kind}({argument_list})"
        if name == "clamp":
            x, low, high = arguments
            return f"min_{kind}(max_{kind}({x}, {low}), {high})"
        if name == "fma":
            return f"fma_{kind}({argument_list})"
        if name in _BUILT_IN and kind == "f32":
            return f"{_BUILT_IN[name]}({argument_list})"
        if name == "abs":
            return (
                f"__builtin_fabsf({argument_list})"
                if kind == "f32"
                else f"abs_{kind}({argument_list})"
            )
        if name == "any":
            return "(" + " | ".join(f"{argument_list}[{i}]" for i in range(4)) + ") != 0"
        if name == "arrayLength":
            reference = node.arguments[0]
            assert isinstance(reference, Unary)
            assert isinstance(reference.operand, Name)
            array = self.arrays[reference.operand.name]
            return f"(bytes[{array.binding}] / {4 * size_of(array.element)}u)"
        if name == "extractBits":
            return f"bits_{kind}({argument_list})"
        if name == "countLeadingZeros":
            return f"leading_zeros({argument_list})"
        if name in _LIBRARY_NAMES:
            return f"{name}({argument_list})"
        raise UnsupportedKernel(f"a kernel calls {name!r} of {kind}")

    def bits(self, kind: str, source_type: str, argument_list: str) -> str:
        if size_of(kind) > 1:
            return f"(({kind})({argument_list}))"
        if kind == source_type:
            return argument_list
        if kind == "f32":
            return f"f32_of_u32((u32)({argument_list}))"
        if source_type == "f32":
            return f"(({_C_TYPES[kind]})u32_of_f32({argument_list}))"
        return f"(({_C_TYPES[kind]})({argument_list}))"

    def conversion(self, kind: str, source_type: str, argument_list: str) -> str:
        if kind == "bool":
            return f"({argument_list} != 0)"
        if source_type == "f32" and kind in {"i32", "u32"}:
            return f"{'saturate_i32' if kind == 'i32' else 'saturate_u32'}({argument_list})"
        if kind == "f32" and source_type == "u32":
            return f"((float)(u32)({argument_list}))"
        return f"(({_C_TYPES[kind]})({argument_list}))"


_LIBRARY_NAMES: set[str] = set()
"""Names of the library's functions, which every kernel may call."""


def add_library_names(names: Iterable[str]) -> None:
    """Register functions that every kernel may call."""
    _LIBRARY_NAMES.update(names)


def _c_type(kind: str) -> str:
    return _C_TYPES.get(kind, kind)


def _literal(node: Literal) -> str:
    if node.type in {"f32", "float"}:
        number = float(np.float32(node.value))
        return f"({number.hex()}f)"
    if node.type == "bool":
        return str(int(node.value))
    if node.type == "u32":
        return f"{node.value}u"
    return f"({node.value})" if node.value != -(2**31) else "(-2147483647 - 1)"


def _is_number(node: Expression) -> bool:
    return isinstance(node, Literal) and bool(node.value)


def _may_underflow(node: Expression) -> bool:
    return any(isinstance(x, Binary) and x.sign == "-" for x in walk(node))


def _is_unsafe_to_speculate(node: Expression) -> bool:
    """Whether an expression reads memory or has a remainder, so that it must not be evaluated if an
    earlier operand decides the result."""
    return any(
        isinstance(x, Index) or (isinstance(x, Binary) and x.sign == "%") for x in walk(node)
    )


def walk(node: Expression) -> Iterator[Expression]:
    """Yield an expression and its subexpressions, parents first."""
    yield node
    match node:
        case Unary(_, operand) | Component(operand):
            yield from walk(operand)
        case Binary(_, left, right) | Index(left, right):
            yield from walk(left)
            yield from walk(right)
        case Application(_, arguments):
            for argument in arguments:
                yield from walk(argument)


def expressions(body: Iterable[Statement]) -> Iterator[Expression]:
    """Yield the outermost expressions of statements."""
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
    """Prints one kernel."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        self.width = module.workgroup
        function_names = frozenset(function.name for function in module.functions)
        buffers = {array.name for array in module.arrays.values() if array.binding >= 0}
        readers: set[str] = set()
        for _ in module.functions:  # callers of a reader are readers, too
            for function in module.functions:
                calls = {
                    x.name
                    for e in expressions(function.body)
                    for x in walk(e)
                    if isinstance(x, Application)
                }
                if _names(function.body) & buffers or calls & readers:
                    readers.add(function.name)
        built_ins = {name: _BUILT_IN_VALUES[built_in] for name, built_in in module.inputs.items()}
        self.body = tuple(_rename_variables(module.body, built_ins))
        self.printer = _Printer(
            module.arrays,
            f"{name}_",
            function_names,
            frozenset(readers),
            wide_indices=True,
            end="continue;",
        )
        self.function_printer = _Printer(
            module.arrays, f"{name}_", function_names, frozenset(readers)
        )

    def text(self) -> str:
        """Print the kernel."""
        functions = [
            self.function_printer.function(function)
            for function in _callees_first(self.module.functions)
        ]
        linear = self._print_one_loop()
        body = linear if linear is not None else self._print_workgroups()
        shared_arrays = [
            f"{_c_type(a.element)} v_{a.name}[{a.elements}] __attribute__((aligned(64)));"
            for a in self.module.arrays.values()
            if a.binding < 0
        ]
        head = SIGNATURE.format(name=self.name)
        return "\n".join(
            [*functions, head + " {", *self.printer.pointers(), *shared_arrays, *body, "}"]
        )

    # Kernels that use only the invocation's number.

    def _print_one_loop(self) -> list[str] | None:
        """Print the kernel as one loop; None if it uses more than its invocation's number."""
        body = self.body
        if not body or not isinstance(body[0], Declare) or _has_barrier(body):
            return None
        number, value = body[0], body[0].value
        if number.is_mutable or value is None or not _is_linear(value):
            return None
        statements: Sequence[Statement] = body[1:]
        if _names(statements) & {"number", "local", "local_x", "group", "groups"}:
            return None
        statements, limit = self._strip_bounds_check(statements, number.name)
        end = f"usize high = last * {self.width}u;"
        lines = [f"usize low = first * {self.width}u;", end]
        if limit:
            lines.append(f"if (high > {limit}) high = {limit};")
        row = _find_row_length(statements, number.name)
        if row:
            return [*lines, *self._print_rows(statements, number.name, row)]
        lines.append(
            f"for (usize v_{number.name} = low; v_{number.name} < high; v_{number.name}++) {{"
        )
        return [*lines, *self.printer.statements(statements), "}"]

    def _strip_bounds_check(
        self, body: Sequence[Statement], number: str
    ) -> tuple[Sequence[Statement], str]:
        """Strip the bounds check; return the remaining statements and the bound."""
        if body and isinstance(body[0], If) and isinstance(body[0].condition, Binary):
            test, condition = body[0], body[0].condition
            tests_number = isinstance(condition.left, Name) and condition.left.name == number
            if tests_number and condition.sign == ">=" and test.then == (Return(None),):
                return body[1:], self.printer.expression(condition.right)
            if tests_number and condition.sign == "<" and len(body) == 1 and not test.otherwise:
                return test.then, self.printer.expression(condition.right)
        return body, ""

    def _print_rows(self, body: Sequence[Statement], number: str, row: int) -> Iterator[str]:
        """Print a loop over rows of length `row`, and in it a loop over columns."""
        yield f"for (usize v_row = low / {row}u; v_row * {row}u < high; v_row++) {{"
        yield f"usize from = v_row * {row}u < low ? low - v_row * {row}u : 0;"
        yield f"usize to = high - v_row * {row}u < {row}u ? high - v_row * {row}u : {row}u;"
        yield "for (usize v_column = from; v_column < to; v_column++) {"
        yield from self.printer.statements(_use_row_coordinates(body, number, row))
        yield "}"
        yield "}"

    # Kernels with workgroup memory.

    def _print_workgroups(self) -> list[str]:
        """Print the kernel as a loop over workgroups."""
        lines = ["for (usize at = first; at < last; at++) {"]
        lines += [
            "const u32 group_x = at % groups_x; const u32 group_z = at / groups_x / groups_y;"
        ]
        lines += ["const u32 group_y = at / groups_x % groups_y;"]
        lines += ["(void)group_x; (void)group_y; (void)group_z;"]
        lines += self._print_lockstep(self.body)
        return [*lines, "}"]

    def _print_lockstep(self, body: Sequence[Statement]) -> list[str]:
        """Print statements that all invocations of a workgroup execute, section by section."""
        lines: list[str] = []
        section: list[Statement] = []

        def close() -> None:
            if section:
                lines.extend(self._print_section(section))
                section.clear()

        shared_names = self._shared_variables(body)
        for statement in body:
            if isinstance(statement, Declare) and statement.name in shared_names:
                if self._is_uniform(statement):
                    close()
                    lines.append(self.printer.declaration(statement) + ";")
                    continue
                lines_of = f"{_c_type(statement.type)} v_{statement.name}[{self.width}];"
                close()
                lines.append(lines_of)
                self.printer.lanes.add(statement.name)
                section.append(statement)
                continue
            if isinstance(statement, Barrier):
                close()
            elif self._is_collective(statement):
                close()
                lines += self._print_collective(statement)
            else:
                section.append(statement)
        close()
        return lines

    def _shared_variables(self, body: Sequence[Statement]) -> set[str]:
        """Return the variables that several sections may read: all if there are several
        sections, else none."""
        has_sections = any(isinstance(x, Barrier) or self._is_collective(x) for x in body)
        return {x.name for x in body if isinstance(x, Declare)} if has_sections else set()

    def _is_uniform(self, node: Declare) -> bool:
        if node.is_mutable or node.value is None:
            return False
        return self._is_same_for_all(node.value)

    def _is_same_for_all(self, node: Expression) -> bool:
        for part in walk(node):
            if isinstance(part, Name) and (
                part.name in {"number", "local", "local_x"}
                or part.name in self.printer.lanes
                or part.name in self.module.arrays
            ):
                return False
        return True

    def _is_collective(self, node: Statement) -> bool:
        """Return whether all invocations must execute the statement in lockstep."""
        match node:
            case If(_, then, otherwise):
                return any(map(self._is_collective, (*then, *otherwise))) or _has_barrier((node,))
            case For(body=inner):
                return (
                    _has_barrier((node,))
                    or self._is_strided(node)
                    or any(map(self._is_collective, inner))
                )
            case Scope(inner):
                return any(map(self._is_collective, inner)) or _has_barrier(inner)
        return False

    def _is_strided(self, node: For) -> bool:
        """Return whether a statement is a workgroup-stride loop: `r = x + local.x; r += width`."""
        first, step = node.first, node.step
        if first is None or step is None or not isinstance(first.value, Binary):
            return False
        increment, start = step.value, first.value
        return (
            isinstance(increment, Binary)
            and increment.sign == "+"
            and increment.right == Literal(self.width, "u32")
            and start.sign == "+"
            and start.right == Component(Name("local", "vec3u"), "x", "u32")
            and self._is_same_for_all(start.left)
            and isinstance(node.condition, Binary)
            and node.condition.sign == "<"
            and self._is_same_for_all(node.condition.right)
        )

    def _print_collective(self, node: Statement) -> list[str]:
        """Print a statement that all invocations execute in lockstep."""
        text = self.printer
        match node:
            case If(condition, then, otherwise):
                lines = [f"if ({self._print_for_first(condition)}) {{", *self._print_lockstep(then)]
                if otherwise:
                    lines += ["} else {", *self._print_lockstep(otherwise)]
                return [*lines, "}"]
            case For() if self._is_strided(node):
                return self._print_strides(node)
            case For(first, condition, step, body):
                start = text.declaration(first) if first else ""
                step_text = text.assignment(step) if step else ""
                head = f"for ({start}; {self._print_for_first(condition)}; {step_text}) {{"
                return [head, *self._print_lockstep(body), "}"]
            case Scope(body):
                return ["{", *self._print_lockstep(body), "}"]
        raise UnsupportedKernel("a kernel has an unsupported collective statement")

    def _print_for_first(self, condition: Expression) -> str:
        """Print a uniform condition with the first invocation's values."""
        self.printer.lane = "0"
        text = self.printer.expression(condition)
        self.printer.lane = "lane"
        return text

    def _print_strides(self, node: For) -> list[str]:
        """Print a workgroup-stride loop as a loop over consecutive terms."""
        first, condition = node.first, node.condition
        assert first is not None
        assert isinstance(first.value, Binary)
        assert isinstance(condition, Binary)
        low, high = (
            self.printer.expression(first.value.left),
            self.printer.expression(condition.right),
        )
        body = [*self.printer.statements(node.body)]
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

    def _print_section(self, section: Sequence[Statement]) -> list[str]:
        """Print the code of one section as a loop over invocations."""
        names = _names(section)
        lines = [f"for (usize lane = 0; lane < {self.width}u; lane++) {{"]
        if "local" in names or "local_x" in names:
            lines.append("const usize local_x = lane; (void)local_x;")
        if "number" in names:
            lines.append(f"const usize number_x = group_x * {self.width}u + lane;")
            lines.append("const usize number_y = group_y; (void)number_x; (void)number_y;")
        lines += self.printer.statements(section)
        return [*lines, "}"]


def _callees_first(functions: Sequence[Function]) -> list[Function]:
    """Order functions so that callees come first."""
    remaining, ordered = {callee.name: callee for callee in functions}, list[Function]()

    def take(function: Function) -> None:
        if remaining.pop(function.name, None) is None:
            return
        for expression in expressions(function.body):
            for part in walk(expression):
                if isinstance(part, Application) and part.name in remaining:
                    take(remaining[part.name])
        ordered.append(function)

    for function in functions:
        take(function)
    return ordered


def _is_linear(node: Expression) -> bool:
    """Return whether an expression is the linear index, `id.x` or `id.x + id.y * ROW`."""
    x = Component(Name("number", "vec3u"), "x", "u32")
    y = Component(Name("number", "vec3u"), "y", "u32")
    if node == x:
        return True
    if not isinstance(node, Binary) or node.sign != "+" or node.left != x:
        return False
    return any(part == y for part in walk(node.right))


def _find_row_length(body: Sequence[Statement], number: str) -> int:
    """Return the length of a row: the smallest divisor of the number in the kernel, if it divides
    all other divisors and is long enough; else 0."""
    sizes = set()
    for expression in expressions(body):
        for part in walk(expression):
            if (
                isinstance(part, Binary)
                and part.sign in {"/", "%"}
                and _is_variable(part.left, number)
            ):
                if not isinstance(part.right, Literal):
                    return 0
                sizes.add(int(part.right.value))
    shortest = min(sizes, default=0)
    if shortest < _SHORTEST_ROW or any(size % shortest for size in sizes):
        return 0
    return shortest


def _is_variable(node: Expression, number: str) -> bool:
    return isinstance(node, Name) and node.name == number


def _use_row_coordinates(body: Iterable[Statement], number: str, row: int) -> Iterator[Statement]:
    """Replace the number by `row * length + column`, where `row` is the length's variable in C."""
    rows, column = Name("row", "u32"), Name("column", "u32")

    def change(node: Expression) -> Expression | None:
        if _is_variable(node, number):
            row_start = Binary("*", rows, Literal(row, "u32"), "u32")
            return Binary("+", row_start, column, "u32")
        if isinstance(node, Binary) and node.sign in {"/", "%"} and _is_variable(node.left, number):
            assert isinstance(node.right, Literal)
            rows_per_unit = Literal(int(node.right.value) // row, "u32")
            is_row = rows_per_unit.value == 1
            if node.sign == "/":
                return rows if is_row else Binary("/", rows, rows_per_unit, "u32")
            if is_row:
                return column
            row_index = Binary("%", rows, rows_per_unit, "u32")
            return Binary("+", Binary("*", row_index, Literal(row, "u32"), "u32"), column, "u32")
        return None

    return rewrite_statements(body, change)


def _rename_variables(body: Iterable[Statement], names: Mapping[str, str]) -> Iterator[Statement]:
    def change(node: Expression) -> Expression | None:
        if isinstance(node, Name) and node.name in names:
            return Name(names[node.name], node.type)
        return None

    return rewrite_statements(body, change)


def rewrite_expression(node: Expression, change: Change) -> Expression:
    """Replace subexpressions, outermost first; `change` returns the replacement or None."""
    replacement = change(node)
    if replacement is not None:
        return replacement
    match node:
        case Unary(_, operand):
            return replace(node, operand=rewrite_expression(operand, change))
        case Component(operand):
            return replace(node, operand=rewrite_expression(operand, change))
        case Binary(_, left, right):
            left, right = rewrite_expression(left, change), rewrite_expression(right, change)
            return replace(node, left=left, right=right)
        case Index(operand, at):
            return replace(
                node, operand=rewrite_expression(operand, change), at=rewrite_expression(at, change)
            )
        case Application(_, arguments):
            return replace(node, arguments=tuple(rewrite_expression(x, change) for x in arguments))
    return node


def rewrite_statements(body: Iterable[Statement], change: Change) -> Iterator[Statement]:
    """Apply `rewrite_expression` to all expressions of statements."""
    for statement in body:
        match statement:
            case Declare():
                yield _rewrite_declaration(statement, change)
            case Assignment():
                yield _rewrite_assignment(statement, change)
            case If(condition, then, otherwise):
                yield If(
                    rewrite_expression(condition, change),
                    (*rewrite_statements(then, change),),
                    (*rewrite_statements(otherwise, change),),
                )
            case For(first, condition, step, inner):
                new_first = None if first is None else _rewrite_declaration(first, change)
                new_step = None if step is None else _rewrite_assignment(step, change)
                new_condition = rewrite_expression(condition, change)
                yield For(new_first, new_condition, new_step, (*rewrite_statements(inner, change),))
            case Return(value):
                yield Return(None if value is None else rewrite_expression(value, change))
            case Scope(inner):
                yield Scope((*rewrite_statements(inner, change),))
            case _:
                yield statement


def _rewrite_declaration(node: Declare, change: Change) -> Declare:
    if node.value is None:
        return node
    return replace(node, value=rewrite_expression(node.value, change))


def _rewrite_assignment(node: Assignment, change: Change) -> Assignment:
    target = rewrite_expression(node.target, change)
    return Assignment(target, rewrite_expression(node.value, change))
