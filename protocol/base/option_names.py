"""Spell options in messages as the user does: on the command line, or as arguments of `fit`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_ARGUMENTS: Final = {
    "--bind": "SAMESTEP_BIND",
    "--control": "control",
    "--control HOST:PORT": 'control="HOST:PORT"',
    "--expect-workers": "workers",
    "--out": "directory",
    "--out DIR": "directory=DIR",
    "--resume": "resume=True",
    "--set": "settings",
    "--set steps": "steps",
}
_for_script: list[bool] = [False]


def option(name: str) -> str:
    """Return the option as the user of this process writes it."""
    return _ARGUMENTS.get(name, name) if _for_script[0] else name


@contextmanager
def options_as_arguments() -> Iterator[None]:
    """Name options as arguments of `samestep.fit`, in all threads, until the block ends."""
    earlier_value, _for_script[0] = _for_script[0], True
    try:
        yield
    finally:
        _for_script[0] = earlier_value
