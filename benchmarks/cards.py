"""Run everything that needs a real card, unattended in ten minutes, with a report of one page.

    python -m benchmarks.cards [--report cards.md] [--minutes 10] [--only PART ...] [--quick]

Each part is a process with a time limit, so a failure does not affect other parts. Parts that this
machine cannot run are skipped, and the report says why. The most informative parts come first.
`--quick` runs one case of each, to check that the parts run.
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
from benchmarks.card_figures import is_standin
from benchmarks.machine import describe, print_heading

ROOT: Final = Path(__file__).parents[1]
_PYTEST: Final = ("-m", "pytest", "-q", "-n", "2", "--durations", "0", "--durations-min", "20")
TORCH_KINDS: Final = ("cuda", "xpu", "accelerator")
_ONE_PROCESS: Final = ("-m", "pytest", "-q", "-n", "0", "--tb", "short")
"""Tests in one process, so that each has all memory of a card."""
_SHOWN_LINES: Final = 40
"""Number of last lines of a part's output in the report."""
_SEARCH_S: Final = 60.0
_NO_CARDS: Final = (
    "**These are no cards, but the stand-in of tests/standin.** That the parts pass shows that",
    "they run; kernels and their bits, speed, temperature and NCCL are still open.",
)
_END_S: Final = 10.0
"""How long to wait for the processes of a killed part."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The cards of this machine.

    Attributes:
        cards: Names of torch's cards.
        kind: Name of torch's cards for `--backend`.
        vulkan: Name of a card with a Vulkan driver; empty if there is none.
        why_no_vulkan: Why there is none.
        has_collectives: Whether torch.distributed computes on torch's cards.
        is_standin: Whether torch's cards are those of tests/standin.
        why_no_cards: Why the search for cards failed; empty if it succeeded.
    """

    cards: tuple[str, ...] = ()
    vulkan: str = ""
    why_no_vulkan: str = ""
    kind: str = "cuda"
    has_collectives: bool = True
    is_standin: bool = False
    why_no_cards: str = ""

    def reason_against(self, needed_devices: Sequence[str]) -> str:
        """Return why a part that needs these devices cannot run; empty if it can."""
        no_card = self.why_no_cards or "torch has no card here"
        is_cuda = self.cards and self.kind == "cuda"
        reasons = {
            "card": "" if self.cards else no_card,
            "two cards": "" if len(self.cards) > 1 else "torch has no two cards here",
            "collectives": "" if self.has_collectives else "torch has none for this card",
            "cuda": "" if is_cuda else "torch has no CUDA device here",
            "cuda or xpu": "" if self.cards and self.kind != "accelerator" else "for CUDA, XPU",
            "vulkan": "" if self.vulkan else f"no card with Vulkan: {self.why_no_vulkan}",
        }
        return "; ".join(reasons[need] for need in needed_devices if reasons[need])


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the report.

    Attributes:
        arguments: Arguments of Python; {kind} is replaced by `Devices.kind`.
        needed_devices: Kinds of devices.
        limit_s: Time limit if the whole takes ten minutes; it scales with `--minutes`.
        quick_arguments: Further arguments, with which it runs one case.
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


