"""Insert workgroup barriers where steps of a kernel need them.

A kernel is a sequence of steps, each with the arrays that it reads and writes. A barrier precedes a
step that accesses an array written since the last barrier, or writes an array read since then. This
includes accesses of a loop's previous iteration and of a branch that may have been taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable


class Steps:
    """Builds a sequence of WGSL statements.

    Attributes:
        lines: The statements so far.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._reads: set[str] = set()
        self._writes: set[str] = set()

    def add(
        self, lines: Iterable[str], reads: Collection[str] = (), writes: Collection[str] = ()
    ) -> None:
        """Append a step, within which no invocation accesses what another writes."""
        if self._writes & {*reads, *writes} or self._reads & {*writes}:
            self.lines.append("workgroupBarrier();")
            self._reads, self._writes = set(), set()
        self.lines += lines
        self._reads |= {*reads}
        self._writes |= {*writes}

    def loop(self, head: str, body: Callable[[Steps], None]) -> None:
        """Append a loop; `head` opens its block."""
        # Find the accesses that may precede an iteration: those before the loop, and those of the
        # previous iteration, which depend on them.
        while True:
            iteration = Steps()
            iteration._reads, iteration._writes = {*self._reads}, {*self._writes}
            body(iteration)
            if iteration._reads <= self._reads and iteration._writes <= self._writes:
                break
            self._reads |= iteration._reads
            self._writes |= iteration._writes
        self._block(head, body)

    def branch(self, head: str, body: Callable[[Steps], None]) -> None:
        """Append a branch that is taken either by all invocations or by none."""
        self._block(head, body)

    def _block(self, head: str, body: Callable[[Steps], None]) -> None:
        reads, writes = {*self._reads}, {*self._writes}
        self.lines.append(head)
        body(self)
        self.lines.append("}")
        self._reads |= reads
        self._writes |= writes
