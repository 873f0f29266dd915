"""The cost of a capture beyond its forward passes, and of reading the capture for a student.

A bare loop runs the same teacher forward over the same batches and stores no logits. In a capture,
the worker sends the top logits and log-sum-exps, and the coordinator writes them to disk before the
next step. Then a student trains on them in this process, which measures how much of the student's
steps is reading.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from backends.eager.eager import EagerBackend
from benchmarks.cluster import Cluster
from benchmarks.machine import print_heading, print_table
from benchmarks.timeline import intervals_us, step_times
from protocol.datasets.capture_index import read_index
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.spec.run_spec import RunSpec, parse_run_spec
from worker.tasks.registry import build

_RUNS = Path(__file__).parents[1] / "deploy" / "runs"
_STUDENT_STEPS = 6


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """The cost of one capture.

    Attributes:
        step_ms: Duration of each step but the first.
        tokens: Tokens in all files.
        file_bytes: Size of all files, compressed.
        token_bytes: Size of a token in the layout, before compression.
    """

    step_ms: list[float]
    tokens: int
    file_bytes: int
    token_bytes: float


@dataclass(frozen=True, slots=True)
class ReadingTimes:
    """Milliseconds of a student's steps: reading and making batches, and computing."""

    read_ms: list[float]
    compute_ms: list[float]

    @property
    def read_fraction(self) -> float:
        """Return the fraction of time in which the device waits for a batch, without read-ahead."""
        return sum(self.read_ms) / (sum(self.read_ms) + sum(self.compute_ms))


class BareForward:
    """A loop of the teacher's forward passes only."""

    def __init__(self, spec: RunSpec) -> None:
        torch.set_num_threads(spec.threads)
        self._task = build(spec)
        self._order = SampleOrder(spec.seed, self._task.manifest.train_samples, spec.batch)
        module = self._task.trainable.module
        assert module is not None
        self._module: torch.nn.Module = module.eval()

    @torch.no_grad()
    def step_ms(self, step: int) -> float:
        """Compute all microbatches of a step; return its duration."""
        begin_s = time.perf_counter()
        for samples in self._order.microbatches(step):
            batch = self._task.batch(samples)
            self._module(input_ids=torch.from_numpy(batch.arrays["input_ids"]), use_cache=False)
        return (time.perf_counter() - begin_s) * 1e3


def capture(document: dict[str, Any], directory: Path) -> CaptureCost:
    """Capture with a coordinator and a worker; the run is stored in `directory`."""
    cluster = Cluster([["worker", "--quiet", "--backend", "cpu"]], directory)
    with cluster:
        run = cluster.run(document)
    timed_steps = step_times(cluster.timelines(), run.start_us, run.end_us)
    index = read_index(logits_in(directory))
    layout = index.facts.layout
    tokens = index.samples * layout.tokens
    return CaptureCost(
        [interval_us / 1e3 for interval_us in intervals_us(timed_steps)],
        tokens,
        sum(path.stat().st_size for path in logits_in(directory).glob("*.parquet")),
        layout.sample_bytes / layout.tokens,
    )


def logits_in(directory: Path) -> Path:
    """Return the directory of the logits of the only run in a directory."""
    (logits,) = directory.glob("*/logits")
    return logits


def time_reading(document: dict[str, Any], logits: Path) -> ReadingTimes:
    """Time a student's first steps, in this process."""
    document = {**document, "data": {**document["data"], "train": str(logits)}}
    spec = parse_run_spec(document)
    task = build(spec)
    manifest = task.manifest
    order = SampleOrder(spec.seed, manifest.train_samples, spec.batch, manifest.row_groups)
    program = EagerBackend("cpu").compile(task.trainable, task.batch(order.microbatches(0)[0]))
    program.load(task.initial_parameters())
    times = ReadingTimes([], [])
    for step in range(_STUDENT_STEPS):
        for number, samples in enumerate(order.microbatches(step)):
            begin_s = time.perf_counter()
            batch = task.batch(samples)
            read_s = time.perf_counter()
            _run_all(program.gradients([(batch, microbatch_seed(spec.seed, step, number))]))
            times.read_ms.append((read_s - begin_s) * 1e3)
            times.compute_ms.append((time.perf_counter() - read_s) * 1e3)
    program.close()
    return times


def _run_all(gradients: Iterable[object]) -> None:
    for _ in gradients:
        pass


def _print_capture(bare_ms: float, cost: CaptureCost) -> None:
    capture_ms = median(cost.step_ms)
    lines = [
        ["bare forward loop", f"{bare_ms:.0f}", "1.000"],
        ["capture, one worker", f"{capture_ms:.0f}", f"{capture_ms / bare_ms:.3f}"],
    ]
    print_table(["side", "ms a step", "ratio"], lines)
    print(
        f"a token: {cost.token_bytes:.1f} bytes as computed, "
        f"{cost.file_bytes / cost.tokens:.1f} in the files"
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--teacher", type=Path, default=_RUNS / "smollm2-teacher.yaml")
    parser.add_argument("--student", type=Path, default=_RUNS / "llama-student.yaml")
    parser.add_argument("--set", dest="changes", default="{}", help="keys of the teacher, as JSON")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each side")
    options = parser.parse_args()
    print_heading("Capture, against a bare forward loop; and a student's reading")
    document = yaml.safe_load(options.teacher.read_text(encoding="utf-8"))
    document |= {"steps": options.rounds + 1, **json.loads(options.changes)}
    loop = BareForward(parse_run_spec(document))
    loop.step_ms(0)
    times_before = [loop.step_ms(step) for step in range(1, options.rounds + 1)]
    with tempfile.TemporaryDirectory() as name:
        cost = capture(document, Path(name))
        times_after = [loop.step_ms(step) for step in range(1, options.rounds + 1)]
        _print_capture(median(times_before + times_after), cost)
        student = yaml.safe_load(options.student.read_text(encoding="utf-8"))
        reading = time_reading(student, logits_in(Path(name)))
    print(
        f"a student's microbatch: {median(reading.read_ms):.2f} ms to read, "
        f"{median(reading.compute_ms):.1f} ms to compute: "
        f"{100 * reading.read_fraction:.2f} % of its time"
    )


if __name__ == "__main__":
    main()
