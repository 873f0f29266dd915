"""Describe the keys of a run spec in one line each: default, bounds, unit and meaning."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from protocol.base.errors import UsageError
from protocol.spec.run_spec import RUN_VARIANTS, RunSpec
from protocol.spec.sections.section import TaggedUnion, base_of, has_key, model_at

_SUGGESTIONS: Final = 5
"""Number of similar keys that an error suggests."""
_TYPE_NAMES: Final = {str: "text", int: "integer", float: "number", bool: "true or false"}
_KEYS_BY_UNIT: Final = {
    "steps": (
        "steps evaluate_every double_check_every model.loss_scale_every optimizer.warmup_steps "
        "optimizer.milestones checkpoint.every replicas.inner_steps replicas.boundary_every"
    ),
    "epochs": "epochs",
    "samples": "batch.samples batch.microbatch data.holdout_samples regress.samples "
    "scripted.samples",
    "tokens": "batch.tokens data.max_tokens data.generate_tokens tokenizer.vocab_size "
    "capture.drawn",
    "share": "data.holdout data.mask_share lora.dropout digits.holdout digits.dropout",
    "share of lr": "optimizer.min_lr_ratio optimizer.start_lr_ratio optimizer.rates",
    "share of all steps": "optimizer.rise_ratio optimizer.decay_ratio",
    "threads": "threads",
    "classes": "data.num_classes",
    "logits": "capture.top_k",
    "replicas": "replicas.count",
    "checkpoints": "checkpoint.keep_last",
    "evaluations": "stop.patience",
    "units": "digits.hidden",
    "blocks": "scripted.blocks",
    "bytes": "scripted.block_bytes",
}
UNITS: Final = {key: unit for unit, keys in _KEYS_BY_UNIT.items() for key in keys.split()}
"""The units that `Key.text` shows after bounds; other counts name theirs in their descriptions."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a run spec, described for users.

    Attributes:
        path: The key with its sections, joined by dots.
        is_section: Whether the key is a section with keys.
        choices: The valid values, or their bounds.
        type: The type of the value; empty for a section and if `choices` lists values.
        default: The default in YAML; `required`, `-` for none, or empty for a section that always
            exists.
        variants: The tasks, optimizers or formats that have the key; empty for all.
        description: The meaning of the key.
    """

    path: str
    is_section: bool
    choices: str
    type: str
    default: str
    variants: str
    description: str

    @property
    def unit(self) -> str:
        """The unit of a number; empty without one."""
        return UNITS.get(self.path, "")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def text(self) -> str:
        """Variants, choices, unit and description in one line."""
        choices = " ".join(filter(None, [self.choices, self.unit]))
        return "; ".join(filter(None, [self.variants, choices, self.description]))


def schema_lines(like: str = "") -> list[str]:
    """Return a line for each key, in the order of the sections; with `like`, only for similar keys.

    Raises:
        UsageError: No key matches; the error names the most similar ones.
    """
    keys = list(schema_keys())
    if like:
        keys = _matching_keys(keys, like)
    rows = [(key.path, key.default) for key in keys]
    path, default = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"{k.path:{path}}  {k.default:{default}}  {k.text}".rstrip() for k in keys]


def schema_keys() -> Iterator[Key]:
    """Yield all keys in the order of the sections."""
    return _keys_of(RunSpec, [])


def _keys_of(model: type[BaseModel], parents: list[str]) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = [*parents, name]
        section = model_at(model, name)
        tags = (
            " | ".join(RUN_VARIANTS.variants)
            if path == [RUN_VARIANTS.key]
            else _variants_with(path)
        )
        choices, type_name = ("", "") if section is not None else (_choices(field), _type(field))
        if "|" in tags:  # this key selects the variant
            choices, type_name, tags = tags, "", ""
        if section is None:
            default, meaning = _default(field), field.description or ""
        else:
            default = "-" if field.default is None else ""
            meaning = (base_of(section).__doc__ or "").strip().partition("\n")[0]
        yield Key(".".join(path), section is not None, choices, type_name, default, tags, meaning)
        if section is not None:
            yield from _keys_of(base_of(section), path)


def _variants_with(path: list[str]) -> str:
    """Describe the variants that have a key; list all variants if the key selects one of them.

    Empty if all variants that have the key's section have the key: the section's own line says
    which have the section. A user-defined task has every key.
    """
    section = model_at(RunSpec, path[0])
    unions = [(RUN_VARIANTS, path)]
    if isinstance(section, TaggedUnion) and len(path) > 1:
        if path[1:] == [section.key]:
            return " | ".join(section.variants)
        unions.append((section, path[1:]))
    for union, inner in reversed(unions):
        variants = union.variants.items()
        parents = inner[:-1]
        candidates = [tag for tag, variant in variants if not parents or has_key(variant, parents)]
        tags_with_key = [tag for tag in candidates if has_key(union.variants[tag], inner)]
        tags_without_key = [tag for tag in candidates if tag not in tags_with_key]
        if len(tags_without_key) == 1:
            return f"not for {tags_without_key[0]}"
        if tags_without_key:
            built_in = [tag for tag in tags_with_key if tag != TaggedUnion.OTHER]
            return f"for {', '.join(built_in) or TaggedUnion.OTHER}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "-" if field.default is None else json.dumps(field.default)


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, without None and annotations; of any other type, itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif annotation is not NoneType:
        yield annotation


def _literals(field: FieldInfo) -> list[str]:
    """Return the text values of a field whose type is a Literal or a union with Literals."""
    literals = [member for member in _members(field.annotation) if get_origin(member) is Literal]
    return [value for member in literals for value in get_args(member) if isinstance(value, str)]


def _choices(field: FieldInfo) -> str:
    """Return the literal values, then the union's other types; without literals, the bounds."""
    if not (literals := _literals(field)):
        return _range(field)
    type_names = [_type_name(member) for member in _members(field.annotation)]
    return " | ".join([*literals, *filter(None, dict.fromkeys(type_names))])


