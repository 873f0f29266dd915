"""Everything that needs a real card, unattended and within ten minutes, with a report of one page.

    python -m benchmarks.cards [--report cards.md] [--minutes 10] [--only memory ...]

Each part is a process with a time limit. Parts that this machine cannot run are skipped, and the
report says why. The most informative parts come first.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
import transformers

from backends.base.interface import Batch
from backends.eager.eager import EagerBackend
from backends.eager.torch_devices import torch_device
from backends.registry import devices as all_devices
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.device.adapters import adapters
from benchmarks.machine import describe, print_heading
from benchmarks.vulkan_steps import Decoder, microbatch
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.run_spec import ModelRun
from tests.cluster import RUNS, Cluster
from tests.small_decoder import decoder_run
from worker.models.device_memory import estimate
from worker.tasks.base.task import Task
from worker.tasks.registry import build

ROOT: Final = Path(__file__).parents[1]
_DIGITS: Final = (
    "--run", str(RUNS / "digits.yaml"), "--set", "steps=16", "--set", "batch.samples=48",
)  # fmt: skip
_FROZEN: Final = """
task: "tests.frozen_base_task:FrozenBase"
steps: 4
batch: {samples: 14, microbatch: 2}
checkpoint: {every: 0}
"""
_PYTEST: Final = ("-m", "pytest", "-q", "-n", "2", "--durations", "0", "--durations-min", "20")
TORCH_KINDS: Final = ("cuda", "xpu", "accelerator")
_ONE_PROCESS: Final = ("-m", "pytest", "-q", "-n", "0", "--tb", "short")
"""So that a card's memory is one test's."""
_TOLD_LINES: Final = 40
"""Of what a part prints, from its end."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What is there.

    Attributes:
        cards: Names of torch's cards.
        kind: What torch's cards are called by `--backend`.
        vulkan: Name of a card with a Vulkan driver; empty if there is none.
        why_no_vulkan: The reason for that.
    """

    cards: tuple[str, ...]
    vulkan: str
    why_no_vulkan: str = ""
    kind: str = "cuda"

    def lacking(self, needs: Sequence[str]) -> str:
        """Why a part that needs these cannot run; empty if it can."""
        reasons = {
            "card": "" if self.cards else "torch has no card here",
            "two cards": "" if len(self.cards) > 1 else "torch has no two cards here",
            "collectives": "" if self.kind in ("cuda", "xpu") else "torch has none for this card",
            "cuda": "" if self.cards and self.kind == "cuda" else "torch has no CUDA device here",
            "vulkan": "" if self.vulkan else f"no card with Vulkan: {self.why_no_vulkan}",
        }
        return "; ".join(reasons[need] for need in needs if reasons[need])


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to be found out.

    Attributes:
        arguments: Of Python; {kind} stands for what torch's cards are called.
        needs: Kinds of device.
        limit_s: What it may take, of the time that is left.
        environment: Further variables of the process.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    limit_s: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part."""

    part: Part
    result: str
    seconds: float = 0.0
    said: str = ""


_OWN: Final = ("-m", "benchmarks.cards")
_NO_VULKAN: Final = ("-k", "not vulkan")

PARTS: Final = (
    Part("model families against the CPU, twice", (*_ONE_PROCESS, "tests/backends/eager/models.py"),
         ("card",), 120),
    Part("fit and the HF trainer", (*_ONE_PROCESS, "tests/standin/library.py"), ("card",), 60),
    Part(
        "eager suite",
        (*_ONE_PROCESS, "tests/backends/test_conformance.py", "tests/backends/eager", *_NO_VULKAN),
        ("card",), 90,
    ),
    Part("a run's digest: one card, twice; two cards", (*_OWN, "--digests"), ("card",), 100),
    Part("memory, estimated and taken", (*_OWN, "--measure-memory"), ("card",), 60),
    Part(
        "streams, watched by torch", (*_ONE_PROCESS, "tests/backends/eager/test_eager.py"),
        ("cuda",), 60, {"TORCH_CUDA_SANITIZER": "1"},
    ),
    Part("a base sharded over two cards", (*_OWN, "--shard"), ("two cards", "collectives"), 60),
    Part("speed against a plain loop", ("-m", "benchmarks.overhead", "--backend", "{kind}"),
         ("cuda",), 120),
    Part(
        "Vulkan suite",
        (*_PYTEST, "tests/backends/wgpu", "-k", "not random_module", "--maxfail", "20"),
        ("vulkan",), 180,
    ),
    Part("canonical arithmetic by Vulkan", ("-m", "worker", "devices", "--canonical"),
         ("vulkan",), 60),
    Part("memory of Vulkan", (*_OWN, "--measure-vulkan"), ("vulkan", "cuda"), 60),
    Part(
        "decoders, Vulkan against CUDA",
        ("-m", "benchmarks.vulkan", "--only", "decoder", "--against", "cuda", "--rounds", "5"),
        ("vulkan", "cuda"), 120,
    ),
    Part(
        "products, Vulkan against CUDA",
        ("-m", "benchmarks.vulkan", "--only", "matmul", "--against", "cuda"),
        ("vulkan", "cuda"), 60,
    ),
    Part(
        "random programs", (*_PYTEST, "tests/backends/wgpu/test_random_programs.py"),
        ("vulkan",), 120,
    ),
)  # fmt: skip


