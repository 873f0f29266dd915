"""Read a run spec's YAML, apply `--set` overrides, and rename keys of earlier releases."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from protocol.base import limits
from protocol.base.errors import RunSpecError

RENAMED_KEYS: Final = {"exchange.way": "exchange.topology"}
"""Keys of earlier releases and their current names."""

_EXPONENT: Final = "tag:yaml.org,2002:float#exponent"
_MAX_EXACT_FLOAT: Final = 2**53
"""Largest magnitude below which every whole number is a distinct float."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, octal and base 60, and reads 1e-3 as a number."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """See `yaml.SafeLoader`; refuses nesting deeper than any run spec's."""
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
        deep: bool = False,  # noqa: FBT001, FBT002 -- the base class's signature
    ) -> dict[Any, Any]:
        """See `yaml.SafeLoader`; refuses duplicate keys."""
        keys: set[str] = set()
        for key, _ in node.value:
            text = key.value if isinstance(key, yaml.ScalarNode) else None
            if text in keys:
                raise _error_at(key, f"the key {text!r} occurs twice: keep one of them")
            if text is not None:
                keys.add(text)
        return super().construct_mapping(node, deep)

    def construct_plain_number(self, node: yaml.ScalarNode) -> float:
        """Read a number; refuse 010 and 1:30, which YAML 1.1 reads as 8 and 90."""
        text = str(node.value)
        if ":" in text or re.fullmatch(r"[-+]?0[0-7_]+", text):
            raise _error_at(node, f"expected a number, or text in quotes, got {text}")
        if node.tag == _EXPONENT:
            number = float(text)
            is_exact = number.is_integer() and abs(number) <= _MAX_EXACT_FLOAT
            return int(number) if is_exact else number
        if node.tag.endswith("int"):
            return int(self.construct_yaml_int(node))
        return float(self.construct_yaml_float(node))


def _error_at(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


# YAML 1.1 reads 1e-3 as text, since it has no dot.
_Loader.add_implicit_resolver(
    _EXPONENT, re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), [*"-+.0123456789"]
)
for _tag in (_EXPONENT, "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _Loader.add_constructor(_tag, _Loader.construct_plain_number)


def read_yaml(text: str) -> Any:
    """Parse a YAML document.

    Raises:
        yaml.YAMLError: The text is not YAML, has a duplicate key, or is too large (with its aliases
            expanded) or too deeply nested for a run spec.
        ValueError: The document contains an invalid number or date.
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
    """Bound the size of the document with its aliases expanded: 600 bytes can be a billion values.

    Raises:
        yaml.YAMLError: The document has more than `limits.DOCUMENT_VALUES` values, or contains
            itself.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = limits.DOCUMENT_VALUES + 1  # in case the node contains itself
            values = node.value
            if isinstance(node, yaml.MappingNode):
                values = [child for pair in values for child in pair]
            sizes[id(node)] = 1 + sum(map(size, values))
        if sizes[id(node)] > limits.DOCUMENT_VALUES:
            limit = limits.DOCUMENT_VALUES
            raise _error_at(
                node, f"expected at most {limit} values with aliases expanded, got more"
            )
        return sizes[id(node)]

    size(root)


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one key of a document from `key=value`, with dots between nested keys and a YAML value.

    Raises:
        RunSpecError: The override is not a `key=value` pair, or a parent key has a plain value.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RunSpecError(f"expected --set KEY=VALUE, got {override!r}")
    *parents, last = key.split(".")
    section = document
    for parent in parents:
        inner = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise RunSpecError(
                f"--set {override!r}: {parent!r} has a value and is not a section; set that key "
                "itself"
            )
        section = inner
    try:
        section[last] = read_yaml(text)
    except yaml.constructor.ConstructorError as error:
        raise RunSpecError(f"--set {override!r}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RunSpecError(
            f"--set {override!r}: expected a YAML value after the =; is a quote or bracket left "
            "open?"
        ) from None


def rename_override(override: str) -> str:
    """Return the `key=value` pair with the key's current name."""
    key, equals, value = override.partition("=")
    return RENAMED_KEYS.get(key, key) + equals + value


def rename_keys(document: dict[str, Any]) -> list[str]:
    """Rename keys of earlier releases in place, and return their old names.

    If a document has both names, neither is changed: the old name is then an unknown key.
    """
    old_names = []
    for old, new in RENAMED_KEYS.items():
        *parents, last = old.split(".")
        section: Any = document
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        new_name = new.rpartition(".")[2]
        if isinstance(section, dict) and last in section and new_name not in section:
            section[new_name] = section.pop(last)
            old_names.append(old)
    return old_names


def yaml_fault(error: yaml.YAMLError | ValueError | RecursionError) -> str:
    """Describe a YAML error: its position, and what to do about the most common mistake."""
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    if mark is None:
        return problem
    if "\\t" in problem:
        problem = "expected spaces, got a tab; replace it"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
