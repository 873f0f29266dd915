"""Base classes of the sections of a run spec: tagged unions, and keys that depend on other keys.

A tagged union, such as the optimizers, has a base class with all keys and a variant for each tag.
Documents contain variants, code reads the base class. A variant lacks the keys that have no effect
in it: a document cannot set them, and code reads their defaults.

    class OptimizerSpec(Section): name; lr; momentum; betas
    class Sgd(OptimizerSpec, lacks={"momentum", "betas"}): name: Literal["sgd"]
    AnyOptimizer = Annotated[Sgd | ..., TaggedUnion("name", default="adamw")]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

USER_DOCUMENT: Final = "written"
"""Validation context of a user's document: a key without effect is an error."""
RESTORED: Final = "restored"
"""Validation context of a document that was validated before its sources became local paths: only
types and bounds are checked."""


class KeyFault(ValueError):
    """A conflict between keys.

    Attributes:
        keys: The keys that may be at fault, relative to the section that is validated.
    """

    def __init__(self, text: str, *keys: str) -> None:
        super().__init__(text)
        self.keys = keys


@dataclass(frozen=True)
class Needs:
    """Field metadata: the key has an effect only if an earlier key of its section has some value.

    Attributes:
        key: The other key.
        values: Values of the other key that give this key an effect; empty: all except null, false
            and zero. (None,) stands for null.
        advice: Further advice to the user.
    """

    key: str
    values: tuple[str | None, ...] = ()
    advice: str = ""

    def is_met(self, value: Any) -> bool:
        """Return whether the key has an effect.

        Args:
            value: The value of the other key.
        """
        return value in self.values if self.values else bool(value)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """See pydantic; the validator is called only if the document has the key."""
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        has_no_effect = self.key in info.data and not self.is_met(info.data[self.key])
        if info.context != USER_DOCUMENT or value is None or not has_no_effect:
            return value
        if self.values == (None,):
            raise ValueError(f"has no effect with {self.key}, got both; remove one{self.advice}")
        words = [word for word in self.values if word is not None]
        condition = " ".join([self.key, *filter(None, [join_words(words)])])
        raise ValueError(
            f"has an effect only with {condition}, got {info.data[self.key]}; "
            f"remove it, or set {' to '.join([self.key, *words[:1]])}"
        )


@dataclass(frozen=True)
class OmittedByDefault:
    """Field metadata: the canonical document lacks the key while it has its default.

    So a run spec that does not set a new key has the same digest as in earlier releases.
    """


def join_words(words: Sequence[str]) -> str:
    """Join words: `a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


class Section(BaseModel):
    """A section of a run spec; `lacks` names the keys of its base that a variant does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, FieldInfo]] = {}
    """The keys of the base that this variant does not have, with the base's fields."""

    def __init_subclass__(cls, lacks: Iterable[str] = (), **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        base = cls.__mro__[1]
        assert issubclass(base, Section)
        fields = {key: base.model_fields[key] for key in lacks}
        cls.unsupported = {**base.unsupported, **fields}
        for key, field in fields.items():
            cls.__annotations__[key] = ClassVar[Any]  # keeps pydantic from making it a field
            setattr(cls, key, field.get_default())

    @model_serializer(mode="wrap")
    def _omit_idle_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit keys that have no effect, and defaults of keys that earlier releases lack."""
        document: dict[str, Any] = dump(self)
        for key, field in type(self).model_fields.items():
            for needs in field.metadata:
                if isinstance(needs, Needs) and not needs.is_met(getattr(self, needs.key)):
                    document.pop(key, None)
            if getattr(self, key) == field.default and OmittedByDefault() in field.metadata:
                document.pop(key, None)
        return document


class TaggedUnion:
    """Metadata of a union of sections: the value of one key, the tag, selects the variant.

    Attributes:
        key: The key.
        default: The tag of a document without the key.
        pattern: Further valid tags, all for the variant whose key is not a `Literal`.
        refusal: Returns why a tag is not supported; empty for an unknown tag.
        variants: The sections by tag.
    """

    OTHER: Final = "package.module:Class"

    def __init__(
        self,
        key: str,
        default: str | None = None,
        *,
        pattern: str = "",
        refusal: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.key, self.default, self.pattern, self.refusal = key, default, pattern, refusal
        self.__name__ = f"tag_{key}"  # pydantic-core names a discriminator in its errors
        self.variants: dict[str, type[Section]] = {}

    def __call__(self, document: Any) -> str | None:
        """Return the tag of a document or a section."""
        if isinstance(document, Mapping):
            value = document.get(self.key, self.default)
        else:
            value = getattr(document, self.key, None)
        if isinstance(value, str) and self.pattern and re.fullmatch(self.pattern, value):
            return self.OTHER
        return None if value is None else str(value)

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """See pydantic."""
        choices: dict[Any, CoreSchema] = {}
        for variant in get_args(union):
            value = variant.model_fields[self.key].annotation
            tags = get_args(value) if get_origin(value) is Literal else (self.OTHER,)
            self.variants |= dict.fromkeys(tags, variant)
            choices |= dict.fromkeys(tags, handler.generate_schema(variant))
        return core_schema.tagged_union_schema(choices, self)


Model = type[BaseModel] | TaggedUnion
"""A section, or a union of sections."""


def model_at(model: type[BaseModel], key: str) -> Model | None:
    """Return the section or union under a key; None for a plain value and for an unknown key."""
    field = model.model_fields.get(key)
    if field is None:
        return None
    types = [field.annotation, *get_args(field.annotation)]
    sections = [item for item in types if isinstance(item, type) and issubclass(item, BaseModel)]
    tags = [item for item in field.metadata if isinstance(item, TaggedUnion)]
    return tags[0] if tags else next(iter(sections), None)


def base_of(model: Model) -> type[BaseModel]:
    """Return the class that has every key: the section itself, or the base of a union."""
    return (
        next(iter(model.variants.values())).__mro__[1] if isinstance(model, TaggedUnion) else model
    )


def has_key(model: Model | None, path: Sequence[str]) -> bool:
    """Return whether a document can have the key at this path, in this section or any variant."""
    if isinstance(model, TaggedUnion):
        return any(has_key(variant, path) for variant in model.variants.values())
    if model is None or path[0] not in model.model_fields:
        return False
    return len(path) == 1 or has_key(model_at(model, path[0]), path[1:])


def drop_unsupported_keys(document: Any, model: Model | None, *, with_values: bool) -> Any:
    """Remove the keys that the document's variants do not support.

    Args:
        document: Plain dicts and lists.
        model: The section or union that the document will be validated as.
        with_values: Remove keys with values too: documents of earlier releases contain every
            default. Otherwise remove only nulls, and empty sections that the base creates by
            default.
    """
    if isinstance(model, TaggedUnion):
        model = model.variants.get(model(document) or "")
    if model is None or not isinstance(document, dict):
        return document
    unsupported = model.unsupported if issubclass(model, Section) else {}
    return {
        key: drop_unsupported_keys(value, model_at(model, key), with_values=with_values)
        for key, value in document.items()
        if key not in unsupported
        or not (
            with_values or value is None or (value == {} and unsupported[key].default is not None)
        )
    }
