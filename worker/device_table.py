"""The table of `worker devices`: each device, its memory, and the size of a frozen base that fits.

The estimate is for LoRA on a decoder: a quarter of the memory is reserved for activations, the
adapter with its optimizer state, one dequantized weight at a time, and the driver. One parameter in
sixteen belongs to an embedding, which stays float32, as in Llama 3 8B or Qwen 2.5 7B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from backends.base.interface import DeviceInfo
from backends.quantization.quantize import GROUP, STORAGE, stored_bytes
from protocol.base.limits import byte_size
from protocol.machine.memory import Memory, read_memory
from protocol.spec.sections.model import BaseDtype

BASE_DTYPES: Final[tuple[BaseDtype, ...]] = tuple(STORAGE)
BASE_SHARE: Final = 3 / 4
"""Share of the memory for the frozen base."""
_EMBEDDING_SHARE: Final = 1 / 16
"""Share of the parameters that belong to embeddings."""


def bytes_per_parameter(base_dtype: BaseDtype) -> float:
    """Return the mean size of a parameter of a base stored in this type, embeddings in float32."""
    quantized_bytes = stored_bytes(1, GROUP, STORAGE[base_dtype]) / GROUP
    return 4 * _EMBEDDING_SHARE + quantized_bytes * (1 - _EMBEDDING_SHARE)


def base_parameters(memory_bytes: int) -> dict[BaseDtype, int]:
    """Return how many parameters of a frozen base fit, by storage type."""
    return {
        name: int(memory_bytes * BASE_SHARE / bytes_per_parameter(name)) for name in BASE_DTYPES
    }


def memory_of(info: DeviceInfo) -> int:
    """Return the device's memory in bytes, or the host's free memory; 0 if unknown."""
    if info.memory_bytes:
        return info.memory_bytes
    if info.backend not in {"cpu", "mps"} and not info.software:
        return 0
    try:
        return without_swap(read_memory())
    except (OSError, ValueError):
        return 0  # not available on this system


def without_swap(memory: Memory) -> int:
    """Return the free main memory in bytes, within the limit of the control group."""
    return memory.free if memory.limit is None else min(memory.free, memory.limit)


def device_lines(devices: Sequence[DeviceInfo]) -> Iterator[str]:
    """Yield a line for each device; a usable device has a second line with the base sizes."""
    for info in devices:
        memory_bytes = memory_of(info) if info.usable else info.memory_bytes
        memory = f", {byte_size(memory_bytes)}" if memory_bytes else ""
        memory += " free" if memory_bytes and not info.memory_bytes else ""
        state = "usable" if info.usable else f"not usable: {info.reason}"
        state += " (software: used only with --backend vulkan)" if info.software else ""
        yield f"{info.backend} {info.index}: {info.name}{memory}: {state}"
        if info.usable and memory_bytes:
            sizes = _format_parameters(base_parameters(memory_bytes))
            yield f"  fits with LoRA: a base of about {sizes}"


def _format_parameters(parameter_counts: Mapping[BaseDtype, int]) -> str:
    """Format numbers of parameters by storage type; types with the same number share an entry."""
    names_by_count: dict[int, list[str]] = {}
    for name, count in parameter_counts.items():
        names_by_count.setdefault(count, []).append(name)
    entries = [
        f"{_format_billions(n)} in {' or '.join(names)}" for n, names in names_by_count.items()
    ]
    return ", ".join([entries[0].replace(" in ", " billion parameters in "), *entries[1:]])


def _format_billions(count: int) -> str:
    return f"{count / 1e9:.1f}" if count < 10e9 else f"{count / 1e9:.0f}"


def device_document(
    devices: Sequence[DeviceInfo], canonical: Callable[[DeviceInfo], list[str]] | None = None
) -> dict[str, Any]:
    """Return the table for scripts.

    Each row has the device's fields, `memory_bytes` (0 if unknown), `own_memory` (false if it is
    the host's), and `base_parameters` by storage type if the device is usable.

    Args:
        devices: The devices.
        canonical: Tests the canonical arithmetic of a usable device and returns lines for the key
            `canonical`. None: rows do not have that key.
    """
    rows = []
    for info in devices:
        memory_bytes = memory_of(info) if info.usable else info.memory_bytes
        parameter_counts = base_parameters(memory_bytes) if info.usable and memory_bytes else {}
        estimate = {"own_memory": bool(info.memory_bytes), "base_parameters": parameter_counts}
        results = {}
        if canonical is not None:
            results = {"canonical": canonical(info) if info.usable else []}
        rows.append(asdict(info) | {"memory_bytes": memory_bytes} | estimate | results)
    return {"devices": rows}
