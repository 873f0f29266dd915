"""Describe validation errors of a run spec: the key, what was expected, what came, what to do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from protocol.spec.sections.section import KeyFault, Model, Tagged, flat, has_key, listed, model_at

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,53}$"

_MOST: Final = 5
"""Mistakes shown at once."""
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
    NAME_PATTERN: "expected 1 to 54 letters, digits or any of _.- after the first",
}


_ADVICE: Final = {
    "model": "set model.source=DIR",
    "data": "set data.train=FILE",
    "model.config": "this task cannot initialize a model from a config: set model.source",
    "model.adapter": "merge the adapter (worker merge), and set model.source to the result",
    "checkpoint.copies": "its checkpoints contain no logits: remove checkpoint.copies, and copy "
    "the directory 'logits' once the run has finished",
}
"""Advice on keys that a task needs or lacks, where removing the key is not enough."""


class _Location:
    """The location of an error in a document.

    Attributes:
        keys: The path of keys.
        model: The section or union there; None for a value or an unknown key.
        unions: Each union on the path, with the document's tag and the number of keys before it.
    """

    def __init__(self, model: Model, location: Iterable[Any]) -> None:
        self.keys: list[str] = []
        self.unions: list[tuple[Tagged, str, int]] = []
        self.model: Model | None = model
        for part in map(str, location):
            if isinstance(self.model, Tagged):
                self.unions.append((self.model, part, len(self.keys)))
                self.model = self.model.variants[part]
            elif "[" not in part:  # pydantic names the alternatives of a value this way
                self.keys.append(part)
                self.model = None if self.model is None else model_at(self.model, part)

    @property
    def path(self) -> str:
        return ".".join(self.keys)

    def within(self, key: str) -> str:
        """Return the full path of a key of this section."""
        return ".".join([*self.keys, key])


def explain(model: Model, error: ValidationError, overrides: Sequence[str] = ()) -> str:
    """Describe all mistakes in one line: the key, what was expected, what came, and what to do.

    Args:
        model: The section or union that was validated.
        error: Pydantic's error.
        overrides: `key=value` pairs of `--set`, which are named where they caused a mistake.
    """
    mistakes = error.errors()
    # Show a misspelled key before the key that is missing because of it.
    mistakes.sort(key=lambda one: one["type"] != "extra_forbidden")
    lines = [*dict.fromkeys(_line(model, one, overrides) for one in mistakes)]
    more = f"; and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return "; ".join(lines[:_MOST]) + more


def set_by(keys: Iterable[str], overrides: Sequence[str]) -> list[str]:
    """Return the `key=value` pairs that set one of the keys, a part of it, or its section."""
    wanted = [f"{key}." for key in keys]
    pairs = ((each, f"{each.partition('=')[0]}.") for each in overrides)
    return [
        each
        for each, put in pairs
        if any(put.startswith(key) or key.startswith(put) for key in wanted)
    ]


def _line(model: Model, one: Any, overrides: Sequence[str]) -> str:
    at = _Location(model, one["loc"])
    fault = (one.get("ctx") or {}).get("error")
    keys = [at.path] if at.keys else []
    if isinstance(fault, KeyFault):
        keys = [at.within(key) for key in fault.keys]
    text = str(fault) if isinstance(fault, KeyFault) else _text(model, at, one)
    if isinstance(fault, KeyFault) and not any(key in text for key in keys):
        text = f"{keys[0]}: {text}"
    said = set_by(keys, overrides)
    return f"{text} (from --set {said[-1]})" if said else text


def _text(model: Model, at: _Location, one: Any) -> str:
    match one["type"]:
        case "extra_forbidden":
            return _lacked(at) or f"unknown key {at.path!r}{_hint(model, at)}"
        case "missing" if at.path in _ADVICE:
            return f"the section {at.path!r} is missing; {_ADVICE[at.path]}"
        case "missing":
            return f"the key {at.path!r} is missing"
        case "union_tag_invalid" | "union_tag_not_found":
            return _unknown_tag(at, one["input"])
    text = expected_words(one)
    if not at.keys:
        return text
    if " got " in text:
        return f"{at.path}: {text}"
    got = f"got {json.dumps(one['input'], default=str)[:80]}"
    if text.endswith("?"):
        return f"{at.path}: {got}, {text}"
    return f"{at.path}: {text}, {got}"


def expected_words(one: Any) -> str:
    """Say what one of pydantic's errors expected."""
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


