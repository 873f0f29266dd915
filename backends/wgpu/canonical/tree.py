"""Parse the kernels of `backends.wgpu.shaders` and `lowering`: WGSL as a typed tree.

Native arithmetic passes a kernel's WGSL to the driver unchanged. Canonical arithmetic parses it
into this tree, its only intermediate representation, which `wgsl_text` and `c_text` print.

Only the subset of WGSL that those kernels use is supported; anything else is refused by name. Types
are strings: f32, u32, i32, u64, bool, vec4f (and 2, 3; u, i, b). Literals without a suffix have the
abstract types `int` and `float` until an operand fixes their type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from protocol.base.errors import SamestepError

FLOATS: Final = frozenset({"f32", "vec2f", "vec3f", "vec4f"})
_ELEMENT: Final = {"f": "f32", "u": "u32", "i": "i32", "b": "bool"}
_VECTOR: Final = {"f32": "f", "u32": "u", "i32": "i", "bool": "b"}
_SCALARS: Final = frozenset({"f32", "u32", "i32", "u64", "bool"})
_TOKEN: Final = re.compile(
    r"\s+|//[^\n]*|(?P<number>0x[0-9a-fA-F]*\.?[0-9a-fA-F]*p[+-]?\d+f?|0x[0-9a-fA-F]+[ui]?"
    r"|(?:\d+\.\d*|\.\d+|\d+)(?:e[+-]?\d+)?[uif]?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign><<=|>>=|<<|>>|\+\+|--|->|&&|\|\||[-+*/%&|^<>=!]=|[-+*/%&|^<>=!~(){}\[\];:,.@?])"
)
_LEVELS: Final = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!=", "<", ">", "<=", ">="), ("<<", ">>"),
    ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
COMPARISONS: Final = frozenset({"==", "!=", "<", ">", "<=", ">="})
_LIKE_FIRST: Final = frozenset({
    "abs", "sign", "floor", "ceil", "trunc", "round", "exp", "exp2", "log", "log2", "sin", "cos",
    "sqrt", "extractBits", "subgroupBroadcast", "countLeadingZeros",
})  # fmt: skip
_LIKE_ALL: Final = frozenset({"max", "min", "clamp", "fma"})


class UnsupportedKernel(SamestepError):
    """A kernel uses WGSL that canonical arithmetic does not support."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A float, an integer or a boolean."""

    value: float | int | bool
    type: str


@dataclass(frozen=True, slots=True)
class Name:
    """A variable, a parameter or a buffer."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Unary:
    """`-x`, `!x`, `~x`, `&x`."""

    sign: str
    operand: Expression
    type: str


@dataclass(frozen=True, slots=True)
class Binary:
    """A binary operation. Operands have one type, or one is a vector of the other's type; a shift
    count is u32."""

    sign: str
    left: Expression
    right: Expression
    type: str


@dataclass(frozen=True, slots=True)
class Application:
    """A function call, a conversion or a constructor; a `bitcast`'s target is its type."""

    name: str
    arguments: tuple[Expression, ...]
    type: str


@dataclass(frozen=True, slots=True)
class Index:
    """An element of an array or a vector."""

    operand: Expression
    at: Expression
    type: str


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a vector."""

    operand: Expression
    name: str
    type: str


Expression = Literal | Name | Unary | Binary | Application | Index | Component


@dataclass(frozen=True, slots=True)
class Declare:
    """A declaration: `var` if it is mutable, else `let`."""

    name: str
    type: str
    value: Expression | None
    is_mutable: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """`target = value`; compound assignments are expanded."""

    target: Expression
    value: Expression


@dataclass(frozen=True, slots=True)
class If:
    """`if` with its branches."""

    condition: Expression
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class For:
    """`for`; or `while`, with neither first nor step."""

    first: Declare | None
    condition: Expression
    step: Assignment | None
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """`return`."""

    value: Expression | None


@dataclass(frozen=True, slots=True)
class Barrier:
    """`workgroupBarrier()`."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A nested block."""

    body: tuple[Statement, ...]


Statement = Declare | Assignment | If | For | Return | Barrier | Scope


