"""The cost of open status pages for a run: steps with and without ten tabs, alternating.

A tab makes the requests of the page's script: the stream of events, once the list of runs, and at
most every 0.7 s the status and the new part of the run's history. Devices sleep, so the exchange
and this machine determine the time of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp

from benchmarks.hostile import running_cluster
from benchmarks.machine import print_heading, print_table
from coordinator.operator.control_client import control_token
from tests.chaos.processes import Coordinator

REFRESH_INTERVAL_S: Final = 0.7
MAX_STEP_RATIO: Final = 1.02
MAX_MEMORY_MIB: Final = 10.0
_MIB: Final = 1 << 20


@dataclass(slots=True)
class Measurement:
    """The measurements of all turns with pages, or of all turns without."""

    steps_ms: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        """Return a row of the table."""
        growth_mib = max(self.memory_bytes) / _MIB
        return [name, str(len(self.steps_ms)), f"{median(self.steps_ms):.1f}", f"{growth_mib:.1f}"]


async def _open_tab(http: aiohttp.ClientSession, control: str) -> None:
    """Keep one page open."""
    event_received = asyncio.Event()

    async def listen() -> None:
        async with http.get(f"http://{control}/events") as answer:
            async for _ in answer.content:
                event_received.set()

    async def fetch(path: str) -> Any:
        async with http.get(f"http://{control}/{path}") as answer:
            return await answer.json()

    listen_task = asyncio.create_task(listen())
    last_step = 0
    await fetch("runs")
    while not listen_task.done():
        await fetch("status")
        last_step = (await fetch(f"history?after={last_step}"))["loss"]["full"]
        event_received.clear()
        await asyncio.sleep(REFRESH_INTERVAL_S)
        await event_received.wait()


async def _open_tabs(control: str, count: int) -> None:
    headers = {"Authorization": f"Bearer {control_token(control)}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        tabs = [asyncio.create_task(_open_tab(http, control)) for _ in range(count)]
        print("open", flush=True)
        await asyncio.gather(*tabs)


def _measure_turn(coordinator: Coordinator, steps: int, measurement: Measurement) -> None:
    first_event, last_step = len(coordinator.events), coordinator.step + steps
    with coordinator.memory() as growth:
        coordinator.wait_for("its steps", lambda _: coordinator.step >= last_step, first_event)
    commit_times_s = [
        event.at_s for event in coordinator.events[first_event:] if event.name == "committed"
    ]
    measurement.steps_ms += [(b - a) * 1e3 for a, b in pairwise(commit_times_s)]
    measurement.memory_bytes.append(growth.peak_bytes)


def measure(turns: int, steps: int, tabs: int) -> tuple[Measurement, Measurement]:
    """Measure turns without and with open pages."""
    without_pages, with_pages = Measurement(), Measurement()
    with tempfile.TemporaryDirectory() as name, running_cluster(Path(name)) as coordinator:
        command = [sys.executable, "-m", "benchmarks.page", "--tabs", str(tabs)]
        for _ in range(turns):
            _measure_turn(coordinator, steps, without_pages)
            with subprocess.Popen(  # noqa: S603 -- our own command
                [*command, "--of", coordinator.control], stdout=subprocess.PIPE
            ) as pages:
                assert pages.stdout is not None
                pages.stdout.readline()
                _measure_turn(coordinator, steps, with_pages)
                pages.kill()
    return without_pages, with_pages


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="turns of each kind")
    parser.add_argument("--steps", type=int, default=60, help="of each turn")
    parser.add_argument("--tabs", type=int, default=10)
    parser.add_argument("--of", metavar="HOST:PORT", help="only open the tabs")
    options = parser.parse_args()
    if options.of:
        asyncio.run(_open_tabs(options.of, options.tabs))
        return
    print_heading(f"{options.tabs} open pages during a run")
    without_pages, with_pages = measure(options.rounds, options.steps, options.tabs)
    print_table(
        ["", "steps", "median ms", "MiB"], [without_pages.row("without"), with_pages.row("with")]
    )
    ratio = median(with_pages.steps_ms) / median(without_pages.steps_ms)
    print(f"step with pages to one without: {ratio:.3f}; limit {MAX_STEP_RATIO}")
    print(f"limit of memory {MAX_MEMORY_MIB:g} MiB; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
