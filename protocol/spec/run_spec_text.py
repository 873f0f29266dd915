"""The run spec as text: overrides, numbers as YAML writes them, and errors in a user's words."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, get_args

import yaml
from pydantic import BaseModel, ValidationError

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
        at[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RunSpecError(f"--set {override!r}: expected a YAML value") from None


def with_exponents(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text, since it has no dot; read it as the number it is."""
    if isinstance(value, dict):
        return {key: with_exponents(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_exponents(inner) for inner in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        number = float(value)
        return int(number) if number.is_integer() else number
    return value


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
    told = dict.fromkeys(_explained(model, one, overrides) for one in found)
    more = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
    return "; ".join([*told][:_TOLD]) + more


def _explained(model: type[BaseModel], one: Any, overrides: Sequence[str]) -> str:
    place = ".".join(str(part) for part in one["loc"])
    if one["type"] == "extra_forbidden":
        text = f"unknown key {place!r}{_hint(model, [str(part) for part in one['loc']])}"
    elif one["type"] == "missing":
        text = f"the key {place!r} is missing"
    else:
        text = _in_words(one)
        if place:
            text = f"{place}: {text}, got {json.dumps(one['input'], default=str)[:80]}"
    said = [
        each for each in overrides if place and f"{each}=".startswith((f"{place}=", f"{place}."))
    ]
    return f"{text} (from --set {said[-1]})" if said else text


def _in_words(one: Any) -> str:
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
    near = (
        [full for full, name in everywhere if name == key]
        or difflib.get_close_matches(key, here, n=1)
        or [name for name in here if name == initials]
        or [full for full, name in everywhere if name == initials]
    )
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; there are {', '.join(here)}" if here else ""


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