@dataclass(frozen=True, slots=True)
class Function:
    """A function other than `main`."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    type: str
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """A buffer, or workgroup memory.

    Attributes:
        element: Element type.
        elements: Number of elements; 0 for a buffer.
        binding: Binding of a buffer; -1 for workgroup memory.
        is_writable: Whether kernels may write it.
    """

    name: str
    element: str
    elements: int
    binding: int
    is_writable: bool


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed kernel.

    Attributes:
        arrays: Buffers and workgroup memory by name.
        functions: Functions in source order.
        inputs: Parameters of `main`: name to built-in value.
        body: Body of `main`.
        workgroup: Invocations per workgroup, along x.
    """

    arrays: Mapping[str, Array]
    functions: tuple[Function, ...]
    inputs: Mapping[str, str]
    body: tuple[Statement, ...]
    workgroup: int


def read_module(source: str) -> Module:
    """Parse a kernel.

    Raises:
        UnsupportedKernel: The kernel uses unsupported WGSL.
    """
    return _Reader(source).module()


def read_functions(source: str, result_types: Mapping[str, str]) -> tuple[Function, ...]:
    """Parse functions without an entry point.

    Args:
        source: WGSL.
        result_types: Result types of external functions that the source may call.
    """
    reader = _Reader(source)
    reader.results.update(result_types)
    reader.module(main=False)
    return tuple(reader.functions)


def element_of(kind: str) -> str:
    """Return a vector's element type, or the scalar type itself."""
    return _ELEMENT[kind[4]] if kind.startswith("vec") else kind


def vector_of(element: str, size: int) -> str:
    """Return the type of a vector."""
    return f"vec{size}{_VECTOR[element]}"


def size_of(kind: str) -> int:
    """Return the number of components; 1 for a scalar."""
    return int(kind[3]) if kind.startswith("vec") else 1


def to_concrete(node: Expression, kind: str) -> Expression:
    """Convert an expression of abstract type to the type `kind`; return others unchanged."""
    if node.type not in {"int", "float"} or (kind in {"int", "float"} and node.type == kind):
        return node
    target = kind if kind in {"int", "float"} else element_of(kind)
    match node:
        case Literal(value):
            is_float = target in {"f32", "float"}
            return Literal(float(value) if is_float else int(value), target)
        case Unary(sign, of):
            inner = to_concrete(of, target)
            if sign == "-" and isinstance(inner, Literal):
                return Literal(-inner.value, target)
            return Unary(sign, inner, target)
        case Binary(sign, left, right):
            return Binary(sign, to_concrete(left, target), to_concrete(right, target), target)
        case Application(name, arguments):
            return Application(name, tuple(to_concrete(x, target) for x in arguments), target)
    raise UnsupportedKernel(f"expected a number, got {node}")


def _default_type(node: Expression) -> Expression:
    """Convert abstract types to WGSL's defaults: i32 and f32."""
    return to_concrete(node, {"int": "i32", "float": "f32"}.get(node.type, node.type))


def unify_types(operands: Sequence[Expression]) -> tuple[Expression, ...]:
    """Convert operands of abstract type to the widest concrete type among them."""
    kinds = [x.type for x in operands if x.type not in {"int", "float"}]
    kind = max(kinds, key=size_of) if kinds else "float"
    if not kinds and all(x.type == "int" for x in operands):
        kind = "int"
    return tuple(to_concrete(x, kind) for x in operands)


