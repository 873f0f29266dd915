"""Which Vulkan adapters this machine has, and which one is meant by a number or part of a name.

wgpu is imported only here and in `device`; without it, or without a Vulkan loader and driver, the
answer is a reason in words. Software adapters (Mesa's lavapipe) come last and are taken only when
asked for, or when nothing else is there.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from protocol.errors import BackendUnavailable

Kind = Literal["discrete", "integrated", "software", "other"]

_KINDS: dict[str, Kind] = {
    "DiscreteGPU": "discrete",
    "IntegratedGPU": "integrated",
    "CPU": "software",
}
_ORDER: tuple[Kind, ...] = ("discrete", "integrated", "other", "software")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One Vulkan device.

    Attributes:
        name: As the driver calls it.
        kind: Its type.
        driver: Name and version of the driver.
        vendor_id: PCI vendor.
        device_id: PCI device.
        handle: wgpu's adapter.
    """

    name: str
    kind: Kind
    driver: str
    vendor_id: int
    device_id: int
    handle: Any

    @property
    def software(self) -> bool:
        """Whether it computes on the CPU."""
        return self.kind == "software"


@cache
def adapters() -> tuple[Adapter, ...] | str:
    """Every Vulkan adapter, best kind first, or why there is none. Asked once per process."""
    if importlib.util.find_spec("wgpu") is None:
        return "wgpu is not installed; pip install 'samestep[vulkan]'"
    # Mesa's layer that orders devices looks for a desktop and complains where there is none.
    os.environ.setdefault("NODEVICE_SELECT", "1")
    try:
        import wgpu  # noqa: PLC0415  (loads a library of 15 MB)
        from wgpu.backends.wgpu_native import extras  # noqa: PLC0415
    except (ImportError, OSError, RuntimeError) as error:
        return f"wgpu cannot be imported: {' '.join(str(error).split())}"
    extras.set_instance_extras(backends=["Vulkan"])
    found = [_adapter(handle) for handle in wgpu.gpu.enumerate_adapters_sync()]
    if not found:
        return (
            "no Vulkan driver answers; install the card's driver, or mesa-vulkan-drivers and "
            "libvulkan1 for Mesa's"
        )
    return tuple(sorted(found, key=lambda adapter: _ORDER.index(adapter.kind)))


def pick(found: tuple[Adapter, ...], wanted: int | str = 0) -> tuple[int, Adapter]:
    """The adapter of this number, or the first whose name has this part (any case).

    Raises:
        BackendUnavailable: There is no such adapter.
    """
    if isinstance(wanted, int):
        if 0 <= wanted < len(found):
            return wanted, found[wanted]
        here = f"this machine has {len(found)}, counted from 0"
        raise BackendUnavailable("vulkan", f"there is no device {wanted}; {here}")
    for index, adapter in enumerate(found):
        if wanted.lower() in adapter.name.lower():
            return index, adapter
    names = ", ".join(repr(adapter.name) for adapter in found)
    raise BackendUnavailable("vulkan", f"no device's name has {wanted!r} in it; there is {names}")


def _adapter(handle: Any) -> Adapter:
    info = handle.info
    kind = _KINDS.get(str(info["adapter_type"]), "other")
    name, driver = str(info["device"]), str(info["description"])
    return Adapter(name, kind, driver, int(info["vendor_id"]), int(info["device_id"]), handle)
