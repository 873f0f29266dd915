"""Run all tests and measurements that need a real card, in ten minutes, with a one-page report.

    python -m benchmarks.cards [--report cards.md] [--minutes 10] [--only PART ...] [--quick]

Each part is a process with a time limit, so a failure does not affect other parts. Parts that this
machine cannot run are skipped, and the report says why. The most informative parts come first.
`--quick` runs one case of each part, to check that the parts run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch.distributed

from backends.eager.torch_devices import torch_device
from backends.registry import devices as all_devices
from backends.wgpu.device.adapters import adapters
from benchmarks.card_measurements import is_standin
from benchmarks.machine import describe, print_heading

ROOT: Final = Path(__file__).parents[1]
_PYTEST: Final = ("-m", "pytest", "-q", "-n", "2", "--durations", "0", "--durations-min", "20")
TORCH_BACKENDS: Final = ("cuda", "xpu", "accelerator")
_ONE_PROCESS: Final = ("-m", "pytest", "-q", "-n", "0", "--tb", "short")
"""Runs tests in one process, so that each test has all memory of a card."""
_SHOWN_LINES: Final = 40
"""Number of last lines of a part's output in the report."""
_SEARCH_LIMIT_S: Final = 60.0
_STANDIN_NOTE: Final = (
    "**This machine has no cards: the parts ran on the stand-in device of tests/standin.** Passed",
    "parts show only that they run, nothing about kernels, bits, speed, temperature or NCCL.",
)
_END_LIMIT_S: Final = 10.0
"""How long to wait for the processes of a killed part."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The cards of this machine.

    Attributes:
        cards: Names of torch's cards.
        backend: Backend of torch's cards, for `--backend`.
        vulkan: Name of a card with a Vulkan driver; empty if there is none.
        why_no_vulkan: Why no card has a Vulkan driver.
        has_collectives: Whether torch.distributed computes on torch's cards.
        is_standin: Whether torch's cards are the stand-in device of tests/standin.
        why_no_cards: Why the search for cards failed; empty if it succeeded.
    """

    cards: tuple[str, ...] = ()
    vulkan: str = ""
    why_no_vulkan: str = ""
    backend: str = "cuda"
    has_collectives: bool = True
    is_standin: bool = False
    why_no_cards: str = ""

    def reason_to_skip(self, needed_devices: Sequence[str]) -> str:
        """Return why a part that needs these devices cannot run; empty if it can."""
        no_card = self.why_no_cards or "torch has no card here"
        is_cuda = self.cards and self.backend == "cuda"
        is_cuda_or_xpu = self.cards and self.backend != "accelerator"
        reasons = {
            "card": "" if self.cards else no_card,
            "two cards": "" if len(self.cards) > 1 else "torch has fewer than two cards here",
            "collectives": "" if self.has_collectives else "torch has no collectives for this card",
            "cuda": "" if is_cuda else "torch has no CUDA device here",
            "cuda or xpu": "" if is_cuda_or_xpu else "only for CUDA and XPU",
            "vulkan": "" if self.vulkan else f"no card with Vulkan: {self.why_no_vulkan}",
        }
        return "; ".join(reasons[need] for need in needed_devices if reasons[need])


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the report.

    Attributes:
        arguments: Arguments of Python; {backend} is replaced by `Devices.backend`.
        needed_devices: Keys of the devices that the part needs, see `Devices.reason_to_skip`.
        limit_s: Time limit for `--minutes 10`; it scales with `--minutes`.
        quick_arguments: Further arguments for `--quick`.
        environment: Further environment variables.
    """

    name: str
    arguments: tuple[str, ...]
    needed_devices: tuple[str, ...]
    limit_s: int
    quick_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a part."""

    part: Part
    result: str
    seconds: float = 0.0
    output: str = ""

    @property
    def last_line(self) -> str:
        """Return the line with the part's result."""
        return self.output.strip().rpartition("\n")[2].strip("= ")


