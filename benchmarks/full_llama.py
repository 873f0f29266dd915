"""Full training of a Llama of 125 M parameters by two workers on one machine, against DDP over
gloo.

`python -m benchmarks.full_llama [--steps N] [--turns N]`. Each worker trains on 2 x 32 tokens per
step, with AdamW, gradients clipped to norm 1, and one thread; the sides alternate. samestep runs
its real commands with the log on, measured from update to update. Memory is each process's peak
RSS.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.cluster import Cluster
from benchmarks.machine import print_heading, print_table
from benchmarks.ranks import Ranks, intervals_us
from benchmarks.timeline import intervals_us as step_intervals_us
from benchmarks.timeline import step_times

_WORKERS: Final = 2
_TOKENS: Final = 32
_SAMPLES: Final = 2
"""Samples of each worker in a step."""
_WARMUP_STEPS: Final = 2
CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 50_304,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def run_spec(steps: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return a run spec with one microbatch per worker."""
    return {
        "name": "full-llama",
        "task": "causal-lm",
        "model": {"config": config},
        "tokenizer": {"vocab_size": 2048},
        "data": {
            "train": "python-stdlib", "holdout": 0.1, "holdout_samples": 16, "max_tokens": _TOKENS,
        },
        "batch": {"samples": _WORKERS * _SAMPLES, "microbatch": _SAMPLES},
        "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "clip_norm": 1.0},
        "threads": 1,
        "steps": steps,
        "evaluate_every": 0,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measurement:
    """Milliseconds of each step after warm-up, and peak memory of each process."""

    samestep_ms: list[float]
    ddp_ms: list[float]
    coordinator_bytes: int
    worker_bytes: int
    rank_bytes: int


def measure(steps: int, turns: int, config: dict[str, Any] | None = None) -> Measurement:
    """Measure both sides alternately."""
    config = config or CONFIG
    intervals, ddp_us = [], []
    command = {
        "do": "train_llama", "config": config, "samples": _SAMPLES, "tokens": _TOKENS,
        "steps": steps + _WARMUP_STEPS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cluster = Cluster(
            [["worker", "--quiet", "--backend", "cpu"]] * _WORKERS, directory / "ours"
        )  # fmt: skip
        with cluster, Ranks(_WORKERS, directory / "gloo") as ranks:
            for _ in range(turns):
                intervals.append(cluster.run(run_spec(steps + _WARMUP_STEPS, config)))
                ddp_us += intervals_us(ranks.run_commands(command))[_WARMUP_STEPS:]
            coordinator_bytes, *worker_bytes = cluster.peak_bytes()
            peaks = ranks.run_commands({"do": "peak_bytes"})
        timelines = cluster.timelines()
    samestep_us = [
        span_us
        for run in intervals
        for span_us in step_intervals_us(step_times(timelines, run.start_us, run.end_us))[
            _WARMUP_STEPS:
        ]
    ]
    return Measurement(
        [span_us / 1e3 for span_us in samestep_us],
        [span_us / 1e3 for span_us in ddp_us],
        coordinator_bytes,
        max(worker_bytes),
        max(int(spans[0][1]) for spans in peaks),
    )


def rows(measurement: Measurement) -> list[list[str]]:
    """Return the rows of the table."""
    samestep_ms, ddp_ms = median(measurement.samestep_ms), median(measurement.ddp_ms)
    bytes_per_gb = 1e9
    return [
        ["DDP, step", f"{min(measurement.ddp_ms):.0f}", f"{ddp_ms:.0f} ms", "1.00"],
        ["samestep, step", f"{min(measurement.samestep_ms):.0f}", f"{samestep_ms:.0f} ms",
         f"{samestep_ms / ddp_ms:.2f}"],
        ["DDP, memory of a rank", "", f"{measurement.rank_bytes / bytes_per_gb:.2f} GB", "1.00"],
        ["samestep, memory of a worker", "", f"{measurement.worker_bytes / bytes_per_gb:.2f} GB",
         f"{measurement.worker_bytes / measurement.rank_bytes:.2f}"],
        ["samestep, memory of the coordinator", "",
         f"{measurement.coordinator_bytes / bytes_per_gb:.2f} GB", ""],
    ]  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="in each turn")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    print_heading("A Llama of 125 M parameters, trained in full by two workers on one machine")
    print_table(["what", "min", "median", "ratio"], rows(measure(options.steps, options.turns)))


if __name__ == "__main__":
    main()
