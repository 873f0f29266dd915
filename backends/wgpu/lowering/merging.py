"""Merge independent kernels into one dispatch.

On a GPU, a barrier separates dependent dispatches, and small dispatches leave most of the GPU idle.
The products of queries, keys and values are merged, as are the gradients of a product's two
operands. Neither the computation nor the bits change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from backends.wgpu.lowering.kernels import Kernel
from backends.wgpu.shaders.merged_shader import buffer_type, can_merge, merged_shader


def merge_independent(kernels: Sequence[Kernel], bindings: int) -> list[Kernel]:
    """Return the same computation in fewer kernels, in a valid order.

    Args:
        kernels: Kernels in a valid order.
        bindings: Storage buffers that a shader may bind.
    """
    groups: list[_Group] = []
    group_numbers: dict[fx.Node, int] = {}
    for kernel in kernels:
        dependencies = (
            group_numbers[node] for node in (*kernel.reads, *kernel.writes) if node in group_numbers
        )
        first_group = 1 + max(dependencies, default=-1)
        index = next(
            (
                i
                for i in range(first_group, len(groups))
                if groups[i].has_room_for(kernel, bindings)
            ),
            len(groups),
        )
        if index == len(groups):
            groups.append(_Group())
        groups[index].add(kernel)
        group_numbers |= dict.fromkeys(kernel.writes, index)
    return [group.kernel() for group in groups]


@dataclass(slots=True)
class _Group:
    """Kernels of one dispatch.

    Attributes:
        members: Kernels in order.
        bound: Binding numbers of the values that members read, by (value, type); the outputs
            follow them.
    """

    members: list[Kernel] = field(default_factory=list)
    bound: dict[tuple[fx.Node, str], int] = field(default_factory=dict)

    def has_room_for(self, kernel: Kernel, bindings: int) -> bool:
        """Whether a kernel fits into the group."""
        new_bindings = sum(key not in self.bound for key in _reads(kernel))
        used_bindings = len(self.bound) + sum(
            len(member.writes) for member in (*self.members, kernel)
        )
        return used_bindings + new_bindings <= bindings and all(
            can_merge(kernel.shader, member.shader) for member in self.members
        )

    def add(self, kernel: Kernel) -> None:
        """Add a kernel."""
        self.members.append(kernel)
        for key in _reads(kernel):
            self.bound.setdefault(key, len(self.bound))

    def kernel(self) -> Kernel:
        """Return the merged kernel."""
        if len(self.members) == 1:
            return self.members[0]
        writes = tuple(node for member in self.members for node in member.writes)
        output_start = len(self.bound)
        numbers = []
        for member in self.members:
            read_numbers = [self.bound[key] for key in _reads(member)]
            numbers.append([*read_numbers, *range(output_start, output_start + len(member.writes))])
            output_start += len(member.writes)
        shaders = [(member.shader, member.grid) for member in self.members]
        shader, grid = merged_shader(shaders, numbers, len(writes))
        label = " | ".join(member.label for member in self.members)
        return Kernel(shader, tuple(node for node, _ in self.bound), writes, grid, label)


def _reads(kernel: Kernel) -> Iterable[tuple[fx.Node, str]]:
    return [(node, buffer_type(kernel.shader, i)) for i, node in enumerate(kernel.reads)]
