"""The coordinator's structured log: on standard error, or in systemd's journal."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO, cast

import structlog

from protocol.cli.systemd import Priority, SystemJournal

_COMMON: Final = frozenset({"event", "level", "timestamp"})


class _JournalRenderer:
    """Writes warnings and errors to systemd's journal, with their fields, and prints nothing."""

    def __init__(self, journal: SystemJournal) -> None:
        self._journal = journal

    def __call__(self, logger: object, level: str, fields: MutableMapping[str, Any]) -> str:
        del logger
        event = fields["event"]
        rest = ", ".join(f"{name} {fields[name]}" for name in fields if name not in _COMMON)
        priority = Priority.WARNING if level == "warning" else Priority.ERROR
        self._journal.write(f"{event}: {rest}", fields, priority)
        raise structlog.DropEvent


class _StandardError:
    """The current standard error: if it is closed, lines are lost, and the run continues."""

    def write(self, text: str) -> None:
        """Write, and ignore failures."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush, and ignore failures."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def _is_terminal() -> bool:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # missing or closed
        return sys.stderr.isatty()
    return False


def set_up_logging(journal: SystemJournal | None, *, as_json: bool) -> None:
    """Log to systemd's journal or to standard error.

    Args:
        journal: The journal if standard error is connected to it; not used with `as_json`.
        as_json: Whether to log everything as JSON lines on standard error (--log-json). Otherwise
            only warnings and errors are logged: the console shows the rest.
    """
    level = logging.INFO if as_json else logging.WARNING
    renderer: Any = structlog.dev.ConsoleRenderer(colors=_is_terminal())
    if as_json:
        renderer = structlog.processors.JSONRenderer()
    elif journal is not None:
        renderer = _JournalRenderer(journal)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())),
    )
