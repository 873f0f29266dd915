"""Fuse more values into a kernel while the kernel's result is in registers.

A matrix product is fused with elementwise values that read it at the same index: bias, activation,
residual. A reduction along rows is fused with other reductions and values along the same rows, so
that a norm is one kernel in forward and one in backward. Each value is computed with the
operations of a separate kernel, so the bits do not change; fusion saves a dispatch, its barrier and
memory traffic.

Nodes arrive in order. A kernel that may still grow is pending; it is emitted before the first node
that reads its results and cannot be fused into it.
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
from backends.wgpu.shaders.kernel_text import NotFusable

PendingKernel = list[fx.Node]
"""Nodes of a pending kernel: first a product or a reduction along rows."""


def fusion_order(
    reads: Mapping[fx.Node, Collection[fx.Node]], early: Collection[fx.Node]
) -> Iterator[fx.Node]:
    """Order values so that elementwise values, which a pending kernel may absorb, come first.

    Args:
        reads: The values that each value reads, in a valid order of computation.
        early: Values that come before all others.
    """
    missing_reads = {
        node: {value for value in sources_read if value in reads}
        for node, sources_read in reads.items()
    }
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, sources in missing_reads.items():
        for value in sources:
            readers[value].append(node)
    positions = {node: position for position, node in enumerate(reads)}

    def urgency(node: fx.Node) -> tuple[bool, bool, int]:
        return node not in early, node.target not in ELEMENTWISE, positions[node]

    ready_nodes = [(*urgency(node), node) for node, sources in missing_reads.items() if not sources]
    heapq.heapify(ready_nodes)
    while ready_nodes:
        *_, node = heapq.heappop(ready_nodes)
        yield node
        for reader in readers[node]:
            missing_reads[reader].remove(node)
            if not missing_reads[reader]:
                heapq.heappush(ready_nodes, (*urgency(reader), reader))


@dataclass(slots=True)
class KernelFuser:
    """Kernels of one graph, some of which are pending.

    Attributes:
        emitter: Generates the kernels.
        bindings: Storage buffers that a shader may bind; 0 disables fusion.
        reads: The buffers that each value with a kernel, and each call of a layer, reads.
        outputs: The graph's outputs.
        early: Values that the first outputs need (a layer's results, embeddings), which are not
            fused with other values.
    """

    emitter: Emitter
    bindings: int
    reads: Mapping[fx.Node, Collection[fx.Node]]
    outputs: Collection[fx.Node | None]
    early: Collection[fx.Node]
    _pending_kernels: list[PendingKernel] = field(default_factory=list)
    _readers: dict[fx.Node, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        """Collect the readers of each value."""
        for node, values_read in self.reads.items():
            for value in values_read:
                self._readers[value].add(node)

    def flush_before(self, values_read: Collection[fx.Node]) -> Iterator[Kernel]:
        """Emit the pending kernels that write these values."""
        for members in [*self._pending_kernels]:
            if not {*members}.isdisjoint(values_read):
                self._pending_kernels.remove(members)
                yield from self._kernels(members)

    def add(self, node: fx.Node) -> Iterator[Kernel]:
        """Add a value; emit the pending kernels whose results it reads, and the value's own kernel
        if it can neither be fused nor wait for values to fuse."""
        values_read = self.reads[node]
        group = self._group_for(node)
        if group is not None:
            self._pending_kernels.remove(group)  # so that `flush_before` does not emit it
        yield from self.flush_before(values_read)
        if group is not None:
            self._pending_kernels.append([*group, node])
        elif self.bindings and self._readers[node] and self.emitter.can_be_fused_into(node):
            self._pending_kernels.append([node])
        else:
            yield from self.emitter.kernels(node)

    def flush(self) -> Iterator[Kernel]:
        """Emit the remaining kernels."""
        for members in self._pending_kernels:
            yield from self._kernels(members)

    def _kernels(self, members: PendingKernel) -> list[Kernel]:
        if len(members) == 1:
            return self.emitter.kernels(members[0])
        return [self.emitter.fuse(members, self._members_to_store(members))]

    def _members_to_store(self, members: PendingKernel) -> list[fx.Node]:
        """Return the members that other kernels read."""
        return [
            node for node in members if node in self.outputs or self._readers[node] - {*members}
        ]

    def _group_for(self, node: fx.Node) -> PendingKernel | None:
        """Return the last pending kernel into which the node can be fused, if any."""
        if node.target in MATMULS:
            return None
        for members in reversed(self._pending_kernels):
            is_other_reduction = node.target in REDUCTIONS and members[0].target in REDUCTIONS
            if {*members}.isdisjoint(self.reads[node]) and not is_other_reduction:
                continue
            if (node in self.early) == (members[0] in self.early) and self._can_fuse(
                [*members, node]
            ):
                return members
        return None

    def _can_fuse(self, members: PendingKernel) -> bool:
        try:
            kernel = self.emitter.fuse(members, self._members_to_store(members))
        except NotFusable:
            return False
        return kernel.shader.bindings <= self.bindings
