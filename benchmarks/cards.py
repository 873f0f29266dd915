"""Everything that a real card is needed for, unattended and within ten minutes, with a report.

    python -m benchmarks.cards [--report cards.md] [--minutes 10] [--only memory ...]

Each part is a process of its own with a limit of time. What this machine lacks a part is skipped
for, and the report says so. Parts come in the order of what they tell.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from backends.wgpu.backend import VulkanBackend
from backends.wgpu.device.adapters import adapters
from benchmarks.machine import describe, print_heading
from benchmarks.vulkan_steps import Decoder, microbatch

ROOT: Final = Path(__file__).parents[1]
_PYTEST: Final = ("-m", "pytest", "-q", "-n", "2", "--durations", "0", "--durations-min", "20")
_TOLD_LINES: Final = 40
"""Of what a part prints, from its end."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What is there, by name; empty where there is none."""

    cuda: str
    vulkan: str
    why_no_vulkan: str = ""

    def lacking(self, needs: Sequence[str]) -> str:
        """Why a part that needs these cannot run; empty if it can."""
        reasons = {
            "cuda": "" if self.cuda else "torch has no CUDA device here",
            "vulkan": "" if self.vulkan else f"no card with Vulkan: {self.why_no_vulkan}",
        }
        return "; ".join(reasons[need] for need in needs if reasons[need])


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to be found out.

    Attributes:
        arguments: Of Python.
        needs: Kinds of device.
        limit_s: What it may take, of the time that is left.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    limit_s: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part."""

    part: Part
    result: str
    seconds: float = 0.0
    said: str = ""


PARTS: Final = (
    Part(
        "CUDA suite", (*_PYTEST, "tests/backends/test_conformance.py", "tests/backends/eager"),
        ("cuda",), 90,
    ),
    Part(
        "Vulkan suite",
        (*_PYTEST, "tests/backends/wgpu", "-k", "not random_module", "--maxfail", "20"),
        ("vulkan",), 180,
    ),
    Part("memory", ("-m", "benchmarks.cards", "--measure-memory"), ("vulkan", "cuda"), 60),
    Part("overhead on CUDA", ("-m", "benchmarks.overhead", "--backend", "cuda"), ("cuda",), 120),
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
    cuda = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    found = adapters()
    if isinstance(found, str):
        return Devices(cuda, "", found)
    card = next((adapter.name for adapter in found if not adapter.software), "")
    return Devices(cuda, card, "only software adapters")


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
            yield run(part, min(left, part.limit_s))


def run(part: Part, limit_s: float) -> Outcome:
    """A process of its own; what it printed is kept also if it ran out of time."""
    began = time.monotonic()
    running = subprocess.Popen(  # noqa: S603 -- parts are our own
        [sys.executable, *part.arguments],
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
    lines = [
        "# A real card", "", f"Machine: {describe()}",
        f"CUDA: {devices.cuda or 'none'}; Vulkan: {devices.vulkan or 'none'}", "",
        "| part | result | seconds |", "|---|---|---:|",
    ]  # fmt: skip
    lines += [f"| {each.part.name} | {each.result} | {each.seconds:.0f} |" for each in found]
    for each in found:
        if each.said:
            lines += ["", f"## {each.part.name}", "", "```", each.said, "```"]
    return "\n".join([*lines, ""])


def measure_memory() -> None:
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
    parser.add_argument("--measure-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_memory:
        measure_memory()
        return
    print_heading("What a real card is needed for")
    devices = found_devices()
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