def found_devices() -> Devices:
    """On this machine; a software adapter is no card."""
    rows = [each for each in all_devices() if each.usable and not each.software]
    kind = next((each.backend for each in rows if each.backend in TORCH_KINDS), "cuda")
    cards = tuple(each.name for each in rows if each.backend == kind)
    found = adapters()
    if isinstance(found, str):
        return Devices(cards, "", found, kind)
    card = next((adapter.name for adapter in found if not adapter.software), "")
    return Devices(cards, card, "only software adapters", kind)


def outcomes(parts: Sequence[Part], devices: Devices, seconds: float) -> Iterator[Outcome]:
    """Run one after the other, as long as there is time."""
    ends = time.monotonic() + seconds
    for part in parts:
        left = ends - time.monotonic()
        if lacking := devices.lacking(part.needs):
            yield Outcome(part, f"skipped: {lacking}")
        elif left < 1:
            yield Outcome(part, "skipped: the time is used up")
        else:
            yield run(part, min(left, part.limit_s), devices.kind)


def run(part: Part, limit_s: float, kind: str) -> Outcome:
    """A process of its own; what it printed is kept also if it ran out of time."""
    began = time.monotonic()
    running = subprocess.Popen(  # noqa: S603 -- parts are our own
        [sys.executable, *(each.format(kind=kind) for each in part.arguments)],
        env={**os.environ, "SAMESTEP_TESTED_BACKEND": kind, **part.environment},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = running.communicate(timeout=limit_s)
        result = "passed" if running.returncode == 0 else f"failed: exit code {running.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # with what it has started
        said, _ = running.communicate()
        result = f"failed: it takes more than {limit_s:.0f} s"
    told = "\n".join(said.strip().splitlines()[-_TOLD_LINES:])
    return Outcome(part, result, time.monotonic() - began, told)


def report(devices: Devices, found: Sequence[Outcome]) -> str:
    """As Markdown: a line for each part, then what each printed."""
    cards = f"{devices.kind}: {', '.join(devices.cards) or 'none'}"
    lines = [
        "# A real card", "", f"Machine: {describe()}",
        f"{cards}; Vulkan: {devices.vulkan or 'none'}", "",
        "| part | result | seconds |", "|---|---|---:|",
    ]  # fmt: skip
    lines += [f"| {each.part.name} | {each.result} | {each.seconds:.0f} |" for each in found]
    for each in found:
        if each.said:
            lines += ["", f"## {each.part.name}", "", "```", each.said, "```"]
    return "\n".join([*lines, ""])


def digests(kind: str, count: int) -> None:
    """The digest of a run on the CPU, on one card twice, and on two cards as one worker."""
    ways: dict[str, tuple[str, ...]] = {
        "cpu": ("--backend", "cpu"),
        "one card": ("--backend", f"{kind}0"),
    }
    ways["one card again"] = ways["one card"]
    if count > 1:
        ways["two cards"] = ("--backend", kind, "--gpus", "0,1")
    found = {}
    for name, arguments in ways.items():
        with tempfile.TemporaryDirectory() as directory:
            expected = str(2 if name == "two cards" else 1)
            with Cluster(Path(directory), "--expect-workers", expected, *_DIGITS) as cluster:
                # A process of its own, which nobody has forked after CUDA was used.
                cluster.worker("w", *arguments, environment=dict(os.environ))
                found[name] = cluster.result()["weights_digest"]
        print(f"{name}: {found[name][:16]}", flush=True)
    same = len({digest for name, digest in found.items() if name != "cpu"}) == 1
    print(f"the cards' digests are {'one' if same else 'NOT one'}; the CPU's is "
          f"{'the same' if found['cpu'] == found['one card'] else 'another'}")  # fmt: skip
    if not same:
        sys.exit(1)


def shard() -> None:
    """A run of one member, whose frozen base lies across two ranks with a card each."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.yaml"
        path.write_text(_FROZEN)
        with Cluster(Path(directory), "--expect-workers", "1", "--run", str(path)) as cluster:
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                "2", "-m", "worker", "--coordinator", cluster.address["data"], "--shard",
            ]  # fmt: skip
            subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603 -- our own command
            print(cluster.result()["outcome"])


def measure_memory(kind: str) -> None:
    """LoRA of a decoder of 60 million parameters: what is estimated, and what torch counts."""
    device = torch_device(kind)
    cards = torch.get_device_module(device)
    if not hasattr(cards, "max_memory_allocated"):
        print(f"torch.{device.type} does not count its memory")
        return
    for changes in ({}, {"base_dtype": "int4"}, {"gradient_checkpointing": True}):
        with tempfile.TemporaryDirectory() as directory:
            spec, task, batch = large_decoder(Path(directory), changes)
            expected = estimate(spec)
            assert expected is not None
            program = EagerBackend(kind).compile(task.trainable, batch)
            cards.reset_peak_memory_stats(device)
            for _ in program.gradients([(batch, 0)]):
                pass
            taken = int(cards.max_memory_allocated(device))
            program.close()
        print(f"{changes or 'float32'}: estimated {expected.total / 2**20:.0f} MiB ({expected}), "
              f"taken {taken / 2**20:.0f} MiB, ratio {taken / expected.total:.2f}")  # fmt: skip


def large_decoder(directory: Path, model: Mapping[str, object]) -> tuple[ModelRun, Task, Batch]:
    """A run with LoRA on a Llama, its task, and a microbatch of the longest samples."""
    path = decoder_run(
        "causal-lm", directory, lora={"r": 8}, batch={"samples": 2, "microbatch": 2},
        model={"source": str(directory / "model"), **model},
    )  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=16,
        num_attention_heads=8, max_position_embeddings=1024,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory / "model")
    spec = load_run_spec(path, ["data.max_tokens=512"])
    assert isinstance(spec, ModelRun)
    task = build(spec)
    arrays = {name: np.resize(a, (2, 512)) for name, a in task.batch([0]).arrays.items()}
    return spec, task, Batch(arrays, 1024.0)


def measure_vulkan() -> None:
    """A decoder's step by Vulkan: what is estimated, and what CUDA says is gone meanwhile."""
    backend = VulkanBackend()
    decoder = Decoder(1024, 8, 512, "whole")
    torch.cuda.mem_get_info(0)  # makes CUDA's own context, which is not counted
    before = int(torch.cuda.mem_get_info(0)[0])
    program = backend.compile(decoder.trainable(threads=1), decoder.batch())
    microbatch(program, decoder.batch(), 0)
    used = before - int(torch.cuda.mem_get_info(0)[0])
    estimated = max(one.total for one in program.estimates)
    mib = 2.0**20
    print(f"{decoder}: estimated {estimated / mib:.0f} MiB, used {used / mib:.0f} MiB, "
          f"ratio {used / estimated:.2f}; {program.parity}")  # fmt: skip


def main() -> None:
    """Run the parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("cards.md"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS])
    for part in ("--measure-memory", "--measure-vulkan", "--digests", "--shard"):
        parser.add_argument(part, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    devices = found_devices()
    if options.measure_memory:
        measure_memory(devices.kind)
    elif options.measure_vulkan:
        measure_vulkan()
    elif options.digests:
        digests(devices.kind, len(devices.cards))
    elif options.shard:
        shard()
    else:
        run_parts(options, devices)


def run_parts(options: argparse.Namespace, devices: Devices) -> None:
    """Run all parts that were asked for, and write the report after each."""
    print_heading("What a real card is needed for")
    found = []
    for each in outcomes(_chosen(options.only), devices, 60 * options.minutes):
        print(f"{each.part.name}: {each.result} ({each.seconds:.0f} s)", flush=True)
        found.append(each)
        options.report.write_text(report(devices, found), "utf-8")  # a card may be gone any moment
    if any(each.result.startswith("failed") for each in found):
        sys.exit(1)


def _chosen(names: Sequence[str] | None) -> list[Part]:
    return [part for part in PARTS if names is None or part.name in names]


if __name__ == "__main__":
    main()
