"""Find the first difference in code between two Python sources, ignoring comments and layout."""

from __future__ import annotations

import ast
import io
from typing import Final

_MAX_CHARACTERS: Final = 80
"""Maximum length of a quoted line."""


def first_difference(before: str, now: str) -> str:
    """Describe the first difference in code, such as `line 3 was 'lr = 1', is 'lr = 2'`.

    Args:
        before: The earlier source.
        now: The current source.

    Returns:
        The description; empty if both have the same code. A line that exists in only one source is
        shown alone.
    """
    try:
        old, new = ast.parse(before), ast.parse(now)
    except (SyntaxError, ValueError):
        return "" if before == now else "its content differs"
    difference = _differing_nodes(old, new)
    if difference is None:
        return ""
    old_number, new_number = map(_line_of, difference)
    old_text, new_text = _line_text(before, old_number), _line_text(now, new_number)
    if not old_number:
        return f"line {new_number} is now {new_text!r}"
    if not new_number:
        return f"line {old_number} was {old_text!r}"
    return f"line {old_number} was {old_text!r}, is {new_text!r}"


def _differing_nodes(old: ast.AST, new: ast.AST) -> tuple[ast.AST | None, ast.AST | None] | None:
    """Return the first pair of differing nodes, as deep in the tree as nodes have line numbers.

    A node that exists in only one tree is paired with None. None if the trees are equal.
    """
    if _is_same(old, new):
        return None
    if type(old) is type(new):
        for name in old._fields:
            inner = _first_pair(_children(old, name), _children(new, name))
            if inner is not None and any(map(_line_of, inner)):
                return inner
    return old, new


def _first_pair(
    old: list[ast.AST], new: list[ast.AST]
) -> tuple[ast.AST | None, ast.AST | None] | None:
    """Return the first nodes that differ in two lists of nodes."""
    pairs = zip(old, new, strict=False)
    start = next((n for n, pair in enumerate(pairs) if not _is_same(*pair)), None)
    if start is None:
        start = min(len(old), len(new))
        if len(old) == len(new):
            return None
    surplus = len(new) - len(old)
    if surplus > 0 and _are_same(old[start:], new[start + surplus :]):
        return None, new[start]
    if surplus < 0 and _are_same(old[start - surplus :], new[start:]):
        return old[start], None
    return _differing_nodes(old[start], new[start])


def _children(node: ast.AST, name: str) -> list[ast.AST]:
    value = getattr(node, name, None)
    values = value if isinstance(value, list) else [value]
    return [child for child in values if isinstance(child, ast.AST)]


def _is_same(old: ast.AST, new: ast.AST) -> bool:
    return ast.dump(old) == ast.dump(new)


def _are_same(old: list[ast.AST], new: list[ast.AST]) -> bool:
    return len(old) == len(new) and all(map(_is_same, old, new))


def _line_of(node: ast.AST | None) -> int:
    """Return the number of a node's first line; 0 if it has none."""
    return getattr(node, "lineno", 0)


def _line_text(source: str, number: int) -> str:
    # Not `str.splitlines`: to Python's parser a form feed does not end a line.
    lines = io.StringIO(source, newline=None).read().split("\n")
    return lines[number - 1].strip()[:_MAX_CHARACTERS] if number else ""
