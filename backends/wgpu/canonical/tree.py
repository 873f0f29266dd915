"""Reads the kernels of `backends.wgpu.shaders` and `lowering`: WGSL text as a typed tree.

Kernels are written in WGSL, more than a thousand lines of it, and a driver takes that text as is.
Canonical arithmetic reads the same text into this tree, its one intermediate representation, which
`wgsl_text` and `c_text` print.

Only what those kernels use of the language is known here; all else is refused by name. Types are
names: f32, u32, i32, u64, bool, vec4f (and 2, 3; u, i, b), and for literals without a suffix `int`
and `float`, which become what they meet.
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


class NotRead(SamestepError):
    """A kernel has what canonical arithmetic does not know."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A number: the value of a float, an integer or a truth value."""

    value: float | int | bool
    type: str


@dataclass(frozen=True, slots=True)
class Name:
    """A variable, a parameter, a buffer."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Unary:
    """`-x`, `!x`, `~x`, `&x`."""

    sign: str
    of: Expression
    type: str


@dataclass(frozen=True, slots=True)
class Binary:
    """Both operands have the same type, or one is a vector of the other's; not so of shifts."""

    sign: str
    left: Expression
    right: Expression
    type: str


@dataclass(frozen=True, slots=True)
class Application:
    """A function, a conversion or a constructor; `bitcast` is told by its result's type."""

    name: str
    arguments: tuple[Expression, ...]
    type: str


@dataclass(frozen=True, slots=True)
class Index:
    """An element of an array or a vector."""

    of: Expression
    at: Expression
    type: str


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a vector."""

    of: Expression
    name: str
    type: str


Expression = Literal | Name | Unary | Binary | Application | Index | Component


@dataclass(frozen=True, slots=True)
class Declare:
    """`let` or, if it may change, `var`."""

    name: str
    type: str
    value: Expression | None
    changes: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """`target = value`; compound ones are written out."""

    target: Expression
    value: Expression


@dataclass(frozen=True, slots=True)
class If:
    """A choice."""

    condition: Expression
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class For:
    """A loop; `while` has no first and no step."""

    first: Declare | None
    condition: Expression
    step: Assignment | None
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """The end of a function."""

    value: Expression | None


@dataclass(frozen=True, slots=True)
class Barrier:
    """All invocations of a workgroup have come here."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A scope."""

    body: tuple[Statement, ...]


Statement = Declare | Assignment | If | For | Return | Barrier | Scope


