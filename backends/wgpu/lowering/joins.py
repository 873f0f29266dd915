"""What a kernel computes besides its own value, while that is still in registers.

A matrix product goes on with the elementwise values that read it at their own places: bias,
activation, residual. A sum along rows goes on with whatever else is folded or computed along the
same rows: a norm is one kernel, forward and backward. Each value is computed as it would be alone,
so the bits stay; what is saved is a dispatch, the barrier before it and a trip to memory.

Nodes come in their order. A kernel that may still take more waits; it comes before the first that
reads what it writes and cannot join it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from backends.wgpu.lowering.elementwise import ELEMENTWISE
from backends.wgpu.lowering.fusion import MATMULS, REDUCTIONS
from backends.wgpu.lowering.kernels import Emitter, Kernel
from backends.wgpu.shaders.kernel_text import ReadElsewhere

Waiting = list[fx.Node]
"""Of one kernel: first a product, or a fold along rows."""


def ordered(
    reads: Mapping[fx.Node, Collection[fx.Node]], early: Collection[fx.Node]
) -> Iterator[fx.Node]:
    """Values so that those that may join a kernel come before what ends its wait.

    Args:
        reads: Of each value what it reads, in an order in which they can be computed.
        early: Values that come first.
    """
    missing = {node: {each for each in read if each in reads} for node, read in reads.items()}
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, needed in missing.items():
        for each in needed:
            readers[each].append(node)
    places = {node: place for place, node in enumerate(reads)}

    def urgency(node: fx.Node) -> tuple[bool, bool, int]:
        return node not in early, node.target not in ELEMENTWISE, places[node]

    ready = [(*urgency(node), node) for node, needed in missing.items() if not needed]
    heapq.heapify(ready)
    while ready:
        *_, node = heapq.heappop(ready)
        yield node
        for reader in readers[node]:
            missing[reader].remove(node)
            if not missing[reader]:
                heapq.heappush(ready, (*urgency(reader), reader))


@dataclass(slots=True)
class Joins:
    """The kernels of one graph, some of which still wait.

    Attributes:
        emitter: Writes them.
        bindings: Storage buffers that a shader may bind; 0 where nothing is to be joined.
        reads: Of each value with a kernel, and of each call of a layer, the buffers that it reads.
        outputs: The outputs.
        early: Values that must not wait for others: those of a layer's forward.
    """

    emitter: Emitter
    bindings: int
    reads: Mapping[fx.Node, Collection[fx.Node]]
    outputs: Collection[fx.Node | None]
    early: Collection[fx.Node]
    _waiting: list[Waiting] = field(default_factory=list)
    _readers: dict[fx.Node, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        """Who reads each value."""
        for node, read in self.reads.items():
            for each in read:
                self._readers[each].add(node)

    def before(self, read: Collection[fx.Node]) -> Iterator[Kernel]:
        """What must come now, for something reads these values."""
        for members in [*self._waiting]:
            if not {*members}.isdisjoint(read):
                self._waiting.remove(members)
                yield from self._kernels(members)

    def add(self, node: fx.Node) -> Iterator[Kernel]:
        """What comes now: kernels that waited, and the value's own if it is one by itself."""
        read = self.reads[node]
        joined = self._joined(node)
        if joined is not None:
            self._waiting.remove(joined)  # it is none of those that must come before
        yield from self.before(read)
        if joined is not None:
            self._waiting.append([*joined, node])
        elif self.bindings and self._readers[node] and self.emitter.may_lead(node):
            self._waiting.append([node])
        else:
            yield from self.emitter.kernels(node)

    def rest(self) -> Iterator[Kernel]:
        """What still waits at the end."""
        for members in self._waiting:
            yield from self._kernels(members)

    def _kernels(self, members: Waiting) -> list[Kernel]:
        if len(members) == 1:
            return self.emitter.kernels(members[0])
        return [self.emitter.joined(members, self._wanted(members))]

    def _wanted(self, members: Waiting) -> list[fx.Node]:
        """Those that others read, too."""
        return [
            node for node in members if node in self.outputs or self._readers[node] - {*members}
        ]

    def _joined(self, node: fx.Node) -> Waiting | None:
        """The last of those that can take it, if there is one."""
        if node.target in MATMULS:
            return None
        for members in reversed(self._waiting):
            beside = node.target in REDUCTIONS and members[0].target in REDUCTIONS
            if {*members}.isdisjoint(self.reads[node]) and not beside:
                continue
            if (node in self.early) == (members[0] in self.early) and self._fits([*members, node]):
                return members
        return None

    def _fits(self, members: Waiting) -> bool:
        try:
            kernel = self.emitter.joined(members, self._wanted(members))
        except ReadElsewhere:
            return False
        return kernel.shader.bindings <= self.bindings
