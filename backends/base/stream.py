"""The iterator that gives a microbatch's gradients: any thread may close it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Self, TypeVar

_Item = TypeVar("_Item")


class GradientStream(Generic[_Item]):
    """Block gradients in reverse order, then the loss.

    A generator cannot be closed while another thread waits inside it; this can, so that a halt or
    a cancelled microbatch need not wait for the rest of a forward pass. Once closed, it ends.
    """

    def __init__(self, items: Iterator[_Item], stop: Callable[[], None]) -> None:
        self._items = items
        self._stop = stop

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Item:
        return next(self._items)

    def close(self) -> None:
        """Abandon what is left of the microbatch; returns when the device works on it no more."""
        self._stop()

    def __del__(self) -> None:
        self._stop()
