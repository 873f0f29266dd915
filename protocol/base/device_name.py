"""Names of backends and devices: `--backend cuda --gpus 0,1` or `--backend cuda0-1`."""

from __future__ import annotations

import difflib
import math
import re
import sys
from typing import Final

from protocol.base import limits
from protocol.base.errors import UsageError

DEVICE_BACKENDS: Final = ("cuda", "xpu", "mps", "accelerator", "vulkan", "cpu")
AUTO_ORDER: Final = tuple(
    name
    for name in DEVICE_BACKENDS
    if name != "accelerator" and (name != "mps" or sys.platform == "darwin")
)
"""The backends that `auto` tries, in order; torch's other accelerators, on which samestep is not
tested, must be named."""
BACKENDS: Final = ("auto", *DEVICE_BACKENDS, "scripted")
_NUMBERED: Final = re.compile(r"(cpu|cuda|xpu|accelerator|vulkan)([0-9]{1,4})(?:-([0-9]{1,4}))?")

_SPELLING: Final = re.compile(r"([a-z_]+)[ :]*([0-9][0-9, :-]*)?")
_OTHER_NAMES: Final = {
    "gpu": "cuda", "nvidia": "cuda", "card": "cuda", "rocm": "cuda", "hip": "cuda", "amd": "cuda",
    "intel": "xpu", "metal": "mps", "apple": "mps", "vk": "vulkan", "wgpu": "vulkan",
    "device": "cuda", "processor": "cpu", "host": "cpu",
}  # fmt: skip
"""Other names by which people and libraries call a backend."""
_MIN_SIMILARITY: Final = 0.7
"""Minimum similarity of a misspelled name: `vulcan` is close enough to vulkan, `tpu` is not to
xpu."""


def parse_backend(name: str) -> tuple[str, float]:
    """Return the backend's name and, for the scripted one, milliseconds per microbatch.

    Raises:
        UsageError: There is no such backend.
    """
    backend, colon, argument = name.partition(":")
    if backend not in BACKENDS or (colon and backend != "scripted"):
        raise UsageError(
            f"expected auto or one of {', '.join(AUTO_ORDER)}, a number or a range after it such "
            f"as cuda0 or cuda0-1, got {name!r}{_likely_meaning(name)}; see: worker devices"
        )
    try:
        microbatch_ms = float(argument) if colon else 0.0
    except ValueError:
        microbatch_ms = math.nan
    if not 0.0 <= microbatch_ms < math.inf:
        raise UsageError(f"expected scripted:MS with MS >= 0, got {name!r}")
    return backend, microbatch_ms


def _likely_meaning(name: str) -> str:
    """Return the name that was probably meant, such as cuda0 for `gpu0` or `cuda:0`."""
    spelled = _SPELLING.fullmatch(name.strip().lower())
    if spelled is None:
        return ""
    word, digits = spelled[1], spelled[2] or ""
    numbers = [int(number) for number in re.findall(r"[0-9]{1,4}", digits)]
    backend = _OTHER_NAMES.get(word, word)
    if backend not in BACKENDS:
        backend = next(
            iter(
                difflib.get_close_matches(backend, (*DEVICE_BACKENDS, "auto"), 1, _MIN_SIMILARITY)
            ),
            "",
        )
    if not backend or backend == "scripted":
        return ""
    if not numbers or backend in {"auto", "mps"}:
        return f"; did you mean {backend}?"
    first, last = numbers[0], numbers[-1]
    is_range = "-" in digits or numbers == list(range(first, last + 1))
    if first < last and is_range:
        return f"; did you mean {backend}{first}-{last}?"
    if len(numbers) == 1:
        return f"; did you mean {backend}{first}?"
    return f"; did you mean {backend}{first}, or a range such as {backend}0-1?"


def parse_devices(backend: str, gpus: str) -> tuple[str, tuple[int | str, ...]]:
    """Parse `--backend` and `--gpus`.

    A machine has one CPU, so its numbers only distinguish several workers on it. `cuda0-3` means
    cards 0 to 3, in one word that can be part of a service's name.

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
