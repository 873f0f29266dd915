"""Kernels that do not wait for each other, as one dispatch.

On a card a barrier stands between a dispatch and the next that needs its results, and small ones
leave most of the card idle: queries', keys' and values' products run side by side, so do the
gradients of a product's two operands. Nothing is computed otherwise: the bits stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from backends.wgpu.lowering.kernels import Kernel
from backends.wgpu.shaders.side_by_side import alike, buffer_type, side_by_side


def together(kernels: Sequence[Kernel], bindings: int) -> list[Kernel]:
    """The same kernels in fewer dispatches, none before what it reads.

    Args:
        kernels: In an order in which they may run.
        bindings: Storage buffers that a shader may bind.
    """
    groups: list[_Group] = []
    written: dict[fx.Node, int] = {}
    for kernel in kernels:
        touched = (written[node] for node in (*kernel.reads, *kernel.writes) if node in written)
        first = 1 + max(touched, default=-1)
        place = next(
            (i for i in range(first, len(groups)) if groups[i].takes(kernel, bindings)), len(groups)
        )
        if place == len(groups):
            groups.append(_Group())
        groups[place].add(kernel)
        written |= dict.fromkeys(kernel.writes, place)
    return [group.kernel() for group in groups]


@dataclass(slots=True)
class _Group:
    """Kernels of one dispatch.

    Attributes:
        members: In their order.
        bound: Numbers of bindings, by value and as what it is read; those written come last.
    """

    members: list[Kernel] = field(default_factory=list)
    bound: dict[tuple[fx.Node, str], int] = field(default_factory=dict)

    def takes(self, kernel: Kernel, bindings: int) -> bool:
        """Whether there is room for one more."""
        more = sum(key not in self.bound for key in _reads(kernel))
        held = len(self.bound) + sum(len(each.writes) for each in (*self.members, kernel))
        return held + more <= bindings and all(
            alike(kernel.shader, each.shader) for each in self.members
        )

    def add(self, kernel: Kernel) -> None:
        """One more, after the others."""
        self.members.append(kernel)
        for key in _reads(kernel):
            self.bound.setdefault(key, len(self.bound))

    def kernel(self) -> Kernel:
        """All of them as one."""
        if len(self.members) == 1:
            return self.members[0]
        writes = tuple(node for each in self.members for node in each.writes)
        last = len(self.bound)
        numbers = []
        for each in self.members:
            mine = [self.bound[key] for key in _reads(each)]
            numbers.append([*mine, *range(last, last + len(each.writes))])
            last += len(each.writes)
        given = [(each.shader, each.grid) for each in self.members]
        shader, grid = side_by_side(given, numbers, len(writes))
        label = " | ".join(each.label for each in self.members)
        return Kernel(shader, tuple(node for node, _ in self.bound), writes, grid, label)


def _reads(kernel: Kernel) -> Iterable[tuple[fx.Node, str]]:
    return [(node, buffer_type(kernel.shader, i)) for i, node in enumerate(kernel.reads)]
