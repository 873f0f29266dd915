"""Names of backends and devices: `--backend cuda --gpus 0,1` or `--backend cuda0-1`."""

from __future__ import annotations

import difflib
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

_SPELLED: Final = re.compile(r"([a-z_]+)[ :]*([0-9][0-9, :-]*)?")
_OTHER_NAMES: Final = {
    "gpu": "cuda", "nvidia": "cuda", "card": "cuda", "rocm": "cuda", "hip": "cuda", "amd": "cuda",
    "intel": "xpu", "metal": "mps", "apple": "mps", "vk": "vulkan", "wgpu": "vulkan",
    "device": "cuda", "processor": "cpu", "host": "cpu",
}  # fmt: skip
"""What other libraries and people call a backend."""
_LIKENESS: Final = 0.7
"""How alike a misspelt name must be: `vulcan` is, `tpu` is not `xpu`."""


def parse_backend(name: str) -> tuple[str, float]:
    """Return the kind of backend and, for the scripted one, milliseconds per microbatch.

    Raises:
        UsageError: There is no such backend.
    """
    kind, colon, argument = name.partition(":")
    if kind not in BACKENDS or (colon and kind != "scripted"):
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
    return kind, microbatch_ms


def _likely_meaning(name: str) -> str:
    """Return the name that was probably meant, such as cuda0 for `gpu0` or `cuda:0`."""
    spelled = _SPELLED.fullmatch(name.strip().lower())
    if spelled is None:
        return ""
    word, digits = spelled[1], spelled[2] or ""
    numbers = [int(number) for number in re.findall(r"[0-9]{1,4}", digits)]
    kind = _OTHER_NAMES.get(word, word)
    if kind not in BACKENDS:
        kind = next(iter(difflib.get_close_matches(kind, (*KINDS, "auto"), 1, _LIKENESS)), "")
    if not kind or kind == "scripted":
        return ""
    if not numbers or kind in {"auto", "mps"}:
        return f"; did you mean {kind}?"
    first, last = numbers[0], numbers[-1]
    is_range = "-" in digits or numbers == list(range(first, last + 1))
    if first < last and is_range:
        return f"; did you mean {kind}{first}-{last}?"
    if len(numbers) == 1:
        return f"; did you mean {kind}{first}?"
    return f"; did you mean {kind}{first}, or a range such as {kind}0-1?"


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
