"""Attention kernels on their own: operands, and the formula's results in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backends.wgpu.device.target import Copy
from backends.wgpu.shaders.attention.problem import AttentionProblem, AttentionSizes, Part, View
from backends.wgpu.shaders.attention.tiles import attention_shader
from backends.wgpu.shaders.dispatch import Dispatch, Shader

PARTS: tuple[Part, ...] = ("forward", "queries", "keys")
Grid = tuple[int, int, int]


def problem_of(
    part: Part, sizes: AttentionSizes, mask: str = "", *, causal: bool = False
) -> AttentionProblem:
    """Return a problem on contiguous tensors.

    `mask` is "truth" for a boolean mask, another text for an added one, empty for none.
    """
    queries = _whole(sizes.heads, sizes.queries, sizes.size)
    keys = _whole(sizes.groups, sizes.keys, sizes.size)
    masks = _whole(sizes.heads, sizes.queries, sizes.keys) if mask else None
    is_backward = part != "forward"
    delta = View((sizes.heads * sizes.queries, sizes.queries, 1), 0) if is_backward else None
    return AttentionProblem(
        part, sizes, queries, keys, keys, masks, mask == "truth", queries if is_backward else None,
        delta,
        sizes.size**-0.5, causal,
    )  # fmt: skip


def _whole(count: int, rows: int, columns: int) -> View:
    return View((count * rows * columns, rows * columns, columns, 1), 0)


def nbytes_of(problem: AttentionProblem) -> list[int]:
    """Bytes of each binding."""
    s = problem.sizes
    queries, keys = s.batch * s.heads * s.queries * s.size, s.batch * s.groups * s.keys * s.size
    packed = queries + s.batch * s.heads * -(-s.queries // 4) * 8
    masks = [] if problem.mask is None else [s.batch * s.heads * s.queries * s.keys]
    out = {"forward": [packed], "queries": [queries], "keys": [2 * keys]}[problem.part]
    backward_inputs = (
        [packed, queries, s.batch * s.heads * s.queries] if problem.tangent is not None else []
    )
    return [4 * count for count in (queries, keys, keys, *masks, *backward_inputs, *out)]


@dataclass
class Operands:
    """Random operands; an added mask holds -1e38 where it hides a score."""

    sizes: AttentionSizes
    mask: str
    causal: bool
    given: Mapping[str, torch.Tensor]

    @staticmethod
    def drawn(sizes: AttentionSizes, mask: str = "", *, causal: bool = False) -> Operands:
        """Draw operands from a seed that the sizes determine."""
        draw = torch.Generator().manual_seed(sizes.queries * 1000 + sizes.keys)
        queries = (sizes.batch, sizes.heads, sizes.queries, sizes.size)
        keys = (sizes.batch, sizes.groups, sizes.keys, sizes.size)
        shapes = {"query": queries, "key": keys, "value": keys, "tangent": queries}
        tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        if mask:
            shape = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
            visible = torch.rand(shape, generator=draw) > 0.3
            visible[..., : sizes.queries // 2, sizes.keys // 3 :] = False  # whole blocks
            additive = torch.zeros(shape).masked_fill(~visible, -1e38)
            tensors["mask"] = visible.int() if mask == "truth" else additive
        return Operands(sizes, mask, causal, tensors)

    def expected(self) -> list[torch.Tensor]:
        """Return output and gradients of query, key and value in float64; each (B, rows, heads,
        D)."""
        q, k, v, tangent = (self.given[n].double() for n in ("query", "key", "value", "tangent"))
        leaves = [each.requires_grad_() for each in (q, k, v)]
        shared = self.sizes.heads // self.sizes.groups
        k, v = (each.repeat_interleave(shared, 1) for each in (k, v))
        with torch.enable_grad():
            scores = q @ k.mT * self.sizes.size**-0.5
            hidden = torch.zeros(scores.shape, dtype=torch.bool)
            if self.mask == "truth":
                hidden |= self.given["mask"] == 0
            elif self.mask:
                scores = scores + self.given["mask"]
            if self.causal:
                hidden |= ~torch.ones(hidden.shape, dtype=torch.bool).tril()
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            result = weights.masked_fill(hidden.all(-1, keepdim=True), 0) @ v
            gradients = torch.autograd.grad((result * tangent).sum(), leaves)
        return [each.detach().transpose(1, 2) for each in (result, *gradients)]

    def on(self, device: Any, workgroup_bytes: int) -> list[torch.Tensor]:
        """Run on a device with the layout that fits into this much workgroup memory."""
        s = self.sizes
        read = [self.given[name] for name in ("query", "key", "value")]
        read += [self.given["mask"]] if self.mask else []
        packed = self._run(device, "forward", workgroup_bytes, read)
        result = packed[: s.batch * s.queries * s.heads * s.size]
        result = result.reshape(s.batch, s.queries, s.heads, s.size)
        tangent = self.given["tangent"]
        delta = (tangent * result.transpose(1, 2)).sum(-1)
        read += [packed, tangent, delta]
        by_query = self._run(device, "queries", workgroup_bytes, read).reshape(result.shape)
        by_key, by_value = self._run(device, "keys", workgroup_bytes, read).reshape(
            2, s.batch, s.keys, s.groups, s.size
        )
        return [result, by_query, by_key, by_value]

    def _run(
        self, device: Any, part: Part, workgroup_bytes: int, read: list[torch.Tensor]
    ) -> torch.Tensor:
        problem = problem_of(part, self.sizes, self.mask, causal=self.causal)
        shader, grid = attention_shader(problem, workgroup_bytes)
        *_, out = nbytes_of(problem)
        return torch.from_numpy(run_kernel(device, shader, grid, [x.numpy() for x in read], out))


def run_kernel(device: Any, shader: Shader, grid: Grid, arrays: list[Any], nbytes: int) -> Any:
    """Return what a kernel writes to buffers that held NaN."""
    arrays = [*map(np.ascontiguousarray, arrays), np.full(nbytes // 4, np.nan, np.float32)]
    buffers = [device.buffer(array.nbytes) for array in arrays]
    for buffer, array in zip(buffers, arrays, strict=True):
        device.upload(buffer, array)
    dispatch = Dispatch(shader, tuple(range(len(buffers))), grid, "attention")
    prepared = device.prepare([dispatch], buffers)
    return device.run(prepared, [Copy(buffers[-1], nbytes)]).result()[0].copy()
