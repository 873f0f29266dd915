"""The reference for a Vulkan device: torch's eager mode in float32, on the CPU or CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from backends.eager.eager import EagerBackend

Against = Literal["auto", "cpu", "cuda"]

_CORES: Final = {5: 128, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 12: 128}
"""Float32 multiply-adds per cycle and multiprocessor, by the major compute capability (CUDA C++
Programming Guide, arithmetic instructions); data-center chips of two generations have half."""
_HALF: Final = frozenset({(6, 0), (8, 0)})


@dataclass(frozen=True, slots=True)
class TorchSide:
    """One torch device; its backend has turned TF32 off."""

    backend: EagerBackend

    @property
    def device(self) -> torch.device:
        """Where tensors go."""
        return self.backend.device

    @property
    def name(self) -> str:
        """For the heading."""
        return f"{self.device.type}, {self.backend.info.name}"

    @property
    def shares_cpu(self) -> bool:
        """Whether its work is CPU time of this process."""
        return self.device.type == "cpu"

    def synchronize(self) -> None:
        """Wait for what was asked for; CUDA returns before it is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_tflops_of(self, adapter: str) -> float | None:
        """Of the Vulkan adapter, if it is this very card and torch knows its clock."""
        if self.device.type != "cuda" or self.backend.info.name.lower() not in adapter.lower():
            return None
        card = torch.cuda.get_device_properties(self.device)
        clock_khz = int(getattr(card, "clock_rate", 0))
        return peak_tflops(card.multi_processor_count, (card.major, card.minor), clock_khz)


def torch_side(against: Against) -> TorchSide:
    """CUDA's first device where torch has one, else the CPU; or the one that is asked for."""
    has_cuda = torch.cuda.is_available()
    if against == "cuda" and not has_cuda:
        raise SystemExit("--against cuda: torch has no CUDA device here; say --against cpu")
    kind: Literal["cpu", "cuda"] = "cuda" if has_cuda and against != "cpu" else "cpu"
    return TorchSide(EagerBackend(kind))


def peak_tflops(multiprocessors: int, capability: tuple[int, int], clock_khz: int) -> float | None:
    """Float32 without tensor cores: two operations per core and cycle.

    Args:
        multiprocessors: Of the card.
        capability: Its compute capability.
        clock_khz: The highest; 0 if it is not known.
    """
    cores = _CORES.get(capability[0], 0) // (1 + (capability in _HALF))
    return 2 * multiprocessors * cores * clock_khz * 1e3 / 1e12 or None
