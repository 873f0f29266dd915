"""Describe validation errors of a run spec: key, what was expected, value, and what to do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from protocol.spec.sections.section import (
    KeyFault,
    Model,
    TaggedUnion,
    base_of,
    has_key,
    join_words,
    model_at,
)

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,53}$"

_SHOWN_MISTAKES: Final = 5
"""Maximum number of mistakes in one message."""
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
        unions: Each union on the path, with its tag in the document and the number of keys before
            it.
    """

    def __init__(self, model: Model, location: Iterable[Any]) -> None:
        self.keys: list[str] = []
        self.unions: list[tuple[TaggedUnion, str, int]] = []
        self.model: Model | None = model
        for part in map(str, location):
            if isinstance(self.model, TaggedUnion):
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
    """Describe all mistakes in one line: the key, what was expected, its value, and what to do.

    Args:
        model: The section or union that was validated.
        error: Pydantic's error.
        overrides: `key=value` pairs of `--set`, which are named where they caused a mistake.
    """
    mistakes = error.errors()
    # Show a misspelled key before the key that is missing because of it.
    mistakes.sort(key=lambda mistake: mistake["type"] != "extra_forbidden")
    lines = [*dict.fromkeys(_describe_mistake(model, mistake, overrides) for mistake in mistakes)]
    hidden_text = (
        f"; and {len(lines) - _SHOWN_MISTAKES} more" if len(lines) > _SHOWN_MISTAKES else ""
    )
    return "; ".join(lines[:_SHOWN_MISTAKES]) + hidden_text


def set_by(keys: Iterable[str], overrides: Sequence[str]) -> list[str]:
    """Return the `key=value` pairs that set one of the keys, a part of it, or its section."""
    prefixes = [f"{key}." for key in keys]
    pairs = ((override, f"{override.partition('=')[0]}.") for override in overrides)
    return [
        override
        for override, prefix in pairs
        if any(prefix.startswith(key) or key.startswith(prefix) for key in prefixes)
    ]


def _describe_mistake(model: Model, mistake: Any, overrides: Sequence[str]) -> str:
    location = _Location(model, mistake["loc"])
    fault = (mistake.get("ctx") or {}).get("error")
    keys = [location.path] if location.keys else []
    if isinstance(fault, KeyFault):
        keys = [location.within(key) for key in fault.keys]
    text = str(fault) if isinstance(fault, KeyFault) else _mistake_text(model, location, mistake)
    if isinstance(fault, KeyFault) and not any(key in text for key in keys):
        text = f"{keys[0]}: {text}"
    pairs = set_by(keys, overrides)
    return f"{text} (from --set {pairs[-1]})" if pairs else text


def _mistake_text(model: Model, location: _Location, mistake: Any) -> str:
    match mistake["type"]:
        case "extra_forbidden":
            return (
                _key_of_other_variant(location)
                or f"unknown key {location.path!r}{_suggest_key(model, location)}"
            )
        case "missing" if location.path in _ADVICE:
            return f"the section {location.path!r} is missing; {_ADVICE[location.path]}"
        case "missing":
            return f"the key {location.path!r} is missing"
        case "union_tag_invalid" | "union_tag_not_found":
            return _unknown_tag(location, mistake["input"])
    text = expected_words(mistake)
    if not location.keys:
        return text
    if " got " in text:
        return f"{location.path}: {text}"
    actual = f"got {json.dumps(mistake['input'], default=str)[:80]}"
    if text.endswith("?"):
        return f"{location.path}: {actual}, {text}"
    return f"{location.path}: {text}, {actual}"


