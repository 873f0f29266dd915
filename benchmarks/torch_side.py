"""The reference for a Vulkan device: torch's eager mode in float32, on the CPU or CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from backends.eager.eager import EagerBackend

Reference = Literal["auto", "cpu", "cuda"]

_CORES_PER_MULTIPROCESSOR: Final = {5: 128, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 12: 128}
"""Float32 multiply-adds per cycle and multiprocessor, by major compute capability (CUDA C++
Programming Guide, arithmetic instructions); the chips of `_HALF_RATE` have half as many."""
_HALF_RATE: Final = frozenset({(6, 0), (8, 0)})


@dataclass(frozen=True, slots=True)
class TorchSide:
    """One torch device, with TF32 turned off by its backend."""

    backend: EagerBackend

    @property
    def device(self) -> torch.device:
        """Return torch's device."""
        return self.backend.device

    @property
    def name(self) -> str:
        """Return the name for headings."""
        return f"{self.device.type}, {self.backend.info.name}"

    @property
    def shares_cpu(self) -> bool:
        """Return whether the device's work is CPU time of this process."""
        return self.device.type == "cpu"

    def synchronize(self) -> None:
        """Wait until the device has finished; CUDA calls return earlier."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_tflops_of(self, adapter: str) -> float | None:
        """Return the peak of a Vulkan adapter, if it is the same card and torch knows the clock."""
        if self.device.type != "cuda" or self.backend.info.name.lower() not in adapter.lower():
            return None
        card = torch.cuda.get_device_properties(self.device)
        clock_khz = int(getattr(card, "clock_rate", 0))
        return peak_tflops(card.multi_processor_count, (card.major, card.minor), clock_khz)


def torch_side(reference: Reference) -> TorchSide:
    """Return CUDA's first device if torch has one, else the CPU; or the requested one."""
    has_cuda = torch.cuda.is_available()
    if reference == "cuda" and not has_cuda:
        raise SystemExit("--against cuda: torch has no CUDA device here; use --against cpu")
    device_type: Literal["cpu", "cuda"] = "cuda" if has_cuda and reference != "cpu" else "cpu"
    return TorchSide(EagerBackend(device_type))


def peak_tflops(multiprocessors: int, capability: tuple[int, int], clock_khz: int) -> float | None:
    """Return the peak in float32 without tensor cores: two operations per core and cycle.

    Args:
        multiprocessors: Number of the card's multiprocessors.
        capability: Compute capability, (major, minor).
        clock_khz: Maximum clock; 0 if unknown.
    """
    cores = _CORES_PER_MULTIPROCESSOR.get(capability[0], 0) // (1 + (capability in _HALF_RATE))
    return 2 * multiprocessors * cores * clock_khz * 1e3 / 1e12 or None
