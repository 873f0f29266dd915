"""Query each Vulkan device's memory from the loader, since wgpu does not report it.

This module makes a few calls of Vulkan 1.0 through ctypes, with structures as in the
specification's chapters "Devices and Queues" and "Memory Allocation". On any failure the memory is
unknown. The size is used only for display and for estimates, by which plans are refused.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_APPLICATION_INFO: Final = 0
_INSTANCE_CREATE_INFO: Final = 1
_API_1_1: Final = (1 << 22) | (1 << 12)
_DEVICE_LOCAL: Final = 1
_LOADERS: Final = {"win32": "vulkan-1.dll", "darwin": "libvulkan.1.dylib"}
"""Name of the loader by `sys.platform`; on Linux libvulkan.so.1."""


@dataclass(frozen=True, slots=True)
class DeviceHeaps:
    """A physical device's identity, and the size of its largest device-local heap."""

    name: str
    vendor_id: int
    device_id: int
    device_local_bytes: int


class _Application(ctypes.Structure):
    _fields_ = (
        ("s_type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("application_name", ctypes.c_char_p),
        ("application_version", ctypes.c_uint32),
        ("engine_name", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api_version", ctypes.c_uint32),
    )


class _InstanceCreate(ctypes.Structure):
    _fields_ = (
        ("s_type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_Application)),
        ("layer_count", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("api_version", ctypes.c_uint32),
        ("driver_version", ctypes.c_uint32),
        ("vendor_id", ctypes.c_uint32),
        ("device_id", ctypes.c_uint32),
        ("device_type", ctypes.c_int32),
        ("device_name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint64 * 128),  # UUID of the cache, limits, sparse properties, spare
    )


class _MemoryType(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint32), ("heap", ctypes.c_uint32))


class _MemoryHeap(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint64), ("flags", ctypes.c_uint32))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("type_count", ctypes.c_uint32),
        ("types", _MemoryType * 32),
        ("heap_count", ctypes.c_uint32),
        ("heaps", _MemoryHeap * 16),
    )


def memory_heaps() -> tuple[DeviceHeaps, ...]:
    """Return the largest device-local heap of each physical device; empty without a loader or
    instance."""
    try:
        vulkan = ctypes.CDLL(_LOADERS.get(sys.platform, "libvulkan.so.1"))
    except OSError:
        return ()
    application = _Application(s_type=_APPLICATION_INFO, api_version=_API_1_1)
    create = _InstanceCreate(s_type=_INSTANCE_CREATE_INFO, application=ctypes.pointer(application))
    instance = ctypes.c_void_p()
    if vulkan.vkCreateInstance(ctypes.byref(create), None, ctypes.byref(instance)):
        return ()
    try:
        return tuple(_physical_devices(vulkan, instance))
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _physical_devices(vulkan: ctypes.CDLL, instance: ctypes.c_void_p) -> Iterator[DeviceHeaps]:
    count = ctypes.c_uint32()
    if vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None) or not count.value:
        return
    devices = (ctypes.c_void_p * count.value)()
    if vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices):
        return
    for device in devices[: count.value]:
        properties, memory = _Properties(), _Memory()
        handle = ctypes.c_void_p(device)
        vulkan.vkGetPhysicalDeviceProperties(handle, ctypes.byref(properties))
        vulkan.vkGetPhysicalDeviceMemoryProperties(handle, ctypes.byref(memory))
        sizes = [
            heap.size for heap in memory.heaps[: memory.heap_count] if heap.flags & _DEVICE_LOCAL
        ]
        name = properties.device_name.decode(errors="replace")
        yield DeviceHeaps(name, properties.vendor_id, properties.device_id, max(sizes, default=0))
