"""List this machine's devices and choose a backend, with the reason.

`auto` tries cuda, xpu, mps (on a Mac), vulkan and cpu in this order and reports the devices that
it skipped, including software Vulkan. A named backend never falls back to another backend, and a
named device is never replaced by the CPU. torch is imported only for devices that need it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from backends.base.interface import Backend, BackendChoice, DeviceInfo
from protocol.base.device_name import AUTO_ORDER, DEVICE_BACKENDS, parse_backend
from protocol.base.errors import BackendUnavailable

if TYPE_CHECKING:
    from types import ModuleType

    import torch

_SINGLE_DEVICE_KINDS: Final = frozenset({"cpu", "mps"})
"""Kinds of which a machine has one device."""


def choose(name: str, device: int | str | None = None) -> BackendChoice:
    """Choose a backend.

    Args:
        name: auto, cuda, xpu, mps, accelerator, vulkan, cpu, scripted or scripted:MS
            (milliseconds per microbatch).
        device: The device, by number or by part of its name, ignoring case; None for the first.
            It is ignored for cpu, mps and scripted, which have a single device.

    Raises:
        UsageError: There is no such backend.
        BackendUnavailable: The backend or the device cannot be used here, with the reason.
    """
    kind, microbatch_ms = parse_backend(name)
    if kind == "scripted":
        from backends.scripted import ScriptedBackend  # noqa: PLC0415

        return BackendChoice(ScriptedBackend(microbatch_ms), "scripted was asked for by name")
    if kind != "auto":
        info = _requested_device(kind, device)
        reason = f"{kind} was asked for by name{_describe_ambiguity(kind, device)}"
        if info.software:
            reason += "; it is software, for tests: --backend cpu is several times as quick"
        return BackendChoice(_build_backend(kind, info.index), reason)
    return _choose_automatically(device)


def refuse_missing_device(name: str, device: int | str | None = None) -> None:
    """Refuse a named device that is missing, before anything else is done.

    Args:
        name: As in `choose`.
        device: As in `choose`.

    Raises:
        UsageError: There is no such backend.
        BackendUnavailable: The device cannot be used here, with the reason.
    """
    kind, _ = parse_backend(name)
    if kind == "auto" and device is not None:
        _find_automatically(device)
    elif kind not in {"auto", "cpu", "scripted"}:
        _requested_device(kind, device)


@contextmanager
def trial_device(name: str, requested: int | str | None = None) -> Iterator[torch.device]:
    """Yield the device on which a user's loss is tried before a run: the card that `choose`
    returns.

    The CPU is used if torch cannot compute on that card (Vulkan), or not in float64 (MPS, some of
    Intel's), or if there is no such card; `choose` reports that later.

    Args:
        name: As in `choose`.
        requested: As in `choose`.

    Raises:
        DeviceError: The card fails, or has too little memory.
    """
    import torch  # noqa: PLC0415  (seconds)

    from backends.eager import torch_devices  # noqa: PLC0415  (imports torch)
    from backends.eager.eager import EagerBackend  # noqa: PLC0415

    kind, _ = parse_backend(name)
    device = torch.device("cpu")
    for kind_name in AUTO_ORDER if kind == "auto" else (kind,):
        device_kind = torch_devices.KINDS.get(kind_name)
        if device_kind is None or not device_kind.copies_asynchronously:
            continue
        if (info := _device(kind_name, requested)).usable:
            device = EagerBackend(kind_name, info.index).device
            if not torch_devices.has_float64(device):
                device = torch.device("cpu")
            break
    with torch_devices.convert_device_errors(device, "the model with a few samples"):
        yield device
        torch_devices.release_memory(device)  # another process may compute on it


@contextmanager
def restore_torch_settings() -> Iterator[None]:
    """Context after which every setting of torch that a backend changes is restored."""
    from backends.eager.numerics import restore_settings  # noqa: PLC0415  (imports torch)

    with restore_settings():
        yield


def devices() -> list[DeviceInfo]:
    """List this machine's usable devices, and the unusable ones of common backends with the
    reason; the preferred backend comes first."""
    return [
        row
        for kind in DEVICE_BACKENDS
        for row in _devices_of(kind)
        if row.usable or _is_common(kind)
    ]


def _is_common(kind: str) -> bool:
    """Whether a backend is listed even if the machine has no usable device of it."""
    return kind in {"cuda", "vulkan", "cpu"} or (kind == "mps" and sys.platform == "darwin")


def _requested_device(kind: str, device: int | str | None) -> DeviceInfo:
    info = _device(kind, device)
    if not info.usable:
        raise BackendUnavailable(kind, info.reason)
    return info


def _choose_automatically(device: int | str | None) -> BackendChoice:
    info, reason, passed_over = _find_automatically(device)
    return BackendChoice(_build_backend(info.backend, info.index), reason, passed_over)


def _find_automatically(
    device: int | str | None,
) -> tuple[DeviceInfo, str, tuple[DeviceInfo, ...]]:
    """Return the first usable device, the reason for it, and the devices passed over.

    Raises:
        BackendUnavailable: No device is usable, or none is the requested one.
    """
    passed_over: list[DeviceInfo] = []
    kinds = AUTO_ORDER if device is None else [kind for kind in AUTO_ORDER if kind != "cpu"]
    for kind in kinds:
        info = _device(kind, device)
        if info.usable and info.software:
            reason = f"{info.name} is software; ask for it with --backend {kind}"
            info = replace(info, usable=False, reason=reason)
        if info.usable:
            reasons_text = "; ".join(
                f"no {skipped.backend}: {skipped.reason}" for skipped in passed_over
            )
            reason = (
                f"auto took {kind} ({reasons_text})"
                if reasons_text
                else f"auto took {kind}, the first choice"
            )
            return info, reason, tuple(passed_over)
        passed_over.append(info)
        if isinstance(device, int) and _device(kind, None).usable:
            break  # a number refers to the first backend that has a usable device
    reasons = "; ".join(f"{info.backend}: {info.reason}" for info in passed_over)
    if device is not None:
        reasons = f"device {device} was asked for, and is not there: {reasons}; see: worker devices"
    raise BackendUnavailable("auto", reasons)


def _build_backend(kind: str, index: int) -> Backend:
    if kind == "vulkan":
        from backends.wgpu.backend import VulkanBackend  # noqa: PLC0415  (imports torch and wgpu)

        return VulkanBackend(index)
    if kind == "cpu":
        from backends.cpu import CpuBackend  # noqa: PLC0415  (imports torch)

        return CpuBackend()
    from backends.eager.eager import EagerBackend  # noqa: PLC0415  (imports torch)

    return EagerBackend(kind, index)


def _device(kind: str, device: int | str | None) -> DeviceInfo:
    devices = _devices_of(kind)
    if kind in _SINGLE_DEVICE_KINDS or device is None or not any(info.usable for info in devices):
        return devices[0]
    if isinstance(device, str):
        for info in devices:
            if device.lower() in info.name.lower():
                return info
        names = ", ".join(repr(info.name) for info in devices)
        reason = f"no device's name has {device!r} in it; this machine has {names}"
        return DeviceInfo(kind, kind.upper(), False, reason)
    if not 0 <= device < len(devices):
        reason = f"there is no device {device}; this machine has {len(devices)}, counted from 0"
        return DeviceInfo(kind, kind.upper(), False, reason, device)
    return devices[device]


def _describe_ambiguity(kind: str, device: int | str | None) -> str:
    """Return a note if a part of a name matches several devices, else an empty string."""
    if kind in _SINGLE_DEVICE_KINDS or not isinstance(device, str):
        return ""
    devices = _devices_of(kind)
    matching_names = [info.name for info in devices if device.lower() in info.name.lower()]
    if len(matching_names) == 1:
        return ""
    names = ", ".join(map(repr, matching_names))
    return f", the first of {len(matching_names)} whose names have {device!r} in them: {names}"


def _devices_of(kind: str) -> list[DeviceInfo]:
    """List the devices of a kind; if there is none, list one unusable device with the reason."""
    torch = _import_torch()
    if isinstance(torch, str):
        return [DeviceInfo(kind, kind.upper(), False, torch)]
    if kind == "vulkan":
        return _vulkan_devices()
    from backends.eager.torch_devices import devices_of  # noqa: PLC0415  (imports torch)

    return devices_of(kind)


def _vulkan_devices() -> list[DeviceInfo]:
    from backends.wgpu.device.adapters import adapters  # noqa: PLC0415  (looks for devices)

    devices = adapters()
    if isinstance(devices, str):
        return [DeviceInfo("vulkan", "Vulkan", False, devices)]
    return [adapter.info(index) for index, adapter in enumerate(devices)]


def _import_torch() -> ModuleType | str:
    """Return the torch module, or why it cannot be imported."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; pip install 'samestep[worker]'"
    try:
        import torch  # noqa: PLC0415  (seconds; only where a device needs it)
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {' '.join(str(error).split())}"
    return torch
