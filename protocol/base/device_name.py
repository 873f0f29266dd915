"""Names of backends and devices: `--backend cuda --gpus 0,1` or `--backend cuda0-1`."""

from __future__ import annotations

import math
import re
import sys
from typing import Final

from protocol.base import limits
from protocol.base.errors import UsageError

KINDS: Final = ("cuda", "xpu", "mps", "accelerator", "vulkan", "cpu")
AUTO_ORDER: Final = tuple(
    kind for kind in KINDS if kind != "accelerator" and (kind != "mps" or sys.platform == "darwin")
)
"""Does not include torch's other accelerators, on which samestep was never tried."""
BACKENDS: Final = ("auto", *KINDS, "scripted")
_NUMBERED: Final = re.compile(r"(cpu|cuda|xpu|accelerator|vulkan)([0-9]{1,4})(?:-([0-9]{1,4}))?")


def parse_backend(name: str) -> tuple[str, float]:
    """Return the kind of backend and, for the scripted one, milliseconds per microbatch.

    Raises:
        UsageError: There is no such backend.
    """
    kind, colon, argument = name.partition(":")
    if kind not in BACKENDS or (colon and kind != "scripted"):
        backends = f"expected a backend, one of {', '.join(BACKENDS)}[:MS], got {name!r}"
        raise UsageError(f"{backends}{_numbered_hint(kind, argument)}")
    try:
        microbatch_ms = float(argument) if colon else 0.0
    except ValueError:
        microbatch_ms = math.nan
    if not 0.0 <= microbatch_ms < math.inf:
        raise UsageError(f"expected scripted:MS with MS >= 0, got {name!r}")
    return kind, microbatch_ms


def _numbered_hint(kind: str, argument: str) -> str:
    """Return the right spelling for torch's `cuda:1`; empty for other names."""
    if _NUMBERED.fullmatch(kind + argument) is None:
        return ""
    return f"; write {kind}{argument} for device {argument}; see: worker devices"


def parse_devices(backend: str, gpus: str) -> tuple[str, tuple[int | str, ...]]:
    """Parse `--backend` and `--gpus`.

    A machine has one CPU; its numbers distinguish several workers on it. `cuda0-3` means cards 0
    to 3, in one word that can be part of a service's name.

    Returns:
        The backend's name without a number, and the devices, each by number or by part of its
        name; empty if the options name none.

    Raises:
        UsageError: There is no such backend, the text does not name devices, or both options name
            devices.
    """
    numbered = _NUMBERED.fullmatch(backend)
    if numbered is None:
        parse_backend(backend)
        return backend, _parse_list(gpus)
    if gpus:
        raise UsageError(
            f"expected devices in --backend or in --gpus, got both ({backend} and {gpus}); "
            "remove one of them"
        )
    first, last = int(numbered[2]), int(numbered[3] or numbered[2])
    if not first <= last < first + limits.DEVICES_PER_WORKER:
        raise UsageError(f"--backend: expected devices such as cuda0-3, got {backend!r}")
    return numbered[1], tuple(range(first, last + 1))


def _parse_list(text: str) -> tuple[int | str, ...]:
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