def _lacked(at: _Location) -> str:
    """Describe a key that only other variants have; empty if no variant has it."""
    for union, tag, start in reversed(at.unions):
        rest = at.keys[start:]
        others = [each for each, variant in union.variants.items() if has_key(variant, rest)]
        if not others:
            continue
        others = [each for each in others if each != Tagged.OTHER] or others
        name = tag if union.key == "name" else f"{union.key} {tag}"
        own = _own_keys(union, tag) if len(rest) == 1 else []
        expected = f"; expected one of {', '.join(own)}" if own else ""
        key = ".".join([*at.keys[:start], union.key])
        advice = _ADVICE.get(at.path) if len(rest) > 1 else ""
        remedy = advice or f"remove it, or set {key} to {listed(others)}"
        return f"{at.path}: {name} has no {'.'.join(rest)!r}{expected}; {remedy}"
    return ""


def _own_keys(union: Tagged, tag: str) -> list[str]:
    """Return the keys that distinguish a variant: those that at least two others lack."""
    variants = {*union.variants.values()}
    few = min(2, len(variants) - 1)
    keys = union.variants[tag].model_fields
    return [key for key in keys if sum(key in each.lacked for each in variants) >= few]


def _unknown_tag(at: _Location, given: Any) -> str:
    assert isinstance(at.model, Tagged)
    tagged, tags = at.model, [*at.model.variants]
    if not isinstance(given, dict):
        return f"{at.path}: expected a section of keys and values, got {json.dumps(given)[:80]}"
    place = at.within(tagged.key)
    if tagged.key not in given:
        # Without its tag, which may be misspelled, a variant's keys cannot be checked.
        fields = flat(tagged).model_fields
        unknown = [key for key in given if key not in fields]
        said = [f"unknown key {at.within(key)!r}{_alike(key, fields)}" for key in unknown]
        return "; ".join([*said[:_MOST], f"the key {place!r} is missing"])
    value = given[tagged.key]
    if isinstance(value, str) and (refusal := tagged.refusal(value)):
        return f"{place}: {refusal}"
    hint = _alike(str(value), tags)
    own = " of your own" if Tagged.OTHER in tags else ""
    return f"{place}: expected {listed(tags)}{own}, got {json.dumps(value)[:80]}{hint}"


def _alike(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, [*words], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _hint(model: Model, at: _Location) -> str:
    """Suggest the intended key: a similar one, or one with these initials, in any section."""
    *parents, key = at.keys
    root = at.unions[0][0].variants[at.unions[0][1]] if at.unions else flat(model)
    here = _keys_at(root, parents)
    everywhere = [(name, name) for name in root.model_fields]
    for section in root.model_fields:
        everywhere += [(f"{section}.{name}", name) for name in _keys_at(root, [section])]
    initials = "".join(word[:1] for word in key.split("_"))
    alike = difflib.get_close_matches(key, here, n=1)
    elsewhere = [full for full, name in everywhere if name == key]
    near = (
        (alike if parents or not elsewhere else []) + elsewhere
        or [name for name in here if name == initials]
        or [full for full, name in everywhere if name == initials]
    )
    # Someone who names a section usually means a key in it.
    keys = f"; there are {', '.join(here)}" if here else ""
    if near:
        meant = f"; did you mean {' or '.join(map(repr, near))}?"
        return keys + meant if parents and near == elsewhere else meant
    return keys


def _keys_at(model: type[BaseModel], parents: Iterable[str]) -> list[str]:
    for parent in parents:
        inner = model_at(model, parent)
        if inner is None:
            return []
        model = flat(inner)
    return list(model.model_fields)
