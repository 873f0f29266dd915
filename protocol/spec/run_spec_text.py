"""The run spec as text: YAML, overrides, and errors in a user's words."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, get_args

import yaml
from pydantic import BaseModel, ValidationError

from protocol.base import limits
from protocol.base.errors import RunSpecError

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,53}$"

_TOLD: Final = 5
"""More mistakes at once are no help."""
_BOUNDS: Final = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "of at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "of at most"),
}
_TYPES: Final = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "a valid list": "a list",
    "a valid tuple": "a list",
    "an object": "a section of keys and values",
    "a valid dictionary": "a section of keys and values",
}
_PATTERNS: Final = {
    NAME_PATTERN: "expected 1 to 54 letters, digits, or any of _.- behind the first",
}


_EXPONENT: Final = "tag:yaml.org,2002:float#exponent"
_WHOLE: Final = 2**53
"""Up to here a float with no fraction is one whole number and no other."""


class KeyFault(ValueError):
    """What is wrong between keys that are far from one another.

    Attributes:
        keys: Those that can be to blame.
    """

    def __init__(self, text: str, *keys: str) -> None:
        super().__init__(text)
        self.keys = keys


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: no key twice, 1e-3 a number, and no number of base 8 or 60."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """See `yaml.SafeLoader`; what is nested more deeply than a run spec can be is refused."""
        if self._depth > limits.DOCUMENT_LEVELS:
            problem = f"expected at most {limits.DOCUMENT_LEVELS} levels, got more"
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002 -- as the base class has it
    ) -> dict[Any, Any]:
        """See `yaml.SafeLoader`."""
        seen: set[str] = set()
        for key, _ in node.value:
            text = key.value if isinstance(key, yaml.ScalarNode) else None
            if text in seen:
                raise _fault(key, f"the key {text!r} comes twice: keep one of them")
            if text is not None:
                seen.add(text)
        return super().construct_mapping(node, deep)

    def construct_plain_number(self, node: yaml.ScalarNode) -> float:
        """A number; 010 and 1:30 are refused, of which YAML 1.1 makes 8 and 90."""
        text = str(node.value)
        if ":" in text or re.fullmatch(r"[-+]?0[0-7_]+", text):
            raise _fault(node, f"expected a number, or text in quotes, got {text}")
        if node.tag == _EXPONENT:
            number = float(text)
            return int(number) if number.is_integer() and abs(number) <= _WHOLE else number
        if node.tag.endswith("int"):
            return int(self.construct_yaml_int(node))
        return float(self.construct_yaml_float(node))


def _fault(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


# YAML 1.1 reads 1e-3 as text, since it has no dot.
_Loader.add_implicit_resolver(
    _EXPONENT, re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), [*"-+.0123456789"]
)
for _tag in (_EXPONENT, "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Loader.add_constructor(_tag, _Loader.construct_plain_number)


def read_yaml(text: str) -> Any:
    """The document that a text holds.

    Raises:
        yaml.YAMLError: It is none, a key comes twice in it, or it is larger than a run spec can be,
            with what its aliases stand for, or nested more deeply.
        ValueError: A number or date in it cannot be.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(root: yaml.Node) -> None:
    """Bound what a few aliases of aliases stand for: 600 bytes can be a billion values.

    Raises:
        yaml.YAMLError: It is larger than `limits.DOCUMENT_VALUES`, or holds itself.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = limits.DOCUMENT_VALUES + 1  # as long as it may hold itself
            values = node.value
            if isinstance(node, yaml.MappingNode):
                values = [each for pair in values for each in pair]
            sizes[id(node)] = 1 + sum(map(size, values))
        if sizes[id(node)] > limits.DOCUMENT_VALUES:
            most = limits.DOCUMENT_VALUES
            raise _fault(node, f"expected at most {most} values with those of aliases, got more")
        return sizes[id(node)]

    size(root)


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one key of a document from `key=value`, dots between nested keys, the value in YAML.

    Raises:
        RunSpecError: It is no such pair, or a key on the way holds a value.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RunSpecError(f"expected --set KEY=VALUE, got {override!r}")
    *parents, last = key.split(".")
    at = document
    for parent in parents:
        inner = at.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise RunSpecError(f"--set {override!r}: {parent!r} holds a value, not a section")
        at = inner
    try:
        at[last] = read_yaml(text)
    except yaml.constructor.ConstructorError as error:
        raise RunSpecError(f"--set {override!r}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RunSpecError(f"--set {override!r}: expected a YAML value") from None


def explain(model: type[BaseModel], error: ValidationError, overrides: Sequence[str] = ()) -> str:
    """What is wrong and where, in one line: every mistake, each key with what to write instead.

    Args:
        model: What was validated.
        error: What pydantic says.
        overrides: `key=value` pairs that were set; a mistake in one of them is told as such.
    """
    found = error.errors()
    # A misspelt key comes before the key that is missing for it.
    found.sort(key=lambda one: one["type"] != "extra_forbidden")
    return few([*dict.fromkeys(_explained(model, one, overrides) for one in found)])


def few(told: Sequence[str]) -> str:
    """The first few mistakes in one line, and how many more there are."""
    more = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return "; ".join(told[:_TOLD]) + more


def set_by(keys: Iterable[str], overrides: Sequence[str]) -> list[str]:
    """Those `key=value` pairs that set one of the keys, something in it, or what it is in."""
    wanted = [f"{key}." for key in keys]
    pairs = ((each, f"{each.partition('=')[0]}.") for each in overrides)
    return [
        each
        for each, put in pairs
        if any(put.startswith(key) or key.startswith(put) for key in wanted)
    ]


def _explained(model: type[BaseModel], one: Any, overrides: Sequence[str]) -> str:
    place = ".".join(str(part) for part in one["loc"])
    if one["type"] == "extra_forbidden":
        text = f"unknown key {place!r}{_hint(model, [str(part) for part in one['loc']])}"
    elif one["type"] == "missing":
        text = f"the key {place!r} is missing"
    else:
        text = expected_words(one)
        got = f"got {json.dumps(one['input'], default=str)[:80]}"
        if place and " got " in text:
            text = f"{place}: {text}"
        elif place:
            text = f"{place}: {got}, {text}" if text.endswith("?") else f"{place}: {text}, {got}"
    fault = (one.get("ctx") or {}).get("error")
    to_blame = fault.keys if isinstance(fault, KeyFault) else (place,) if place else ()
    said = set_by(to_blame, overrides)
    return f"{text} (from --set {said[-1]})" if said else text


def expected_words(one: Any) -> str:
    """What was expected, out of one of pydantic's errors."""
    limits = one.get("ctx") or {}
    if one["type"] in _BOUNDS:
        bound, words = _BOUNDS[one["type"]]
        return f"expected a number {words} {limits[bound]:g}"
    if one["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(limits["pattern"], "expected other characters")
    said = str(one["msg"]).removeprefix("Value error, ")
    message = said.removeprefix("Input should be ")
    if message != said:
        return f"expected {_TYPES.get(message, message)}"
    return message[0].lower() + message[1:]


def _hint(model: type[BaseModel], path: Sequence[str]) -> str:
    """The key that was meant: alike, or of these initials, here or in another section."""
    *parents, key = path
    here = _keys_of(model, parents)
    everywhere = [(name, name) for name in model.model_fields]
    for section in model.model_fields:
        everywhere += [(f"{section}.{name}", name) for name in _keys_of(model, [section])]
    initials = "".join(word[:1] for word in key.split("_"))
    alike = difflib.get_close_matches(key, here, n=1)
    elsewhere = [full for full, name in everywhere if name == key]
    near = (
        (alike if parents or not elsewhere else []) + elsewhere
        or [name for name in here if name == initials]
        or [full for full, name in everywhere if name == initials]
    )
    # Whoever names a section mostly means something in it.
    keys = f"; there are {', '.join(here)}" if here else ""
    if near:
        told = f"; did you mean {' or '.join(map(repr, near))}?"
        return keys + told if parents and near == elsewhere else told
    return keys


def _keys_of(model: type[BaseModel], parents: Iterable[str]) -> list[str]:
    for parent in parents:
        inner = section_of(model, parent)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def section_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The section that a key of this one holds; None if it holds a value, or there is no such."""
    field = model.model_fields.get(key)
    if field is None:
        return None
    candidates = (field.annotation, *get_args(field.annotation))
    inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return inner[0] if inner else None


def yaml_fault(error: yaml.YAMLError | ValueError | RecursionError) -> str:
    """Where a document is no YAML, and what to do about what happens most."""
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    if mark is None:
        return problem
    if "\\t" in problem:
        problem = "a tab where YAML wants spaces: replace it"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
