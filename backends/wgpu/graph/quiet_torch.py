"""Torch's log while something is traced: what fails there is told in one line, by our error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOGGER: Final = "torch._subclasses.fake_tensor"
"""Writes a stack of many lines for an operator that cannot be traced, and raises its error too."""


@contextmanager
def quiet_torch() -> Iterator[None]:
    """While it is entered, that logger says nothing."""
    logger = logging.getLogger(LOGGER)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_record: logging.LogRecord) -> bool:
    return False
