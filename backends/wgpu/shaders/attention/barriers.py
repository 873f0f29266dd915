"""Puts barriers where workgroup memory needs them, and nowhere else.

A kernel is given as steps, each with the arrays that it reads and writes. A barrier stands before a
step that touches what was written since the last one, or writes what was read. In a loop that holds
from round to round, and what a choice leaves out may be so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable


class Steps:
    """WGSL in the making.

    Attributes:
        lines: So far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._read: set[str] = set()
        self._written: set[str] = set()

    def add(
        self, lines: Iterable[str], reads: Collection[str] = (), writes: Collection[str] = ()
    ) -> None:
        """A step; within it no invocation touches what another writes."""
        if self._written & {*reads, *writes} or self._read & {*writes}:
            self.lines.append("workgroupBarrier();")
            self._read, self._written = set(), set()
        self.lines += lines
        self._read |= {*reads}
        self._written |= {*writes}

    def loop(self, head: str, body: Callable[[Steps], None]) -> None:
        """A loop, whose head opens a block."""
        while True:
            after = Steps()
            after._read, after._written = {*self._read}, {*self._written}
            body(after)
            if after._read <= self._read and after._written <= self._written:
                break
            self._read |= after._read
            self._written |= after._written
        self._block(head, body)

    def choice(self, head: str, body: Callable[[Steps], None]) -> None:
        """What all invocations do, or none."""
        self._block(head, body)

    def _block(self, head: str, body: Callable[[Steps], None]) -> None:
        read, written = {*self._read}, {*self._written}
        self.lines.append(head)
        body(self)
        self.lines.append("}")
        self._read |= read
        self._written |= written
