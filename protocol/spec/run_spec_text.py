"""The run spec as text: overrides, numbers as YAML writes them, and errors in a user's words."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from protocol.base.errors import RunSpecError


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


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """What is wrong and where, in one line, with the nearest known key.

    Args:
        model: What was validated.
        error: What pydantic says.
    """
    # A misspelt key comes before the key that is missing for it.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *parents, key = (str(part) for part in first["loc"])
        near = difflib.get_close_matches(key, _keys_of(model, parents), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown key {place!r}{hint}"
    if first["type"] == "missing":
        return f"the key {place!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not place:
        return message
    return f"{place}: {message}, got {json.dumps(first['input'], default=str)[:80]}"


def _keys_of(model: type[BaseModel], parents: Iterable[str]) -> list[str]:
    for parent in parents:
        field = model.model_fields.get(parent)
        if field is None:
            return []
        candidates = (field.annotation, *get_args(field.annotation))
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)
