"""What `worker devices` says: each device, its memory, and how large a frozen base fits.

The rule of thumb is for LoRA on a decoder: a quarter of the memory is left to activations, the
adapter with its optimizer's state, one weight at a time that is wide, and the driver. One parameter
in sixteen is an embedding's, which stays float32, as in Llama 3 8B or Qwen 2.5 7B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from backends.base.interface import DeviceInfo
from backends.base.quantize import GROUP, STORAGE, stored_bytes
from protocol.base.limits import byte_size
from protocol.machine.memory import Memory, read_memory
from protocol.spec.sections.model import BaseDtype

TOLD: Final[tuple[BaseDtype, ...]] = tuple(STORAGE)
BASE_SHARE: Final = 3 / 4
"""Of the memory."""
_EMBEDDINGS: Final = 1 / 16
"""Of the parameters."""


def bytes_per_parameter(base_dtype: BaseDtype) -> float:
    """Of a base that is stored in this, its embeddings in float32."""
    narrow = stored_bytes(1, GROUP, STORAGE[base_dtype]) / GROUP
    return 4 * _EMBEDDINGS + narrow * (1 - _EMBEDDINGS)


def base_parameters(memory_bytes: int) -> dict[BaseDtype, int]:
    """How many parameters of a frozen base fit, by what it is stored in."""
    return {name: int(memory_bytes * BASE_SHARE / bytes_per_parameter(name)) for name in TOLD}


def memory_of(info: DeviceInfo) -> int:
    """The device's own, in bytes, or what can be had now of the host's; 0 if it is not known."""
    if info.memory_bytes:
        return info.memory_bytes
    if info.backend not in {"cpu", "mps"} and not info.software:
        return 0
    try:
        return without_swap(read_memory())
    except (OSError, ValueError):
        return 0  # not on this system


def without_swap(memory: Memory) -> int:
    """Of main memory; what the control group has taken it may give back."""
    return memory.free if memory.bound is None else min(memory.free, memory.bound)


def device_lines(devices: Sequence[DeviceInfo]) -> Iterator[str]:
    """A line of each, and under a usable one what fits."""
    for info in devices:
        memory_bytes = memory_of(info) if info.usable else info.memory_bytes
        memory = f", {byte_size(memory_bytes)}" if memory_bytes else ""
        memory += " free" if memory_bytes and not info.memory_bytes else ""
        verdict = "usable" if info.usable else f"not usable: {info.reason}"
        verdict += " (software: taken only with --backend vulkan)" if info.software else ""
        yield f"{info.backend} {info.index}: {info.name}{memory}: {verdict}"
        if info.usable and memory_bytes:
            yield f"  with lora a base fits of about {_parameters(base_parameters(memory_bytes))}"


def _parameters(fitting: Mapping[BaseDtype, int]) -> str:
    """Those that take as many bits are told of together."""
    alike = {
        count: [n for n, other in fitting.items() if other == count] for count in fitting.values()
    }
    one, *others = (f"{_billions(count)} in {' or '.join(names)}" for count, names in alike.items())
    return ", ".join([one.replace(" in ", " billion parameters in "), *others])


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}" if count < 10e9 else f"{count / 1e9:.0f}"


def device_document(
    devices: Sequence[DeviceInfo], canonical: Callable[[DeviceInfo], list[str]] | None = None
) -> dict[str, Any]:
    """The same for scripts: of each its row, `memory_bytes` (0: not known), whether that is `own`
    or the host's, and `base_parameters` by base_dtype where the device is usable.

    Args:
        devices: All that are here.
        canonical: Tries a usable device, and says what it can do in canonical arithmetic: its
            lines are `canonical` of the row. None: rows have no such key.
    """
    rows = []
    for info in devices:
        memory_bytes = memory_of(info) if info.usable else info.memory_bytes
        fitting = base_parameters(memory_bytes) if info.usable and memory_bytes else {}
        own = {"own_memory": bool(info.memory_bytes), "base_parameters": fitting}
        results = {}
        if canonical is not None:
            results = {"canonical": canonical(info) if info.usable else []}
        rows.append(asdict(info) | {"memory_bytes": memory_bytes} | own | results)
    return {"devices": rows}