def _figures_part(part: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.card_figures", part, "--kind", "{kind}")


_ONE_SUBTREE: Final = ("-k", "gradients_are_those_of_plain_torch")

PARTS: Final = (
    Part("model families against the CPU, twice", (*_ONE_PROCESS, "tests/backends/eager/models.py"),
         ("card",), 120, ("-k", "Llama and (full or int4)")),
    Part("fit and the HF trainer", (*_ONE_PROCESS, "tests/standin/library.py"), ("card",), 60,
         ("-k", "torch_unchanged or two_cards")),
    Part(
        "eager suite",
        (*_ONE_PROCESS, "tests/backends/eager", "tests/backends/test_conformance.py",
         "-k", "not vulkan"),
        ("card",), 90, _ONE_SUBTREE,
    ),
    Part("a run's digest: one card, twice; two cards", _figures_part("digests"), ("card",), 100,
         ("--quick",)),
    Part("memory, estimated and taken", _figures_part("memory"), ("card",), 60, ("--quick",)),
    Part("speed, temperature and clock", _figures_part("speed"), ("card",), 60, ("--quick",)),
    Part(
        "streams, watched by torch", (*_ONE_PROCESS, "tests/backends/eager/test_eager.py"),
        ("cuda",), 60, _ONE_SUBTREE, {"TORCH_CUDA_SANITIZER": "1"},
    ),
    Part("a base sharded over two cards", _figures_part("shard"), ("two cards", "collectives"), 60,
         ("--quick",)),
    Part("speed of a run", ("-m", "benchmarks.overhead", "--backend", "{kind}"),
         ("cuda or xpu",), 120, ("--rounds", "1")),
    Part(
        "Vulkan suite",
        (*_PYTEST, "tests/backends/wgpu", "--maxfail", "20", "-k", "not random_module"),
        ("vulkan",), 180, ("-k", "matmul"),
    ),
    Part("canonical arithmetic by Vulkan", ("-m", "worker", "devices", "--canonical"),
         ("vulkan",), 60),
    Part("memory of Vulkan", _figures_part("vulkan-memory"), ("vulkan", "cuda"), 60),
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
    """On this machine. Each look is a process: a driver may end the one that looks."""
    torchs, vulkans = _probe("torch"), _probe("vulkan")
    vulkan = {"why_no_vulkan": vulkans} if isinstance(vulkans, str) else vulkans
    if isinstance(torchs, str):
        return Devices(**vulkan, why_no_cards=torchs)
    return Devices(**vulkan, **{**torchs, "cards": tuple(torchs["cards"])})


def _probe(function: str) -> dict[str, Any] | str:
    """Return the fields of `Devices` that a process finds, or the reason if it fails."""
    try:
        process = subprocess.run(  # noqa: S603 -- our own command
            [sys.executable, "-m", "benchmarks.cards", "--look-for", function], cwd=ROOT,
            capture_output=True, text=True, timeout=_SEARCH_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"looking for them takes more than {_SEARCH_S:.0f} s"
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        return f"looking for them ended with exit code {process.returncode}: {last_line}"
    answer: dict[str, Any] = json.loads(process.stdout.strip().rpartition("\n")[2])
    return answer


def torch_cards() -> dict[str, object]:
    """Return fields of `Devices`."""
    rows = [device for device in all_devices() if device.usable and not device.software]
    kind = next((device.backend for device in rows if device.backend in TORCH_KINDS), "cuda")
    cards = [device.name for device in rows if device.backend == kind]
    collectives = torch.distributed.Backend.default_device_backend_map
    return {
        "cards": cards, "kind": kind, "is_standin": bool(cards) and is_standin(kind),
        "has_collectives": bool(cards) and torch_device(kind).type in collectives,
    }  # fmt: skip


def vulkan_card() -> dict[str, object]:
    """Return fields of `Devices`; a software adapter is not a card."""
    adapters_here = adapters()
    if isinstance(adapters_here, str):
        return {"why_no_vulkan": adapters_here}
    card = next((adapter.name for adapter in adapters_here if not adapter.software), "")
    return {"vulkan": card, "why_no_vulkan": "" if card else "only software adapters"}


def outcomes(
    parts: Sequence[Part], devices: Devices, seconds: float, *, is_quick: bool = False
) -> Iterator[Outcome]:
    """Run one after the other, as long as there is time."""
    ends = time.monotonic() + seconds
    for part in parts:
        left_s = ends - time.monotonic()
        if reason := devices.reason_against(part.needed_devices):
            yield Outcome(part, f"skipped: {reason}")
        elif left_s < 1:
            yield Outcome(part, f"skipped: the time is used up; --only {part.name!r}")
        else:
            limit_s = min(left_s, part.limit_s * max(1.0, seconds / 600.0))
            yield run(part, limit_s, devices.kind, is_quick=is_quick)


def run(part: Part, limit_s: float, kind: str, *, is_quick: bool = False) -> Outcome:
    """Run a part in its own process; its output is kept even if it runs out of time."""
    start_s = time.monotonic()
    arguments = (*part.arguments, *(part.quick_arguments if is_quick else ()))
    process = subprocess.Popen(  # noqa: S603 -- parts are our own
        [sys.executable, *(argument.format(kind=kind) for argument in arguments)],
        env={**os.environ, "SAMESTEP_TESTED_BACKEND": kind, **part.environment},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
        result = "passed" if process.returncode == 0 else f"failed: exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        result = f"failed: it takes more than {limit_s:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)  # and its children
        try:
            output, _ = process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired as held:
            result += ", and its driver does not let it end"
            output = held.stdout.decode(errors="replace") if held.stdout else ""
    last_lines = "\n".join(output.strip().splitlines()[-_SHOWN_LINES:])
    return Outcome(part, result, time.monotonic() - start_s, last_lines)


def report(devices: Devices, outcomes_so_far: Sequence[Outcome], *, is_quick: bool = False) -> str:
    """Return the report in Markdown: the machine, a row for each part, then each part's output."""
    cards = f"{devices.kind}: {', '.join(devices.cards) or devices.why_no_cards or 'none'}"
    lines = [
        "# Cards",
        "",
        f"Machine: {describe()}",
        f"{cards}; Vulkan: {devices.vulkan or 'none'}",
    ]
    if devices.is_standin:
        lines += ["", *_NO_CARDS]
    if is_quick:
        lines += ["", "One case of each part (--quick)."]
    lines += ["", "| part | result | what came out | seconds |", "|---|---|---|---:|"]
    for outcome in outcomes_so_far:
        # A | in a driver's message would end the table's column.
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
    print_heading("What a real card is needed for")
    finished_outcomes = []
    parts = _selected_parts(options.only)
    for outcome in outcomes(parts, devices, 60 * options.minutes, is_quick=options.quick):
        print(f"{outcome.part.name}: {outcome.result} ({outcome.seconds:.0f} s)", flush=True)
        finished_outcomes.append(outcome)
        # The machine may be lost at any moment.
        options.report.write_text(
            report(devices, finished_outcomes, is_quick=options.quick), "utf-8"
        )
    if any(outcome.result.startswith("failed") for outcome in finished_outcomes):
        sys.exit(1)


def _selected_parts(names: Sequence[str] | None) -> list[Part]:
    return [part for part in PARTS if names is None or part.name in names]


if __name__ == "__main__":
    main()
