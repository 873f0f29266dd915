"""List the machine's adapters: Vulkan; Metal on a Mac; Vulkan and DX12 on Windows.

All interfaces use the same shaders. wgpu is imported only here and in `device`. Without wgpu, or
without a driver, `adapters` returns the reason. Software adapters (Mesa's lavapipe) come last, and
`backends.registry` uses them only on request.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from backends.base.interface import DeviceInfo
from backends.wgpu.device.memory_heaps import DeviceHeaps, memory_heaps

Kind = Literal["discrete", "integrated", "software", "other"]

_KINDS: dict[str, Kind] = {
    "DiscreteGPU": "discrete",
    "IntegratedGPU": "integrated",
    "CPU": "software",
}
_INTERFACES: Final = {"darwin": ("Metal",), "win32": ("Vulkan", "DX12")}
"""wgpu's names of the interfaces, by `sys.platform`; elsewhere only Vulkan."""
_ORDER: tuple[Kind, ...] = ("discrete", "integrated", "other", "software")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One device, through one interface of the system.

    Attributes:
        name: The driver's name of the device.
        kind: Type of the device.
        interface: Vulkan, Metal or D3D12, as wgpu names them.
        driver: Name and version of the driver; on a Mac, of the system.
        vendor_id: PCI vendor.
        device_id: PCI device.
        memory_bytes: Device memory; 0 if unknown or shared with the host.
        handle: wgpu's adapter.
    """

    name: str
    kind: Kind
    interface: str
    driver: str
    vendor_id: int
    device_id: int
    memory_bytes: int
    handle: Any

    @property
    def software(self) -> bool:
        """Whether the device is emulated on the CPU."""
        return self.kind == "software"

    def info(self, index: int) -> DeviceInfo:
        """Return the device's row in `worker devices`."""
        suffix = "" if self.interface == "Vulkan" else f" ({self.interface})"
        return DeviceInfo(
            "vulkan",
            f"{self.name}{suffix}",
            True,
            "",
            index,
            self.memory_bytes,
            software=self.software,
        )


@cache
def adapters() -> tuple[Adapter, ...] | str:
    """Return all adapters, discrete GPUs first, or why there are none. They are queried once per
    process."""
    if importlib.util.find_spec("wgpu") is None:
        return "wgpu is not installed; run deploy/environment.sh, or pip install 'wgpu>=0.32'"
    # Mesa's device-select layer logs errors on machines without a desktop.
    os.environ.setdefault("NODEVICE_SELECT", "1")
    try:
        import wgpu  # noqa: PLC0415  (loads a library of 15 MB)
        from wgpu.backends.wgpu_native import extras  # noqa: PLC0415
    except (ImportError, OSError, RuntimeError) as error:
        return f"wgpu cannot be imported: {' '.join(str(error).split())}"
    extras.set_instance_extras(backends=_INTERFACES.get(sys.platform, ("Vulkan",)))
    heaps = list(memory_heaps())
    available = [_adapter(handle, heaps) for handle in wgpu.gpu.enumerate_adapters_sync()]
    if not available:
        return (
            "there is no Vulkan driver; install the GPU's driver, or mesa-vulkan-drivers and "
            "libvulkan1 for Mesa's"
        )
    return tuple(sorted(available, key=lambda adapter: _ORDER.index(adapter.kind)))


def _adapter(handle: Any, heaps: list[DeviceHeaps]) -> Adapter:
    info = handle.info
    kind = _KINDS.get(str(info["adapter_type"]), "other")
    name, driver = str(info["device"]), str(info["description"])
    if sys.platform == "darwin":
        driver = f"macOS {platform.mac_ver()[0]} {driver}".strip()
    vendor_id, device_id = int(info["vendor_id"]), int(info["device_id"])
    memory_bytes = 0
    for row in heaps:
        if (row.name, row.vendor_id, row.device_id) == (name, vendor_id, device_id):
            memory_bytes = 0 if kind == "software" else row.device_local_bytes
            break
    interface = str(info["backend_type"])
    return Adapter(name, kind, interface, driver, vendor_id, device_id, memory_bytes, handle)