def expected_words(mistake: Any) -> str:
    """Return the expectation that one of pydantic's errors reports, such as `expected a number`."""
    limits = mistake.get("ctx") or {}
    if mistake["type"] in _BOUNDS:
        bound, words = _BOUNDS[mistake["type"]]
        return f"expected a number {words} {limits[bound]:g}"
    if mistake["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(limits["pattern"], "expected other characters")
    text = str(mistake["msg"]).removeprefix("Value error, ")
    message = text.removeprefix("Input should be ")
    if message != text:
        return f"expected {_TYPES.get(message, message)}"
    return message[0].lower() + message[1:]


def _key_of_other_variant(location: _Location) -> str:
    """Describe a key that only other variants have; empty if no variant has it."""
    for union, tag, start in reversed(location.unions):
        rest = location.keys[start:]
        others = [
            other_tag for other_tag, variant in union.variants.items() if has_key(variant, rest)
        ]
        if not others:
            continue
        others = [other_tag for other_tag in others if other_tag != TaggedUnion.OTHER] or others
        name = tag if union.key == "name" else f"{union.key} {tag}"
        own_keys = _distinct_keys(union, tag) if len(rest) == 1 else []
        expected = f"; expected one of {', '.join(own_keys)}" if own_keys else ""
        key = ".".join([*location.keys[:start], union.key])
        advice = _ADVICE.get(location.path) if len(rest) > 1 else ""
        remedy = advice or f"remove it, or set {key} to {join_words(others)}"
        return f"{location.path}: {name} has no {'.'.join(rest)!r}{expected}; {remedy}"
    return ""


def _distinct_keys(union: TaggedUnion, tag: str) -> list[str]:
    """Return the keys that distinguish a variant: those that at least two others lack."""
    variants = {*union.variants.values()}
    few = min(2, len(variants) - 1)
    keys = union.variants[tag].model_fields
    return [key for key in keys if sum(key in variant.unsupported for variant in variants) >= few]


def _unknown_tag(location: _Location, document: Any) -> str:
    assert isinstance(location.model, TaggedUnion)
    tagged, tags = location.model, [*location.model.variants]
    if not isinstance(document, dict):
        actual = json.dumps(document)[:80]
        return f"{location.path}: expected a section of keys and values, got {actual}"
    tag_key = location.within(tagged.key)
    if tagged.key not in document:
        # The tag's key may be misspelled, and without it the variant is unknown.
        fields = base_of(tagged).model_fields
        unknown = [key for key in document if key not in fields]
        mistakes = [
            f"unknown key {location.within(key)!r}{_did_you_mean(key, fields)}" for key in unknown
        ]
        return "; ".join([*mistakes[:_SHOWN_MISTAKES], f"the key {tag_key!r} is missing"])
    value = document[tagged.key]
    if isinstance(value, str) and (refusal := tagged.refusal(value)):
        return f"{tag_key}: {refusal}"
    hint = _did_you_mean(str(value), tags)
    suffix = " of your own" if TaggedUnion.OTHER in tags else ""
    return f"{tag_key}: expected {join_words(tags)}{suffix}, got {json.dumps(value)[:80]}{hint}"


def _did_you_mean(word: str, words: Iterable[str]) -> str:
    words_by_lowercase = {candidate.lower(): candidate for candidate in words}
    suggestions = difflib.get_close_matches(word.lower(), [*words_by_lowercase], n=1)
    return f"; did you mean {words_by_lowercase[suggestions[0]]!r}?" if suggestions else ""


def _suggest_key(model: Model, location: _Location) -> str:
    """Suggest the intended key: a similar key, or a key with these initials, in any section."""
    *parents, key = location.keys
    root = (
        location.unions[0][0].variants[location.unions[0][1]] if location.unions else base_of(model)
    )
    in_this_section = _keys_at(root, parents)
    keys_by_path = [(name, name) for name in root.model_fields]
    for section in root.model_fields:
        keys_by_path += [(f"{section}.{name}", name) for name in _keys_at(root, [section])]
    initials = "".join(word[:1] for word in key.split("_"))
    similar = difflib.get_close_matches(key, in_this_section, n=1)
    in_other_sections = [path for path, name in keys_by_path if name == key]
    suggestions = (
        (similar if parents or not in_other_sections else []) + in_other_sections
        or [name for name in in_this_section if name == initials]
        or [path for path, name in keys_by_path if name == initials]
    )
    # A user who names the right section usually means one of its keys.
    keys = f"; there are {', '.join(in_this_section)}" if in_this_section else ""
    if suggestions:
        suggestion = f"; did you mean {' or '.join(map(repr, suggestions))}?"
        return keys + suggestion if parents and suggestions == in_other_sections else suggestion
    return keys


def _keys_at(model: type[BaseModel], parents: Iterable[str]) -> list[str]:
    for parent in parents:
        inner = model_at(model, parent)
        if inner is None:
            return []
        model = base_of(inner)
    return list(model.model_fields)
