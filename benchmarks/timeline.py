"""Times in traces at which a step's payloads are sent, its averages received and its update
begins."""

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
        step: Number of the step, from 0.
        senders: Number of workers that sent a payload.
        first_send_us: When the first worker or device sent its first payload.
        last_receive_us: When the last worker received its last averaged chunk.
        last_apply_us: When the last worker began the update, after the commit; a multi-device
            worker updates once for all its devices.
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
    """Return the steps between two instants, in order.

    A device of a multi-device worker counts as sending when it has a gradient, which the worker's
    process then sends.
    """
    sends: dict[int, list[float]] = {}
    receives: dict[int, list[float]] = {}
    applies: dict[int, list[float]] = {}
    event_names = [
        {event["name"].partition(" ")[0] for event in device_timeline.events}
        for device_timeline in timelines
    ]
    devices = ["backward" in names and "send" not in names for names in event_names]
    for timeline, names, is_device in zip(timelines, event_names, devices, strict=True):
        first_sends: dict[int, float] = {}
        is_group_process = any(devices) and "backward" not in names
        for event in timeline.events:
            if not start_us <= event["ts"] <= end_us or "step" not in event["args"]:
                continue
            name, step, at_us = event["name"], event["args"]["step"], event["ts"]
            if name == "apply step":  # the trace numbers steps from 1
                applies.setdefault(step - 1, []).append(at_us)
            elif name.startswith("receive block") and "attempt" in event["args"]:
                receives.setdefault(step, []).append(at_us)
            elif name.startswith("send block") and "lo" in event["args"] and not is_group_process:
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
    """Return the times from one step's update to the next update."""
    return [current.last_apply_us - previous.last_apply_us for previous, current in pairwise(steps)]
