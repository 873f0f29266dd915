"""What a kernel computes besides its own value, while that is still in registers.

A matrix product goes on with the elementwise values that read it at their own places: bias,
activation, residual. A sum along rows goes on with whatever else is folded or computed along the
same rows: a norm is one kernel, forward and backward. Each value is computed as it would be alone,
so the bits stay; what is saved is a dispatch, the barrier before it and a trip to memory.

Nodes come in their order. A kernel that may still take more waits; it comes before the first that
reads what it writes and cannot join it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch import fx

from backends.wgpu.lowering.fusion import MATMULS, REDUCTIONS
from backends.wgpu.lowering.kernels import Emitter, Kernel
from backends.wgpu.shaders.kernel_text import ReadElsewhere


@dataclass(eq=False, slots=True)
class Waiting:
    """A kernel that is not written yet.

    Attributes:
        members: What it computes: first a product, or a sum along rows.
        reads: What it reads of what others compute.
    """

    members: list[fx.Node]
    reads: Collection[fx.Node]

    def kernel(self, emitter: Emitter, wanted: Collection[fx.Node]) -> list[Kernel]:
        """It, with what others read of its values."""
        if len(self.members) == 1:
            return emitter.kernels(self.members[0])
        return [emitter.joined(self.members, wanted)]


@dataclass(slots=True)
class Joins:
    """The kernels of one graph, most of which still wait.

    Attributes:
        emitter: Writes them.
        bindings: Storage buffers that a shader may bind.
        early: Values that must not wait for others: those of a layer's forward.
    """

    emitter: Emitter
    bindings: int
    early: Collection[fx.Node]
    waiting: list[Waiting] = field(default_factory=list)

    def before(self, read: Collection[fx.Node]) -> Iterator[Waiting]:
        """Those that must come now, for something reads these values."""
        for each in [*self.waiting]:
            if not {*each.members}.isdisjoint(read):
                self.waiting.remove(each)
                yield each

    def add(self, node: fx.Node) -> Iterator[Waiting | fx.Node]:
        """What comes now: kernels that waited, and the value itself if it is one of its own."""
        read = self.emitter.reads(node)
        joined = self._joined(node, read)
        if joined is not None:
            self.waiting.remove(joined)  # it is none of those that must come before
        yield from self.before(read)
        if joined is not None:
            joined.members.append(node)
            joined.reads = {*joined.reads, *read} - {*joined.members}
            self.waiting.append(joined)
        elif self.emitter.may_lead(node):
            self.waiting.append(Waiting([node], read))
        else:
            yield node

    def _joined(self, node: fx.Node, read: Collection[fx.Node]) -> Waiting | None:
        """The last of those that can take it, if there is one."""
        if node.target in MATMULS:
            return None
        for each in reversed(self.waiting):
            beside = node.target in REDUCTIONS and each.members[0].target in REDUCTIONS
            if {*each.members}.isdisjoint(read) and not beside:
                continue
            if (node in self.early) == (each.members[0] in self.early) and self._fits(each, node):
                return each
        return None

    def _fits(self, waiting: Waiting, node: fx.Node) -> bool:
        try:
            kernel = self.emitter.joined([*waiting.members, node], [*waiting.members, node])
        except ReadElsewhere:
            return False
        return kernel.shader.bindings <= self.bindings