@dataclass(slots=True)
class _Reader:
    """Parses WGSL by recursive descent; `scopes` has the types of the visible names."""

    source: str
    tokens: list[tuple[str, str]] = field(default_factory=list)
    at: int = 0
    arrays: dict[str, Array] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, list[str]] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    scopes: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        offset = 0
        while offset < len(self.source):
            token = _TOKEN.match(self.source, offset)
            if token is None:
                raise UnsupportedKernel(f"a kernel has {self.source[offset : offset + 20]!r}")
            offset = token.end()
            if token.lastgroup is not None:
                self.tokens.append((token.lastgroup, token.group()))
        self.tokens.append(("end", ""))

    @property
    def next(self) -> str:
        return self.tokens[self.at][1]

    def take(self, token: str = "") -> str:
        text = self.next
        if token and text != token:
            context = " ".join(t for _, t in self.tokens[max(0, self.at - 12) : self.at + 3])
            raise UnsupportedKernel(
                f"a kernel has {text!r} where {token!r} was expected: {context}"
            )
        self.at += 1
        return text

    def accept(self, token: str) -> bool:
        if self.next != token:
            return False
        self.at += 1
        return True

    # Declarations.

    def module(self, *, main: bool = True) -> Module:
        self._read_signatures()
        inputs: dict[str, str] = {}
        body: tuple[Statement, ...] = ()
        workgroup = 1
        while self.tokens[self.at][0] != "end":
            attributes = self._attributes()
            if self.accept("var"):
                self._read_variable(int(attributes.get("binding", "-1")))
            elif self.accept("fn"):
                if "compute" in attributes:
                    workgroup = int(attributes["workgroup_size"])
                    inputs, body = self._main()
                else:
                    self.functions.append(self._function())
            else:
                raise UnsupportedKernel(f"a kernel declares {self.next!r}")
        if main and not body:
            raise UnsupportedKernel("a kernel has no entry point")
        return Module(self.arrays, tuple(self.functions), inputs, body, workgroup)

    def _read_signatures(self) -> None:
        """Read all signatures first: a function may be called before its definition."""
        for signature in re.finditer(r"fn (\w+)\(([^{]*)\)\s*->\s*([\w<>]+)", self.source):
            kinds = re.findall(r":\s*([\w<>]+)", signature.group(2))
            self.results[signature.group(1)] = _parse_type(signature.group(3))
            self.parameters[signature.group(1)] = [_parse_type(kind) for kind in kinds]

    def _attributes(self) -> dict[str, str]:
        attributes: dict[str, str] = {}
        while self.accept("@"):
            name, value = self.take(), ""
            if self.accept("("):
                value = self.take()
                while self.accept(","):
                    if self.take() != "1":
                        raise UnsupportedKernel("a kernel has workgroups of several dimensions")
                self.take(")")
            attributes[name] = value.rstrip("u")
        return attributes

    def _read_variable(self, binding: int) -> None:
        self.take("<")
        kind = self.take()
        writes = self.accept(",") and self.take() == "read_write"
        self.take(">")
        name = self.take()
        self.take(":")
        element, elements = self._array_type()
        self.take(";")
        self.arrays[name] = Array(name, element, elements, binding, writes or kind == "workgroup")

    def _array_type(self) -> tuple[str, int]:
        self.take("array")
        self.take("<")
        element = self.type()
        elements = int(self.take().rstrip("u")) if self.accept(",") else 0
        self.take(">")
        return element, elements

    def type(self) -> str:
        name = self.take()
        if self.accept("<"):
            name += f"<{self.take()}>"
            self.take(">")
        return _parse_type(name)

    def _main(self) -> tuple[dict[str, str], tuple[Statement, ...]]:
        self.take("main")
        self.take("(")
        inputs, scope = {}, {}
        while not self.accept(")"):
            built_in = self._attributes()["builtin"]
            name = self.take()
            self.take(":")
            scope[name] = self.type()
            inputs[name] = built_in
            self.accept(",")
        self.scopes = [scope]
        return inputs, self._block()

    def _function(self) -> Function:
        name = self.take()
        self.take("(")
        parameters = []
        while not self.accept(")"):
            parameter = self.take()
            self.take(":")
            parameters.append((parameter, self.type()))
            self.accept(",")
        self.take("->")
        kind = self.type()
        self.scopes = [dict(parameters)]
        return Function(
            name, tuple(parameters), kind, _convert_returned_literals(self._block(), kind)
        )

    # Statements.

    def _block(self) -> tuple[Statement, ...]:
        self.take("{")
        self.scopes.append({})
        body: list[Statement] = []
        while not self.accept("}"):
            body += self._statement()
        self.scopes.pop()
        return tuple(body)

    def _statement(self) -> list[Statement]:
        match self.next:
            case ";":
                self.take()
                return []
            case "{":
                return [Scope(self._block())]
            case "if":
                return [self._if()]
            case "for":
                return [self._for()]
            case "while":
                self.take()
                condition = self.expression()
                return [For(None, condition, None, self._block())]
            case "return":
                self.take()
                if self.accept(";"):
                    return [Return(None)]
                value = self.expression()
                self.take(";")
                return [Return(value)]
            case "workgroupBarrier":
                for text in ("workgroupBarrier", "(", ")", ";"):
                    self.take(text)
                return [Barrier()]
        statement = self._simple()
        self.take(";")
        return [statement]

    def _if(self) -> If:
        self.take("if")
        condition = self.expression()
        then = self._block()
        otherwise: tuple[Statement, ...] = ()
        if self.accept("else"):
            otherwise = (self._if(),) if self.next == "if" else self._block()
        return If(condition, then, otherwise)

    def _for(self) -> For:
        self.take("for")
        self.take("(")
        self.scopes.append({})
        first = self._simple()
        self.take(";")
        condition = self.expression()
        self.take(";")
        step = self._simple()
        self.take(")")
        body = self._block()
        self.scopes.pop()
        if not isinstance(first, Declare) or not isinstance(step, Assignment):
            raise UnsupportedKernel("a kernel has a loop without a loop variable")
        return For(first, condition, step, body)

    def _simple(self) -> Declare | Assignment:
        if self.next in {"let", "var"}:
            is_mutable = self.take() == "var"
            name = self.take()
            kind = self.type() if self.accept(":") else ""
            value = self.expression() if self.accept("=") else None
            if value is not None:
                value = to_concrete(value, kind) if kind else _default_type(value)
                kind = value.type
            self.scopes[-1][name] = kind
            return Declare(name, kind, value, is_mutable)
        target = self._postfix()
        sign = self.take()
        if sign in {"++", "--"}:
            unit = to_concrete(Literal(1, "int"), target.type)
            return Assignment(target, Binary(sign[0], target, unit, target.type))
        value = self.expression()
        if sign == "=":
            return Assignment(target, to_concrete(value, target.type))
        return Assignment(target, self._binary(sign[:-1], target, value))

    # Expressions.

    def expression(self, level: int = 0) -> Expression:
        if level == len(_LEVELS):
            return self._unary()
        left = self.expression(level + 1)
        while self.next in _LEVELS[level]:
            sign = self.take()
            left = self._binary(sign, left, self.expression(level + 1))
        return left

    def _binary(self, sign: str, left: Expression, right: Expression) -> Expression:
        if sign in {"<<", ">>"}:
            return Binary(sign, left, to_concrete(right, "u32"), left.type)
        left, right = unify_types((left, right))
        kind = max((left.type, right.type), key=size_of)
        if sign in COMPARISONS:
            left, right = _default_type(left), _default_type(right)
            size = size_of(kind)
            return Binary(sign, left, right, "bool" if size == 1 else vector_of("bool", size))
        return _identity(sign, left, right, kind) or Binary(sign, left, right, kind)

    def _unary(self) -> Expression:
        if self.next in {"-", "!", "~", "&"}:
            sign = self.take()
            operand = self._unary()
            if sign == "-" and isinstance(operand, Literal):
                return replace(operand, value=-operand.value)
            return Unary(sign, operand, operand.type)
        return self._postfix()

    def _postfix(self) -> Expression:
        node = self._primary()
        while True:
            if self.accept("["):
                at = _default_type(self.expression())
                self.take("]")
                array = isinstance(node, Name) and node.name in self.arrays
                node = Index(node, at, node.type if array else element_of(node.type))
            elif self.accept("."):
                name = self.take()
                if len(name) != 1:
                    raise UnsupportedKernel(f"a kernel has the components {name!r}")
                node = Component(node, name, element_of(node.type))
            else:
                return node

    def _primary(self) -> Expression:
        group, text = self.tokens[self.at]
        if group == "number":
            self.take()
            return _number(text)
        if self.accept("("):
            inner = self.expression()
            self.take(")")
            return inner
        if text in {"true", "false"}:
            self.take()
            return Literal(text == "true", "bool")
        if group != "name":
            raise UnsupportedKernel(f"a kernel has {text!r} where a value was expected")
        self.take()
        if text == "bitcast" or (self.next == "<" and text.startswith("vec")):
            self.take("<")
            inner_kind = self.type()
            self.take(">")
            name = text if text == "bitcast" else vector_of(inner_kind, int(text[3]))
            kind = inner_kind if text == "bitcast" else name
            return self._call(name, kind)
        if self.next == "(":
            return self._call(text, "")
        for scope in reversed(self.scopes):
            if text in scope:
                return Name(text, scope[text])
        if text in self.arrays:
            return Name(text, self.arrays[text].element)
        raise UnsupportedKernel(f"a kernel has the unknown name {text!r}")

    def _call(self, name: str, kind: str) -> Expression:
        self.take("(")
        arguments: list[Expression] = []
        while not self.accept(")"):
            arguments.append(self.expression())
            self.accept(",")
        operands = tuple(arguments)
        if name == "bitcast":
            return Application(name, tuple(map(_default_type, operands)), kind)
        if name in _SCALARS:
            if isinstance(operands[0], Literal) and operands[0].type in {"int", "float", name}:
                return to_concrete(operands[0], name)
            return Application(name, tuple(map(_default_type, operands)), name)
        if name.startswith("vec"):
            kind = _parse_type(name)
            return Application(
                kind, tuple(to_concrete(x, element_of(kind)) for x in operands), kind
            )
        if name in self.parameters:
            pairs = zip(operands, self.parameters[name], strict=True)
            return Application(name, tuple(to_concrete(x, k) for x, k in pairs), self.results[name])
        if name in self.results:
            return Application(name, tuple(map(_default_type, operands)), self.results[name])
        return _built_in(name, operands)


