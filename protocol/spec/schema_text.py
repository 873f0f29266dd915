"""The keys of a run spec for a person: default, bounds and meaning, a line each."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from protocol.base.errors import UsageError
from protocol.spec.run_spec import RunSpec
from protocol.spec.run_spec_text import section_of

_SHOWN: Final = 5
"""Keys like the one that was asked for."""


def schema_lines(like: str = "") -> list[str]:
    """All keys in the order of the sections, or those that are meant by `like`.

    Raises:
        UsageError: None is; it names those most like it.
    """
    rows = list(_rows(RunSpec, ""))
    if like:
        rows = _meant(rows, like)
    wide, default = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"{key:{wide}}  {value:{default}}  {text}".rstrip() for key, value, text in rows]


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        section = section_of(model, name)
        if section is None:
            yield prefix + name, _default(field), _meaning(field)
            continue
        first = (section.__doc__ or "").strip().partition("\n")[0]
        yield prefix + name, "-" if field.default is None else "", first
        yield from _rows(section, f"{prefix}{name}.")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "-" if field.default is None else json.dumps(field.default)


def _meaning(field: FieldInfo) -> str:
    bounds = [_bound(each) for each in field.metadata]
    choices = [str(each) for each in getattr(field.annotation, "__args__", ()) if _is_word(each)]
    parts = [" | ".join(choices), " ".join(filter(None, bounds)), field.description or ""]
    return "; ".join(filter(None, parts))


def _is_word(value: object) -> bool:
    return isinstance(value, str)


def _bound(constraint: Any) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    for name, sign in signs.items():
        if (value := getattr(constraint, name, None)) is not None:
            return f"{sign} {value:g}"
    return ""


def _meant(rows: list[tuple[str, str, str]], like: str) -> list[tuple[str, str, str]]:
    """Those that hold the word, else those of its initials or with it in their meaning."""
    holding = [row for row in rows if like.lower() in row[0].lower()]
    if holding:
        return holding
    initials = "".join(word[:1] for word in like.split("_"))
    words = like.replace("_", " ")
    found = [row for row in rows if _last(row) == initials or words in row[2]]
    if found:
        return found
    near = sorted(rows, key=lambda row: _closeness(like, row), reverse=True)[:_SHOWN]
    raise UsageError(
        f"no key of a run spec is called {like!r}; most like it: "
        f"{', '.join(row[0] for row in near)}; `coordinator schema --text` shows all"
    )


def _last(row: tuple[str, str, str]) -> str:
    return row[0].rpartition(".")[2]


def _closeness(like: str, row: tuple[str, str, str]) -> float:
    return difflib.SequenceMatcher(None, like, _last(row)).ratio()
