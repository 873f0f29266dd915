"""How a user names a backend and its devices: `--backend cuda --gpus 0,1`, `--backend cuda0-1`."""

from __future__ import annotations

import math
import re
import sys
from typing import Final

from protocol.base import limits
from protocol.base.errors import UsageError

KINDS: Final = ("cuda", "mps", "vulkan", "cpu")
AUTO_ORDER: Final = tuple(kind for kind in KINDS if kind != "mps" or sys.platform == "darwin")
BACKENDS: Final = ("auto", *KINDS, "scripted")
_NUMBERED: Final = re.compile(r"(cpu|cuda|vulkan)([0-9]{1,4})(?:-([0-9]{1,4}))?")


def parse_backend(name: str) -> tuple[str, float]:
    """Kind and, for the scripted backend, milliseconds per microbatch.

    Raises:
        UsageError: There is no such backend.
    """
    kind, colon, argument = name.partition(":")
    if kind not in BACKENDS or (colon and kind != "scripted"):
        backends = f"expected a backend out of {', '.join(BACKENDS)}[:MS], got {name!r}"
        raise UsageError(f"{backends}{_numbered_hint(kind, argument)}")
    try:
        microbatch_ms = float(argument) if colon else 0.0
    except ValueError:
        microbatch_ms = math.nan
    if not 0.0 <= microbatch_ms < math.inf:
        raise UsageError(f"expected scripted:MS with MS >= 0, got {name!r}")
    return kind, microbatch_ms


def _numbered_hint(kind: str, argument: str) -> str:
    """Whoever knows torch writes `cuda:1`."""
    if _NUMBERED.fullmatch(kind + argument) is None:
        return ""
    return f"; device {argument} of them is {kind}{argument}; see: worker devices"


def parse_devices(backend: str, gpus: str) -> tuple[str, tuple[int | str, ...]]:
    """Backend and its devices, by number or part of their name, out of `--backend` and `--gpus`.

    A machine has one CPU; numbers tell several workers on it apart. `cuda0-3` is cards 0 to 3, in
    one word for the name of a service.

    Returns:
        The backend's name without a number; the devices that are named, which may be none.

    Raises:
        UsageError: There is no such backend, or what is given names no devices, or both name one.
    """
    numbered = _NUMBERED.fullmatch(backend)
    if numbered is None:
        parse_backend(backend)
        return backend, _listed(gpus)
    if gpus:
        raise UsageError(f"expected a device in --backend {backend} or in --gpus, got both")
    first, last = int(numbered[2]), int(numbered[3] or numbered[2])
    if not first <= last < first + limits.DEVICES_PER_HOST:
        raise UsageError(f"--backend: expected devices such as cuda0-3, got {backend!r}")
    return numbered[1], tuple(range(first, last + 1))


def _listed(text: str) -> tuple[int | str, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    devices = tuple(int(part) if part.isdecimal() else part.lower() for part in parts)
    if not all(map(_is_device, devices)) or len(set(devices)) != len(devices):
        raise UsageError(
            "--gpus: expected distinct device numbers such as 0,1, or parts of their names, "
            f"got {text!r}"
        )
    return devices


def _is_device(device: int | str) -> bool:
    return isinstance(device, int) or (device[:1].isalnum() and not device.isnumeric())