def _identity(sign: str, left: Expression, right: Expression, kind: str) -> Expression | None:
    """Return the operand, or its negation, that an operation with a constant equals; None if it
    equals neither.

    Some compilers drop such an operation, which then does not flush subnormals; dropping it here
    makes all devices agree.
    """
    if kind not in FLOATS and kind != "float":
        return None
    for operand, constant in ((left, right), (right, left)):
        if operand.type != kind or not isinstance(constant, Literal):
            continue
        key = sign, str(float(constant.value)), constant is right
        if key in _IDENTITY_OPERANDS:
            return operand
        if key in _NEGATING_OPERANDS:
            return Unary("-", operand, kind)
    return None


_IDENTITY_OPERANDS: Final = frozenset({
    ("*", "1.0", True), ("*", "1.0", False), ("/", "1.0", True), ("-", "0.0", True),
    ("+", "-0.0", True), ("+", "-0.0", False),
})  # fmt: skip
_NEGATING_OPERANDS: Final = frozenset({
    ("*", "-1.0", True), ("*", "-1.0", False), ("/", "-1.0", True), ("-", "-0.0", False),
})  # fmt: skip
"""(operator, constant, whether the constant is on the right)."""


def _built_in(name: str, operands: tuple[Expression, ...]) -> Expression:
    if name == "select":
        no, yes = map(_default_type, unify_types(operands[:2]))
        return Application(name, (no, yes, operands[2]), no.type)
    if name in _LIKE_ALL:
        operands = tuple(map(_default_type, unify_types(operands)))
        return Application(name, operands, max((x.type for x in operands), key=size_of))
    if name in _LIKE_FIRST:
        first_type = _default_type(operands[0])
        return Application(
            name, (first_type, *(to_concrete(x, "u32") for x in operands[1:])), first_type.type
        )
    kinds = {
        "dot": "f32", "any": "bool", "all": "bool", "arrayLength": "u32",
        "unpack2x16float": "vec2f", "unpack4xI8": "vec4i",
    }  # fmt: skip
    if name not in kinds:
        raise UnsupportedKernel(f"a kernel calls {name!r}")
    return Application(name, operands, kinds[name])


