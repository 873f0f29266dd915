"""Everything that needs a real card, unattended and within ten minutes, with a report of one page.

    python -m benchmarks.cards [--report cards.md] [--minutes 10] [--only PART ...] [--quick]

Each part is a process with a time limit, so none ends with another. Parts that this machine cannot
run are skipped, and the report says why. The most informative parts come first. `--quick` runs one
case of each: whether the parts run, not what the card does.
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
"""So that a card's memory is one test's."""
_SHOWN_LINES: Final = 40
"""Of what a part prints, from its end."""
_SEARCH_S: Final = 60.0
_NO_CARDS: Final = (
    "**These are no cards, but the stand-in of tests/standin.** That the parts pass shows that",
    "they run; kernels and their bits, speed, temperature and NCCL are still open.",
)
_END_S: Final = 10.0
"""For the processes of a part that is killed."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What is there.

    Attributes:
        cards: Names of torch's cards.
        kind: What torch's cards are called by `--backend`.
        vulkan: Name of a card with a Vulkan driver; empty if there is none.
        why_no_vulkan: The reason for that.
        has_collectives: Whether torch.distributed computes on torch's cards.
        is_standin: Whether torch's cards are those of tests/standin.
        why_no_cards: Why they could not be looked for; empty if they could.
    """

    cards: tuple[str, ...] = ()
    vulkan: str = ""
    why_no_vulkan: str = ""
    kind: str = "cuda"
    has_collectives: bool = True
    is_standin: bool = False
    why_no_cards: str = ""

    def lacking(self, needs: Sequence[str]) -> str:
        """Why a part that needs these cannot run; empty if it can."""
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
        return "; ".join(reasons[need] for need in needs if reasons[need])


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to be found out.

    Attributes:
        arguments: Of Python; {kind} stands for what torch's cards are called.
        needs: Kinds of device.
        limit_s: What it may take of ten minutes, and in proportion of fewer or more.
        quick: Further arguments, with which it runs one case.
        environment: Further variables of the process.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    limit_s: int
    quick: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part."""

    part: Part
    result: str
    seconds: float = 0.0
    output: str = ""

    @property
    def last_line(self) -> str:
        """In which a part says what came out."""
        return self.output.strip().rpartition("\n")[2].strip("= ")


