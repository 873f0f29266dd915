"""Run attention kernels alone: random operands, and reference results in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backends.wgpu.device.target import Copy
from backends.wgpu.shaders.attention.problem import (
    AttentionKernel,
    AttentionProblem,
    AttentionSizes,
    View,
)
from backends.wgpu.shaders.attention.tiles import attention_shader
from backends.wgpu.shaders.dispatch import Dispatch, Shader

KERNELS: tuple[AttentionKernel, ...] = ("forward", "queries", "keys")
Grid = tuple[int, int, int]


def contiguous_problem(
    kernel: AttentionKernel, sizes: AttentionSizes, mask: str = "", *, causal: bool = False
) -> AttentionProblem:
    """Return a problem on contiguous tensors.

    `mask` is "boolean", "additive", or empty for no mask.
    """
    queries = _contiguous_view(sizes.heads, sizes.queries, sizes.head_size)
    keys = _contiguous_view(sizes.groups, sizes.keys, sizes.head_size)
    mask_view = _contiguous_view(sizes.heads, sizes.queries, sizes.keys) if mask else None
    is_backward = kernel != "forward"
    delta = View((sizes.heads * sizes.queries, sizes.queries, 1), 0) if is_backward else None
    grad_output = queries if is_backward else None
    return AttentionProblem(
        kernel, sizes, queries, keys, keys, mask_view, mask == "boolean", grad_output, delta,
        sizes.head_size**-0.5, causal,
    )  # fmt: skip


def _contiguous_view(count: int, rows: int, columns: int) -> View:
    return View((count * rows * columns, rows * columns, columns, 1), 0)


def binding_nbytes(problem: AttentionProblem) -> list[int]:
    """Return the size of each binding in bytes, in the order of the kernel's bindings."""
    s = problem.sizes
    query_elements = s.batch * s.heads * s.queries * s.head_size
    key_elements = s.batch * s.groups * s.keys * s.head_size
    # After the output: two vec4f of softmax statistics for every four rows.
    packed_elements = query_elements + s.batch * s.heads * -(-s.queries // 4) * 8
    mask_elements = [] if problem.mask is None else [s.batch * s.heads * s.queries * s.keys]
    output_elements = {
        "forward": packed_elements, "queries": query_elements, "keys": 2 * key_elements,
    }[problem.kernel]  # fmt: skip
    backward_elements = (
        [packed_elements, query_elements, s.batch * s.heads * s.queries]
        if problem.grad_output is not None
        else []
    )
    input_elements = [query_elements, key_elements, key_elements, *mask_elements]
    return [4 * count for count in (*input_elements, *backward_elements, output_elements)]


@dataclass
class Operands:
    """Random operands; an additive mask is -1e38 where it hides a score, else 0."""

    sizes: AttentionSizes
    mask: str
    causal: bool
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def random(sizes: AttentionSizes, mask: str = "", *, causal: bool = False) -> Operands:
        """Return random operands, seeded by the numbers of queries and keys."""
        generator = torch.Generator().manual_seed(sizes.queries * 1000 + sizes.keys)
        queries = (sizes.batch, sizes.heads, sizes.queries, sizes.head_size)
        keys = (sizes.batch, sizes.groups, sizes.keys, sizes.head_size)
        shapes = {"query": queries, "key": keys, "value": keys, "grad_output": queries}
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if mask:
            shape = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
            visible = torch.rand(shape, generator=generator) > 0.3
            visible[..., : sizes.queries // 2, sizes.keys // 3 :] = False  # hides whole blocks
            additive = torch.zeros(shape).masked_fill(~visible, -1e38)
            tensors["mask"] = visible.int() if mask == "boolean" else additive
        return Operands(sizes, mask, causal, tensors)

    def reference_results(self) -> list[torch.Tensor]:
        """Return the output and the gradients of query, key and value in float64.

        Each has shape (batch, rows, heads, head size).
        """
        q, k, v, grad_output = (
            self.tensors[n].double() for n in ("query", "key", "value", "grad_output")
        )
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        heads_per_group = self.sizes.heads // self.sizes.groups
        k, v = (tensor.repeat_interleave(heads_per_group, 1) for tensor in (k, v))
        with torch.enable_grad():
            scores = q @ k.mT * self.sizes.head_size**-0.5
            is_masked = torch.zeros(scores.shape, dtype=torch.bool)
            if self.mask == "boolean":
                is_masked |= self.tensors["mask"] == 0
            elif self.mask:
                scores = scores + self.tensors["mask"]
            if self.causal:
                is_masked |= ~torch.ones(is_masked.shape, dtype=torch.bool).tril()
            weights = scores.masked_fill(is_masked, -torch.inf).softmax(-1)
            result = weights.masked_fill(is_masked.all(-1, keepdim=True), 0) @ v
            gradients = torch.autograd.grad((result * grad_output).sum(), leaves)
        return [tensor.detach().transpose(1, 2) for tensor in (result, *gradients)]

    def run_on(self, device: Any, workgroup_bytes: int) -> list[torch.Tensor]:
        """Run the kernels on a device, in the layout that fits `workgroup_bytes` of workgroup
        memory."""
        s = self.sizes
        inputs = [self.tensors[name] for name in ("query", "key", "value")]
        inputs += [self.tensors["mask"]] if self.mask else []
        packed_output = self._run(device, "forward", workgroup_bytes, inputs)
        result = packed_output[: s.batch * s.queries * s.heads * s.head_size]
        result = result.reshape(s.batch, s.queries, s.heads, s.head_size)
        grad_output = self.tensors["grad_output"]
        delta = (grad_output * result.transpose(1, 2)).sum(-1)
        inputs += [packed_output, grad_output, delta]
        query_gradient = self._run(device, "queries", workgroup_bytes, inputs).reshape(result.shape)
        key_gradient, value_gradient = self._run(device, "keys", workgroup_bytes, inputs).reshape(
            2, s.batch, s.keys, s.groups, s.head_size
        )
        return [result, query_gradient, key_gradient, value_gradient]

    def _run(
        self,
        device: Any,
        kernel: AttentionKernel,
        workgroup_bytes: int,
        inputs: list[torch.Tensor],
    ) -> torch.Tensor:
        problem = contiguous_problem(kernel, self.sizes, self.mask, causal=self.causal)
        shader, grid = attention_shader(problem, workgroup_bytes)
        *_, output_nbytes = binding_nbytes(problem)
        return torch.from_numpy(
            run_kernel(device, shader, grid, [x.numpy() for x in inputs], output_nbytes)
        )


def run_kernel(device: Any, shader: Shader, grid: Grid, arrays: list[Any], nbytes: int) -> Any:
    """Run a kernel and return its output as a float32 array.

    The output buffer starts with NaN, so a comparison detects elements that the kernel does not
    write.
    """
    arrays = [*map(np.ascontiguousarray, arrays), np.full(nbytes // 4, np.nan, np.float32)]
    buffers = [device.buffer(array.nbytes) for array in arrays]
    for buffer, array in zip(buffers, arrays, strict=True):
        device.upload(buffer, array)
    dispatch = Dispatch(shader, tuple(range(len(buffers))), grid, "attention")
    commands = device.prepare([dispatch], buffers)
    return device.run(commands, [Copy(buffers[-1], nbytes)]).result()[0].copy()
