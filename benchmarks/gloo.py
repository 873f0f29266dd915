"""One rank of torch.distributed over gloo, the reference for measurements on the same machine.

`benchmarks.ranks` starts it. It reads commands from standard input, one JSON line each, and answers
each with one line.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import peak_bytes
from protocol.machine.trace import now_us

Times = list[tuple[float, float]]


def all_reduce(payload_bytes: int, rounds: int, quiet_ms: float) -> Times:
    """Average one float32 tensor: all-reduce, then one division. Before each round the link is idle
    as long as for samestep, since a link may be slower after idling.
    """
    tensor = torch.ones(payload_bytes // 4)
    times = []
    for _ in range(rounds):
        time.sleep(quiet_ms / 1e3)
        dist.barrier()
        start_us = now_us()
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        times.append((start_us, now_us()))
    return times


class Sleeper:
    """Sleeps like the device of `backends.scripted`: forward, then blocks at even intervals."""

    def __init__(self, forward_ms: float, block_ms: float, blocks: int) -> None:
        self._forward_s = forward_ms / 1e3
        self._block_s = block_ms / 1e3
        self._blocks = blocks
        self._start_s = 0.0

    def forward(self) -> None:
        self._start_s = time.perf_counter()
        self._sleep_until(self._start_s + self._forward_s)

    def backward(self, block: int) -> None:
        blocks_done = self._blocks - block
        self._sleep_until(self._start_s + self._forward_s + blocks_done * self._block_s)

    @staticmethod
    def _sleep_until(deadline_s: float) -> None:
        left_s = deadline_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _SlowBlock(torch.autograd.Function):
    """The identity; backward takes the time of a block and returns a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sleeper: Sleeper, block: int) -> Tensor:
        ctx.weight_shape, ctx.sleeper, ctx.block = weight.shape, sleeper, block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradient = torch.ones(ctx.weight_shape)
        ctx.sleeper.backward(ctx.block)
        return gradients[0], gradient, None, None


class SlowModel(nn.Module):
    """Blocks of one parameter each that sleep instead of computing."""

    def __init__(self, sleeper: Sleeper, blocks: int, block_bytes: int) -> None:
        super().__init__()
        self._sleeper = sleeper
        self.weights = nn.ParameterList(torch.zeros(block_bytes // 4) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        self._sleeper.forward()
        for block, weight in enumerate(self.weights):
            x = _SlowBlock.apply(x, weight, self._sleeper, block)  # type: ignore[no-untyped-call]
        return x.sum()


def train(
    *,
    blocks: int,
    block_bytes: int,
    forward_ms: float,
    block_ms: float,
    microbatches: int,
    steps: int,
    bucket_mb: int | None,
) -> Times:
    """Train with DistributedDataParallel and plain SGD.

    Args:
        blocks: Modules of one parameter each.
        block_bytes: Size of each parameter.
        forward_ms: Time before backward.
        block_ms: Time of each block's backward.
        microbatches: Microbatches per step on this rank; only the last one communicates.
        steps: Number of steps.
        bucket_mb: Size of DDP's buckets in MiB; None for its default: 1, then 25.
    """
    model = SlowModel(Sleeper(forward_ms, block_ms, blocks), blocks, block_bytes)
    replica = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1, requires_grad=True)
    times = []
    for _ in range(steps):
        start_us = now_us()
        for index in range(microbatches):
            is_last = index == microbatches - 1
            with contextlib.nullcontext() if is_last else replica.no_sync():
                replica(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append((start_us, now_us()))
    return times


def train_llama(*, config: dict[str, Any], samples: int, tokens: int, steps: int) -> Times:
    """Train with DistributedDataParallel and AdamW, gradients clipped to norm 1, on random tokens.

    Args:
        config: The model's configuration, as in a run spec.
        samples: Samples of this rank in a step.
        tokens: Tokens of a sample.
        steps: Number of steps.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 -- the import takes seconds

    sizes = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(0)
    model_config = AutoConfig.for_model(config["model_type"], **sizes)
    model: nn.Module = AutoModelForCausalLM.from_config(model_config)  # type: ignore[no-untyped-call]
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    times = []
    for _ in range(steps):
        start_us = now_us()
        batch = torch.randint(0, config["vocab_size"], (samples, tokens))
        replica(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append((start_us, now_us()))
    return times


def peak() -> Times:
    """Return this rank's peak resident memory in bytes, in the form of one span (0, bytes)."""
    return [(0.0, float(peak_bytes()))]


def serve_commands(rank: int, world: int, store: str) -> None:
    """Execute commands until standard input ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    operations: dict[str, Callable[..., Times]] = {
        "all_reduce": all_reduce, "train": train, "train_llama": train_llama, "peak_bytes": peak,
    }  # fmt: skip
    for line in sys.stdin:
        command = json.loads(line)
        times = operations[command.pop("do")](**command)
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    serve_commands(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