def _parse_type(name: str) -> str:
    vector = re.fullmatch(r"vec([234])<(\w+)>", name)
    if vector:
        return vector_of(vector.group(2), int(vector.group(1)))
    if name in _SCALARS or re.fullmatch(r"vec[234][fuib]", name):
        return name
    raise UnsupportedKernel(f"a kernel has the type {name!r}")


def _number(text: str) -> Literal:
    if text.startswith("0x") and "p" in text:
        return Literal(float.fromhex(text.removesuffix("f")), "f32" if text[-1] == "f" else "float")
    if text.startswith("0x"):
        kind = {"u": "u32", "i": "i32"}.get(text[-1], "int")
        return Literal(int(text.rstrip("ui"), 16), kind)
    if text[-1] == "f":
        return Literal(float(text[:-1]), "f32")
    if "." in text or "e" in text:
        return Literal(float(text), "float")
    return Literal(int(text.rstrip("ui")), {"u": "u32", "i": "i32"}.get(text[-1], "int"))


def _convert_returned_literals(body: tuple[Statement, ...], kind: str) -> tuple[Statement, ...]:
    """Convert returned literals to the function's result type."""
    statements: list[Statement] = []
    for statement in body:
        match statement:
            case Return(value) if value is not None:
                statements.append(Return(to_concrete(value, kind)))
            case If(condition, then, otherwise):
                statements.append(
                    If(
                        condition,
                        _convert_returned_literals(then, kind),
                        _convert_returned_literals(otherwise, kind),
                    )
                )
            case For():
                statements.append(
                    replace(statement, body=_convert_returned_literals(statement.body, kind))
                )
            case Scope(inner):
                statements.append(Scope(_convert_returned_literals(inner, kind)))
            case _:
                statements.append(statement)
    return tuple(statements)