def _measurement(part: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.card_measurements", part, "--kind", "{backend}")


_ONE_TEST: Final = ("-k", "gradients_equal_those_of_plain_torch")

PARTS: Final = (
    Part("model families against the CPU, twice", (*_ONE_PROCESS, "tests/backends/eager/models.py"),
         ("card",), 120, ("-k", "Llama and (full or int4)")),
    Part("fit and the HF trainer", (*_ONE_PROCESS, "tests/standin/library.py"), ("card",), 60,
         ("-k", "torch_unchanged or two_cards")),
    Part(
        "eager suite",
        (*_ONE_PROCESS, "tests/backends/eager", "tests/backends/test_conformance.py",
         "-k", "not vulkan"),
        ("card",), 90, _ONE_TEST,
    ),
    Part("a run's digest: one card, twice; two cards", _measurement("digests"), ("card",), 100,
         ("--quick",)),
    Part("memory, estimated and allocated", _measurement("memory"), ("card",), 60, ("--quick",)),
    Part("speed, temperature and clock", _measurement("speed"), ("card",), 60, ("--quick",)),
    Part(
        "streams, watched by torch", (*_ONE_PROCESS, "tests/backends/eager/test_eager.py"),
        ("cuda",), 60, _ONE_TEST, {"TORCH_CUDA_SANITIZER": "1"},
    ),
    Part("a base sharded over two cards", _measurement("shard"), ("two cards", "collectives"), 60,
         ("--quick",)),
    Part("speed of a run", ("-m", "benchmarks.overhead", "--backend", "{backend}"),
         ("cuda or xpu",), 120, ("--rounds", "1")),
    Part(
        "Vulkan suite",
        (*_PYTEST, "tests/backends/wgpu", "--maxfail", "20", "-k", "not random_module"),
        ("vulkan",), 180, ("-k", "matmul"),
    ),
    Part("canonical arithmetic by Vulkan", ("-m", "worker", "devices", "--canonical"),
         ("vulkan",), 60),
    Part("memory of Vulkan", _measurement("vulkan-memory"), ("vulkan", "cuda"), 60),
    Part(
        "decoders, Vulkan against CUDA",
        ("-m", "benchmarks.vulkan", "--only", "decoder", "--against", "cuda", "--rounds", "5"),
        ("vulkan", "cuda"), 120, ("--rounds", "1"),
    ),
    Part(
        "products, Vulkan against CUDA",
        ("-m", "benchmarks.vulkan", "--only", "matmul", "--against", "cuda"),
        ("vulkan", "cuda"), 60, ("--rounds", "1"),
    ),
    Part(
        "random programs", (*_PYTEST, "tests/backends/wgpu/test_random_programs.py"),
        ("vulkan",), 120, (), {"SAMESTEP_PROGRAMS": "200"},
    ),
)  # fmt: skip


def find_devices() -> Devices:
    """Find the cards of this machine, torch's and Vulkan's in separate processes: a driver may end
    its process."""
    torch_fields, vulkan_fields = _probe("torch"), _probe("vulkan")
    vulkan = {"why_no_vulkan": vulkan_fields} if isinstance(vulkan_fields, str) else vulkan_fields
    if isinstance(torch_fields, str):
        return Devices(**vulkan, why_no_cards=torch_fields)
    return Devices(**vulkan, **{**torch_fields, "cards": tuple(torch_fields["cards"])})


def _probe(function: str) -> dict[str, Any] | str:
    """Return the fields of `Devices` that a process finds, or the reason if it fails."""
    try:
        process = subprocess.run(  # noqa: S603 -- our own command
            [sys.executable, "-m", "benchmarks.cards", "--look-for", function], cwd=ROOT,
            capture_output=True, text=True, timeout=_SEARCH_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"the search for cards took more than {_SEARCH_LIMIT_S:.0f} s"
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        return f"the search for cards ended with exit code {process.returncode}: {last_line}"
    fields: dict[str, Any] = json.loads(process.stdout.strip().rpartition("\n")[2])
    return fields


def torch_cards() -> dict[str, object]:
    """Return the fields of `Devices` for torch's cards."""
    rows = [device for device in all_devices() if device.usable and not device.software]
    backend = next((device.backend for device in rows if device.backend in TORCH_BACKENDS), "cuda")
    cards = [device.name for device in rows if device.backend == backend]
    collectives = torch.distributed.Backend.default_device_backend_map
    return {
        "cards": cards, "backend": backend, "is_standin": bool(cards) and is_standin(backend),
        "has_collectives": bool(cards) and torch_device(backend).type in collectives,
    }  # fmt: skip


def vulkan_card() -> dict[str, object]:
    """Return the fields of `Devices` for Vulkan; a software adapter is not a card."""
    found_adapters = adapters()
    if isinstance(found_adapters, str):
        return {"why_no_vulkan": found_adapters}
    card = next((adapter.name for adapter in found_adapters if not adapter.software), "")
    return {"vulkan": card, "why_no_vulkan": "" if card else "only software adapters"}


def run_parts_in_order(
    parts: Sequence[Part], devices: Devices, seconds: float, *, is_quick: bool = False
) -> Iterator[Outcome]:
    """Run parts in order while there is time; yield their outcomes."""
    deadline_s = time.monotonic() + seconds
    for part in parts:
        left_s = deadline_s - time.monotonic()
        if reason := devices.reason_to_skip(part.needed_devices):
            yield Outcome(part, f"skipped: {reason}")
        elif left_s < 1:
            yield Outcome(part, f"skipped: no time is left; run it with --only {part.name!r}")
        else:
            limit_s = min(left_s, part.limit_s * max(1.0, seconds / 600.0))
            yield run_part(part, limit_s, devices.backend, is_quick=is_quick)


def run_part(part: Part, limit_s: float, backend: str, *, is_quick: bool = False) -> Outcome:
    """Run a part in its own process; keep the output even if the part exceeds its time limit."""
    start_s = time.monotonic()
    arguments = (*part.arguments, *(part.quick_arguments if is_quick else ()))
    process = subprocess.Popen(  # noqa: S603 -- parts are our own
        [sys.executable, *(argument.format(backend=backend) for argument in arguments)],
        env={**os.environ, "SAMESTEP_TESTED_BACKEND": backend, **part.environment},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
        result = "passed" if process.returncode == 0 else f"failed: exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        result = f"failed: not done within {limit_s:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)  # and its children
        try:
            output, _ = process.communicate(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            result += ", and its driver does not let the process end"
            output = error.stdout.decode(errors="replace") if error.stdout else ""
    last_lines = "\n".join(output.strip().splitlines()[-_SHOWN_LINES:])
    return Outcome(part, result, time.monotonic() - start_s, last_lines)


def format_report(
    devices: Devices, outcomes_so_far: Sequence[Outcome], *, is_quick: bool = False
) -> str:
    """Return the report in Markdown: the machine, a row for each part, then each part's output."""
    cards = f"{devices.backend}: {', '.join(devices.cards) or devices.why_no_cards or 'none'}"
    lines = [
        "# Cards",
        "",
        f"Machine: {describe()}",
        f"{cards}; Vulkan: {devices.vulkan or 'none'}",
    ]
    if devices.is_standin:
        lines += ["", *_STANDIN_NOTE]
    if is_quick:
        lines += ["", "One case of each part (--quick)."]
    lines += ["", "| part | result | last line of output | seconds |", "|---|---|---|---:|"]
    for outcome in outcomes_so_far:
        # A pipe character in a driver's message would end the table's column.
        last_line = outcome.last_line.replace("|", "/")
        lines.append(
            f"| {outcome.part.name} | {outcome.result} | {last_line} | {outcome.seconds:.0f} |"
        )
    for outcome in outcomes_so_far:
        if outcome.output:
            lines += ["", f"## {outcome.part.name}", "", "```", outcome.output, "```"]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run the parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("cards.md"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--look-for", choices=("torch", "vulkan"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look_for:
        look = {"torch": torch_cards, "vulkan": vulkan_card}[options.look_for]
        print(json.dumps(look()))
        return
    run_parts(options, find_devices())


def run_parts(options: argparse.Namespace, devices: Devices) -> None:
    """Run the selected parts, and write the report after each."""
    print_heading("Tests and measurements that need a real card")
    finished_outcomes = []
    parts = _selected_parts(options.only)
    for outcome in run_parts_in_order(parts, devices, 60 * options.minutes, is_quick=options.quick):
        print(f"{outcome.part.name}: {outcome.result} ({outcome.seconds:.0f} s)", flush=True)
        finished_outcomes.append(outcome)
        # The machine may be lost at any moment.
        options.report.write_text(
            format_report(devices, finished_outcomes, is_quick=options.quick), "utf-8"
        )
    if any(outcome.result.startswith("failed") for outcome in finished_outcomes):
        sys.exit(1)


def _selected_parts(names: Sequence[str] | None) -> list[Part]:
    return [part for part in PARTS if names is None or part.name in names]


if __name__ == "__main__":
    main()