def _figures(part: str) -> tuple[str, ...]:
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
    Part("a run's digest: one card, twice; two cards", _figures("digests"), ("card",), 100,
         ("--quick",)),
    Part("memory, estimated and taken", _figures("memory"), ("card",), 60, ("--quick",)),
    Part("speed, temperature and clock", _figures("speed"), ("card",), 60, ("--quick",)),
    Part(
        "streams, watched by torch", (*_ONE_PROCESS, "tests/backends/eager/test_eager.py"),
        ("cuda",), 60, _ONE_SUBTREE, {"TORCH_CUDA_SANITIZER": "1"},
    ),
    Part("a base sharded over two cards", _figures("shard"), ("two cards", "collectives"), 60,
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
    Part("memory of Vulkan", _figures("vulkan-memory"), ("vulkan", "cuda"), 60),
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


def found_devices() -> Devices:
    """On this machine. Each look is a process: a driver may end the one that looks."""
    torchs, vulkans = _looked_for("torch"), _looked_for("vulkan")
    vulkan = {"why_no_vulkan": vulkans} if isinstance(vulkans, str) else vulkans
    if isinstance(torchs, str):
        return Devices(**vulkan, why_no_cards=torchs)
    return Devices(**vulkan, **{**torchs, "cards": tuple(torchs["cards"])})


def _looked_for(what: str) -> dict[str, Any] | str:
    """What a process finds, or why it finds nothing."""
    try:
        done = subprocess.run(  # noqa: S603 -- our own command
            [sys.executable, "-m", "benchmarks.cards", "--look-for", what], cwd=ROOT,
            capture_output=True, text=True, timeout=_SEARCH_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"looking for them takes more than {_SEARCH_S:.0f} s"
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        return f"looking for them ended with exit code {done.returncode}: {last}"
    answer: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return answer


def torch_cards() -> dict[str, object]:
    """Fields of `Devices`."""
    rows = [each for each in all_devices() if each.usable and not each.software]
    kind = next((each.backend for each in rows if each.backend in TORCH_KINDS), "cuda")
    cards = [each.name for each in rows if each.backend == kind]
    collectives = torch.distributed.Backend.default_device_backend_map
    return {
        "cards": cards, "kind": kind, "is_standin": bool(cards) and is_standin(kind),
        "has_collectives": bool(cards) and torch_device(kind).type in collectives,
    }  # fmt: skip


def vulkan_card() -> dict[str, object]:
    """Fields of `Devices`; a software adapter is no card."""
    adapters_here = adapters()
    if isinstance(adapters_here, str):
        return {"why_no_vulkan": adapters_here}
    card = next((adapter.name for adapter in adapters_here if not adapter.software), "")
    return {"vulkan": card, "why_no_vulkan": "" if card else "only software adapters"}


def outcomes(
    parts: Sequence[Part], devices: Devices, seconds: float, *, quick: bool = False
) -> Iterator[Outcome]:
    """Run one after the other, as long as there is time."""
    ends = time.monotonic() + seconds
    for part in parts:
        left_s = ends - time.monotonic()
        if lacking := devices.lacking(part.needs):
            yield Outcome(part, f"skipped: {lacking}")
        elif left_s < 1:
            yield Outcome(part, f"skipped: the time is used up; --only {part.name!r}")
        else:
            limit_s = min(left_s, part.limit_s * max(1.0, seconds / 600.0))
            yield run(part, limit_s, devices.kind, quick=quick)


def run(part: Part, limit_s: float, kind: str, *, quick: bool = False) -> Outcome:
    """Run a part in its own process; what it printed counts also if it ran out of time."""
    began = time.monotonic()
    arguments = (*part.arguments, *(part.quick if quick else ()))
    running = subprocess.Popen(  # noqa: S603 -- parts are our own
        [sys.executable, *(each.format(kind=kind) for each in arguments)],
        env={**os.environ, "SAMESTEP_TESTED_BACKEND": kind, **part.environment},
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = running.communicate(timeout=limit_s)
        result = "passed" if running.returncode == 0 else f"failed: exit code {running.returncode}"
    except subprocess.TimeoutExpired:
        result = f"failed: it takes more than {limit_s:.0f} s"
        os.killpg(running.pid, signal.SIGKILL)  # with what it has started
        try:
            output, _ = running.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired as held:
            result += ", and its driver does not let it end"
            output = held.stdout.decode(errors="replace") if held.stdout else ""
    last_lines = "\n".join(output.strip().splitlines()[-_SHOWN_LINES:])
    return Outcome(part, result, time.monotonic() - began, last_lines)


def report(devices: Devices, outcomes_so_far: Sequence[Outcome], *, quick: bool = False) -> str:
    """As Markdown: what ran where, a line for each part, then what each printed."""
    cards = f"{devices.kind}: {', '.join(devices.cards) or devices.why_no_cards or 'none'}"
    lines = [
        "# Cards",
        "",
        f"Machine: {describe()}",
        f"{cards}; Vulkan: {devices.vulkan or 'none'}",
    ]
    if devices.is_standin:
        lines += ["", *_NO_CARDS]
    if quick:
        lines += ["", "One case of each part (--quick)."]
    lines += ["", "| part | result | what came out | seconds |", "|---|---|---|---:|"]
    for each in outcomes_so_far:
        # A column's end in a driver's words would end the column.
        last_line = each.last_line.replace("|", "/")
        lines.append(f"| {each.part.name} | {each.result} | {last_line} | {each.seconds:.0f} |")
    for each in outcomes_so_far:
        if each.output:
            lines += ["", f"## {each.part.name}", "", "```", each.output, "```"]
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
    run_parts(options, found_devices())


def run_parts(options: argparse.Namespace, devices: Devices) -> None:
    """Run all parts that were asked for, and write the report after each."""
    print_heading("What a real card is needed for")
    finished = []
    parts = _chosen(options.only)
    for each in outcomes(parts, devices, 60 * options.minutes, quick=options.quick):
        print(f"{each.part.name}: {each.result} ({each.seconds:.0f} s)", flush=True)
        finished.append(each)
        # A card may be gone any moment.
        options.report.write_text(report(devices, finished, quick=options.quick), "utf-8")
    if any(each.result.startswith("failed") for each in finished):
        sys.exit(1)


def _chosen(names: Sequence[str] | None) -> list[Part]:
    return [part for part in PARTS if names is None or part.name in names]


if __name__ == "__main__":
    main()
