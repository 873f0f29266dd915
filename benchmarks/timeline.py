"""When each step's payloads left, its averages arrived and it was applied, from traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Timeline:
    """One worker's events, in order."""

    events: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step over all workers; microseconds on the monotonic clock.

    Attributes:
        step: Counted from 0.
        senders: How many workers sent something.
        first_send_us: The first payload that any worker, or device of a host, sent.
        last_receive_us: The last averaged chunk came, at the worker where it came last.
        last_apply_us: The commit came and its update began, at the worker where it began last.
    """

    step: int
    senders: int
    first_send_us: float
    last_receive_us: float
    last_apply_us: float


def read_trace(path: Path) -> Timeline:
    """Read a Chrome trace."""
    return Timeline(tuple(event for event in json.loads(path.read_text()) if "ts" in event))


def step_times(timelines: Sequence[Timeline], start_us: float, end_us: float) -> list[StepTimes]:
    """The steps of the one run between two instants, in order.

    A device of a host has sent when it has a gradient; its host's process sends for it.
    """
    sends: dict[int, list[float]] = {}
    receives: dict[int, list[float]] = {}
    applies: dict[int, list[float]] = {}
    named = [{event["name"].partition(" ")[0] for event in each.events} for each in timelines]
    devices = ["backward" in names and "send" not in names for names in named]
    for timeline, names, is_device in zip(timelines, named, devices, strict=True):
        first_sends: dict[int, float] = {}
        is_host = any(devices) and "backward" not in names
        for event in timeline.events:
            if not start_us <= event["ts"] <= end_us or "step" not in event["args"]:
                continue
            name, step, at_us = event["name"], event["args"]["step"], event["ts"]
            if name in ("apply step", "take weights"):  # the trace counts steps taken
                applies.setdefault(step - 1, []).append(at_us)
            elif name.startswith("receive block") and "attempt" in event["args"]:
                receives.setdefault(step, []).append(at_us)
            elif name.startswith("send block") and "lo" in event["args"] and not is_host:
                first_sends.setdefault(step, at_us)
            elif name.startswith("backward block") and is_device:
                first_sends.setdefault(step, at_us + event["dur"])
        for step, at_us in first_sends.items():
            sends.setdefault(step, []).append(at_us)
    return [
        StepTimes(step, len(sends[step]), min(sends[step]), max(receives[step]), max(applies[step]))
        for step in sorted(sends.keys() & receives.keys() & applies.keys())
    ]


def intervals_us(steps: Sequence[StepTimes]) -> list[float]:
    """Time from one step's update to the next one's: the pace of the whole."""
    return [after.last_apply_us - before.last_apply_us for before, after in pairwise(steps)]