def _type(field: FieldInfo) -> str:
    return "" if _literals(field) else _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    """Name a type: `text`, `number`, `list of text`; empty if there is no simple name."""
    if get_origin(annotation) is Literal:
        return ""
    arguments = [argument for argument in get_args(annotation) if argument not in (NoneType, ...)]
    origin = get_origin(annotation) or annotation
    if origin in (tuple, list):
        return f"list of {_type_name(arguments[0])}" if arguments else "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        keys = get_args(arguments[0]) if get_origin(arguments[0]) is Literal else ()
        return f"mapping with the keys {', '.join(keys)}" if keys else "mapping"
    if arguments:
        return " or ".join(dict.fromkeys(filter(None, map(_type_name, arguments))))
    return _TYPE_NAMES.get(annotation, "")


def _range(field: FieldInfo) -> str:
    """Describe the bounds of a number: `1 to 256`, `0 or more, below 1`; empty without any."""
    bounds = {
        name: _number(value)
        for constraint in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if (value := getattr(constraint, name, None)) is not None
    }
    if "ge" in bounds and "le" in bounds:
        return f"{bounds['ge']} to {bounds['le']}"
    words = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    return ", ".join(words[name].format(bounds[name]) for name in words if name in bounds)


def _number(value: float) -> str:
    """Format a bound, to 6 digits unless it is whole: `1,000,000`, `2^63`, `1e-30`, `1e+30`."""
    if value >= 2**24 and value == int(value) and int(value).bit_count() == 1:
        return f"2^{int(value).bit_length() - 1}"
    is_whole = value == int(value) and (isinstance(value, int) or abs(value) < 1e15)
    return f"{int(value):,}" if is_whole else f"{value:g}"


def _matching_keys(keys: list[Key], like: str) -> list[Key]:
    """Return the keys whose path contains `like`; else those that match in another way.

    These are named by its initials, as `lr` by `learning_rate`, or have it in their text.

    Raises:
        UsageError: No key matches.
    """
    matches = [key for key in keys if like.lower() in key.path.lower()]
    if matches:
        return matches
    initials = "".join(word[:1] for word in like.split("_"))
    words = like.replace("_", " ")
    matches = [key for key in keys if key.name == initials or words in key.text]
    if matches:
        return matches
    similar = sorted(keys, key=lambda key: _similarity(like, key.name), reverse=True)[:_SUGGESTIONS]
    raise UsageError(
        f"expected a key of a run spec, got {like!r}; the most similar are "
        f"{', '.join(key.path for key in similar)}; see all with: coordinator schema --text"
    )


def _similarity(like: str, name: str) -> float:
    return difflib.SequenceMatcher(None, like, name).ratio()