@dataclass(frozen=True, slots=True)
class Function:
    """A function besides `main`."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    type: str
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """A buffer, or workgroup memory.

    Attributes:
        element: Type of an element.
        elements: How many; 0 of a buffer.
        binding: Of a buffer; -1 of workgroup memory.
        writes: Whether it may be written.
    """

    name: str
    element: str
    elements: int
    binding: int
    writes: bool


@dataclass(frozen=True, slots=True)
class Module:
    """One kernel.

    Attributes:
        arrays: By name.
        functions: In the order of the text.
        inputs: Of `main`: name to built-in value.
        body: Of `main`.
        workgroup: Invocations of one workgroup, along x.
    """

    arrays: Mapping[str, Array]
    functions: tuple[Function, ...]
    inputs: Mapping[str, str]
    body: tuple[Statement, ...]
    workgroup: int


def read_module(source: str) -> Module:
    """A kernel's text as a tree.

    Raises:
        NotRead: It has what is not known here.
    """
    return _Reader(source).module()


def read_functions(source: str, known: Mapping[str, str]) -> tuple[Function, ...]:
    """Functions alone.

    Args:
        source: Their text.
        known: Types of the results of functions that they may call.
    """
    reader = _Reader(source)
    reader.results.update(known)
    reader.module(main=False)
    return tuple(reader.functions)


def element_of(kind: str) -> str:
    """Of a vector's type; a scalar's is itself."""
    return _ELEMENT[kind[4]] if kind.startswith("vec") else kind


def vector_of(element: str, size: int) -> str:
    """The type of a vector."""
    return f"vec{size}{_VECTOR[element]}"


def size_of(kind: str) -> int:
    """Components of a vector; 1 of a scalar."""
    return int(kind[3]) if kind.startswith("vec") else 1


def concrete(given: Expression, kind: str) -> Expression:
    """An expression of literals without a suffix, as of this type."""
    if given.type not in {"int", "float"} or (kind in {"int", "float"} and given.type == kind):
        return given
    target = kind if kind in {"int", "float"} else element_of(kind)
    match given:
        case Literal(value):
            is_float = target in {"f32", "float"}
            return Literal(float(value) if is_float else int(value), target)
        case Unary(sign, of):
            inner = concrete(of, target)
            if sign == "-" and isinstance(inner, Literal):
                return Literal(-inner.value, target)
            return Unary(sign, inner, target)
        case Binary(sign, left, right):
            return Binary(sign, concrete(left, target), concrete(right, target), target)
        case Application(name, arguments):
            return Application(name, tuple(concrete(x, target) for x in arguments), target)
    raise NotRead(f"expected a number, got {given}")


def _settled(given: Expression) -> Expression:
    """As of the type that a literal has by itself."""
    return concrete(given, {"int": "i32", "float": "f32"}.get(given.type, given.type))


def same_type(given: Sequence[Expression]) -> tuple[Expression, ...]:
    """Operands as of one type: that of the first that has one, the widest of vectors."""
    kinds = [x.type for x in given if x.type not in {"int", "float"}]
    kind = max(kinds, key=size_of) if kinds else "float"
    if not kinds and all(x.type == "int" for x in given):
        kind = "int"
    return tuple(concrete(x, kind) for x in given)


@dataclass(slots=True)
class _Reader:
    source: str
    tokens: list[tuple[str, str]] = field(default_factory=list)
    at: int = 0
    arrays: dict[str, Array] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, list[str]] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    scopes: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = 0
        while place < len(self.source):
            found = _TOKEN.match(self.source, place)
            if found is None:
                raise NotRead(f"a kernel has {self.source[place : place + 20]!r}")
            place = found.end()
            if found.lastgroup is not None:
                self.tokens.append((found.lastgroup, found.group()))
        self.tokens.append(("end", ""))

    @property
    def next(self) -> str:
        return self.tokens[self.at][1]

    def take(self, wanted: str = "") -> str:
        text = self.next
        if wanted and text != wanted:
            around = " ".join(t for _, t in self.tokens[max(0, self.at - 12) : self.at + 3])
            raise NotRead(f"a kernel has {text!r} where {wanted!r} was expected: {around}")
        self.at += 1
        return text

    def if_taken(self, wanted: str) -> bool:
        if self.next != wanted:
            return False
        self.at += 1
        return True

    # Declarations.

    def module(self, *, main: bool = True) -> Module:
        self._note_functions()
        inputs: dict[str, str] = {}
        body: tuple[Statement, ...] = ()
        workgroup = 1
        while self.tokens[self.at][0] != "end":
            attributes = self._attributes()
            if self.if_taken("var"):
                self._variable(int(attributes.get("binding", "-1")))
            elif self.if_taken("fn"):
                if "compute" in attributes:
                    workgroup = int(attributes["workgroup_size"])
                    inputs, body = self._main()
                else:
                    self.functions.append(self._function())
            else:
                raise NotRead(f"a kernel declares {self.next!r}")
        if main and not body:
            raise NotRead("a kernel has no entry point")
        return Module(self.arrays, tuple(self.functions), inputs, body, workgroup)

    def _note_functions(self) -> None:
        """Types of parameters and results: a function may be called before it is written."""
        for found in re.finditer(r"fn (\w+)\(([^{]*)\)\s*->\s*([\w<>]+)", self.source):
            kinds = re.findall(r":\s*([\w<>]+)", found.group(2))
            self.results[found.group(1)] = _kind(found.group(3))
            self.parameters[found.group(1)] = [_kind(kind) for kind in kinds]

    def _attributes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        while self.if_taken("@"):
            name, value = self.take(), ""
            if self.if_taken("("):
                value = self.take()
                while self.if_taken(","):
                    if self.take() != "1":
                        raise NotRead("a kernel has workgroups of several dimensions")
                self.take(")")
            found[name] = value.rstrip("u")
        return found

    def _variable(self, binding: int) -> None:
        self.take("<")
        kind = self.take()
        writes = self.if_taken(",") and self.take() == "read_write"
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
        elements = int(self.take().rstrip("u")) if self.if_taken(",") else 0
        self.take(">")
        return element, elements

    def type(self) -> str:
        name = self.take()
        if self.if_taken("<"):
            name += f"<{self.take()}>"
            self.take(">")
        return _kind(name)

    def _main(self) -> tuple[dict[str, str], tuple[Statement, ...]]:
        self.take("main")
        self.take("(")
        inputs, scope = {}, {}
        while not self.if_taken(")"):
            built_in = self._attributes()["builtin"]
            name = self.take()
            self.take(":")
            scope[name] = self.type()
            inputs[name] = built_in
            self.if_taken(",")
        self.scopes = [scope]
        return inputs, self._block()

    def _function(self) -> Function:
        name = self.take()
        self.take("(")
        parameters = []
        while not self.if_taken(")"):
            parameter = self.take()
            self.take(":")
            parameters.append((parameter, self.type()))
            self.if_taken(",")
        self.take("->")
        kind = self.type()
        self.scopes = [dict(parameters)]
        return Function(name, tuple(parameters), kind, _returning(self._block(), kind))

    # Statements.

    def _block(self) -> tuple[Statement, ...]:
        self.take("{")
        self.scopes.append({})
        body: list[Statement] = []
        while not self.if_taken("}"):
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
                if self.if_taken(";"):
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
        if self.if_taken("else"):
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
            raise NotRead("a kernel has a loop without a variable of its own")
        return For(first, condition, step, body)

    def _simple(self) -> Declare | Assignment:
        if self.next in {"let", "var"}:
            changes = self.take() == "var"
            name = self.take()
            kind = self.type() if self.if_taken(":") else ""
            value = self.expression() if self.if_taken("=") else None
            if value is not None:
                value = concrete(value, kind) if kind else _settled(value)
                kind = value.type
            self.scopes[-1][name] = kind
            return Declare(name, kind, value, changes)
        target = self._postfix()
        sign = self.take()
        if sign in {"++", "--"}:
            one = concrete(Literal(1, "int"), target.type)
            return Assignment(target, Binary(sign[0], target, one, target.type))
        value = self.expression()
        if sign == "=":
            return Assignment(target, concrete(value, target.type))
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
            return Binary(sign, left, concrete(right, "u32"), left.type)
        left, right = same_type((left, right))
        kind = max((left.type, right.type), key=size_of)
        if sign in COMPARISONS:
            left, right = _settled(left), _settled(right)
            size = size_of(kind)
            return Binary(sign, left, right, "bool" if size == 1 else vector_of("bool", size))
        return _without_effect(sign, left, right, kind) or Binary(sign, left, right, kind)

    def _unary(self) -> Expression:
        if self.next in {"-", "!", "~", "&"}:
            sign = self.take()
            of = self._unary()
            if sign == "-" and isinstance(of, Literal):
                return replace(of, value=-of.value)
            return Unary(sign, of, of.type)
        return self._postfix()

    def _postfix(self) -> Expression:
        found = self._primary()
        while True:
            if self.if_taken("["):
                at = _settled(self.expression())
                self.take("]")
                array = isinstance(found, Name) and found.name in self.arrays
                found = Index(found, at, found.type if array else element_of(found.type))
            elif self.if_taken("."):
                name = self.take()
                if len(name) != 1:
                    raise NotRead(f"a kernel has the components {name!r}")
                found = Component(found, name, element_of(found.type))
            else:
                return found

    def _primary(self) -> Expression:
        group, text = self.tokens[self.at]
        if group == "number":
            self.take()
            return _number(text)
        if self.if_taken("("):
            inner = self.expression()
            self.take(")")
            return inner
        if text in {"true", "false"}:
            self.take()
            return Literal(text == "true", "bool")
        if group != "name":
            raise NotRead(f"a kernel has {text!r} where a value was expected")
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
        raise NotRead(f"a kernel has the unknown name {text!r}")

    def _call(self, name: str, kind: str) -> Expression:
        self.take("(")
        arguments: list[Expression] = []
        while not self.if_taken(")"):
            arguments.append(self.expression())
            self.if_taken(",")
        given = tuple(arguments)
        if name == "bitcast":
            return Application(name, tuple(map(_settled, given)), kind)
        if name in _SCALARS:
            if isinstance(given[0], Literal) and given[0].type in {"int", "float", name}:
                return concrete(given[0], name)
            return Application(name, tuple(map(_settled, given)), name)
        if name.startswith("vec"):
            kind = _kind(name)
            return Application(kind, tuple(concrete(x, element_of(kind)) for x in given), kind)
        if name in self.parameters:
            pairs = zip(given, self.parameters[name], strict=True)
            return Application(name, tuple(concrete(x, k) for x, k in pairs), self.results[name])
        if name in self.results:
            return Application(name, tuple(map(_settled, given)), self.results[name])
        return _built_in(name, given)


def _without_effect(sign: str, left: Expression, right: Expression, kind: str) -> Expression | None:
    """What remains of an operator that gives its other operand whatever that is, or that negated.

    Some compilers leave such a one away, and then no subnormal number is flushed: so none meets it.
    """
    if kind not in FLOATS and kind != "float":
        return None
    for other, given in ((left, right), (right, left)):
        if other.type != kind or not isinstance(given, Literal):
            continue
        ours = sign, str(float(given.value)), given is right
        if ours in _NOTHING:
            return other
        if ours in _NEGATION:
            return Unary("-", other, kind)
    return None


_NOTHING: Final = frozenset({
    ("*", "1.0", True), ("*", "1.0", False), ("/", "1.0", True), ("-", "0.0", True),
    ("+", "-0.0", True), ("+", "-0.0", False),
})  # fmt: skip
_NEGATION: Final = frozenset({
    ("*", "-1.0", True), ("*", "-1.0", False), ("/", "-1.0", True), ("-", "-0.0", False),
})  # fmt: skip
"""Operators with a number, and whether it is on the right."""


def _built_in(name: str, given: tuple[Expression, ...]) -> Expression:
    if name == "select":
        one, two = map(_settled, same_type(given[:2]))
        return Application(name, (one, two, given[2]), one.type)
    if name in _LIKE_ALL:
        given = tuple(map(_settled, same_type(given)))
        return Application(name, given, max((x.type for x in given), key=size_of))
    if name in _LIKE_FIRST:
        first = _settled(given[0])
        return Application(name, (first, *(concrete(x, "u32") for x in given[1:])), first.type)
    kinds = {
        "dot": "f32", "any": "bool", "all": "bool", "arrayLength": "u32",
        "unpack2x16float": "vec2f", "unpack4xI8": "vec4i",
    }  # fmt: skip
    if name not in kinds:
        raise NotRead(f"a kernel calls {name!r}")
    return Application(name, given, kinds[name])


def _kind(name: str) -> str:
    found = re.fullmatch(r"vec([234])<(\w+)>", name)
    if found:
        return vector_of(found.group(2), int(found.group(1)))
    if name in _SCALARS or re.fullmatch(r"vec[234][fuib]", name):
        return name
    raise NotRead(f"a kernel has the type {name!r}")


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


def _returning(body: tuple[Statement, ...], kind: str) -> tuple[Statement, ...]:
    """Literals that a function gives are of its type."""
    found: list[Statement] = []
    for statement in body:
        match statement:
            case Return(value) if value is not None:
                found.append(Return(concrete(value, kind)))
            case If(condition, then, otherwise):
                found.append(If(condition, _returning(then, kind), _returning(otherwise, kind)))
            case For():
                found.append(replace(statement, body=_returning(statement.body, kind)))
            case Scope(inner):
                found.append(Scope(_returning(inner, kind)))
            case _:
                found.append(statement)
    return tuple(found)
