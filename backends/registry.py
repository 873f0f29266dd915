"""Which devices are here, which one is taken, and why the others are not.

`auto` goes down cuda -> mps (on a Mac) -> vulkan -> cpu and says what it passed over, software
Vulkan among it. A backend asked for by name never falls back, and a device that is asked for is
never the CPU. torch is imported only when a device that needs it is looked at.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from backends.base.interface import Backend, BackendChoice, DeviceInfo
from protocol.base.device_name import AUTO_ORDER, parse_backend
from protocol.base.errors import BackendUnavailable

if TYPE_CHECKING:
    from types import ModuleType


def choose(name: str, wanted: int | str | None = None) -> BackendChoice:
    """The backend of this name.

    Args:
        name: auto, cuda, mps, vulkan, cpu, scripted or scripted:MS (milliseconds per microbatch).
        wanted: Which device of its kind, by number or by part of its name in any case; None for
            the first. cpu, mps and scripted, asked for by name, have one, whatever is wanted.

    Raises:
        UsageError: There is no such name.
        BackendUnavailable: The named backend, or the wanted device, cannot be had here, with the
            reason.
    """
    kind, microbatch_ms = parse_backend(name)
    if kind == "scripted":
        from backends.scripted import ScriptedBackend  # noqa: PLC0415

        return BackendChoice(ScriptedBackend(microbatch_ms), "scripted was asked for by name")
    if kind != "auto":
        info = _named(kind, wanted)
        reason = f"{kind} was asked for by name{_among_others(kind, wanted)}"
        if info.software:
            reason += "; it is software, for tests: --backend cpu is several times as quick"
        return BackendChoice(_make(kind, info.index), reason)
    return _auto(wanted)


def refuse_missing(name: str, wanted: int | str | None = None) -> None:
    """See that a device that is asked for by name is here, before anything else is done.

    Args:
        name: As of `choose`.
        wanted: Likewise.

    Raises:
        UsageError: There is no such name.
        BackendUnavailable: It cannot be had here, with the reason.
    """
    kind, _ = parse_backend(name)
    if kind not in {"auto", "cpu", "scripted"}:
        _named(kind, wanted)


def devices() -> list[DeviceInfo]:
    """Every device here, usable or not, best kind first."""
    mps = _mps_device()
    # Told where there may be one: a row of it on every other machine would be noise.
    macs = [mps] if sys.platform == "darwin" else []
    return [*_cuda_devices(), *macs, *_vulkan_devices(), _cpu_device()]


def _named(kind: str, wanted: int | str | None) -> DeviceInfo:
    info = _device(kind, wanted)
    if not info.usable:
        raise BackendUnavailable(kind, info.reason)
    return info


def _auto(wanted: int | str | None) -> BackendChoice:
    passed_over: list[DeviceInfo] = []
    kinds = AUTO_ORDER if wanted is None else [kind for kind in AUTO_ORDER if kind != "cpu"]
    for kind in kinds:
        info = _device(kind, wanted)
        if info.usable and info.software:
            reason = f"{info.name} is software; ask for it with --backend {kind}"
            info = replace(info, usable=False, reason=reason)
        if info.usable:
            why = "; ".join(f"no {other.backend}: {other.reason}" for other in passed_over)
            reason = f"auto took {kind} ({why})" if why else f"auto took {kind}, the first choice"
            return BackendChoice(_make(kind, info.index), reason, tuple(passed_over))
        passed_over.append(info)
        if isinstance(wanted, int) and _device(kind, None).usable:
            break  # numbers count the devices of the first kind that there is
    reasons = "; ".join(f"{info.backend}: {info.reason}" for info in passed_over)
    if wanted is not None:
        reasons = f"device {wanted} was asked for, and is not there: {reasons}; see: worker devices"
    raise BackendUnavailable("auto", reasons)


def _make(kind: str, index: int) -> Backend:
    if kind == "vulkan":
        from backends.wgpu.backend import VulkanBackend  # noqa: PLC0415  (imports torch and wgpu)

        return VulkanBackend(index)
    if kind == "cpu":
        from backends.cpu import CpuBackend  # noqa: PLC0415  (imports torch)

        return CpuBackend()
    from backends.eager.eager import EagerBackend  # noqa: PLC0415  (imports torch)

    return EagerBackend("cuda" if kind == "cuda" else "mps", index)


def _device(kind: str, wanted: int | str | None) -> DeviceInfo:
    if kind == "cpu":
        return _cpu_device()
    if kind == "mps":
        return _mps_device()
    found = _vulkan_devices() if kind == "vulkan" else _cuda_devices()
    if not found[0].usable or wanted is None:
        return found[0]
    if isinstance(wanted, str):
        for info in found:
            if wanted.lower() in info.name.lower():
                return info
        names = ", ".join(repr(info.name) for info in found)
        reason = f"no device's name has {wanted!r} in it; this machine has {names}"
        return DeviceInfo(kind, kind.upper(), False, reason)
    if not 0 <= wanted < len(found):
        reason = f"there is no device {wanted}; this machine has {len(found)}, counted from 0"
        return DeviceInfo(kind, kind.upper(), False, reason, wanted)
    return found[wanted]


def _among_others(kind: str, wanted: int | str | None) -> str:
    """Says so where a part of a name is in several devices' names."""
    if kind in {"cpu", "mps"} or not isinstance(wanted, str):
        return ""
    found = _vulkan_devices() if kind == "vulkan" else _cuda_devices()
    fitting = [info.name for info in found if wanted.lower() in info.name.lower()]
    if len(fitting) == 1:
        return ""
    names = ", ".join(map(repr, fitting))
    return f", the first of {len(fitting)} whose names have {wanted!r} in them: {names}"


def _cuda_devices() -> list[DeviceInfo]:
    """One row for each CUDA device, or one unusable row that says why there is none."""
    torch = _torch()
    if isinstance(torch, str):
        return [DeviceInfo("cuda", "CUDA", False, torch)]
    # Built with ROCm it calls AMD's cards by the same names.
    if torch.version.cuda is None and torch.version.hip is None:
        return [DeviceInfo("cuda", "CUDA", False, "this torch was built without CUDA")]
    if not torch.cuda.is_available():
        return [DeviceInfo("cuda", "CUDA", False, "torch finds no CUDA device or driver")]
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append(
            DeviceInfo("cuda", properties.name, True, "", index, int(properties.total_memory))
        )
    return rows


def _vulkan_devices() -> list[DeviceInfo]:
    """One row for each Vulkan device, or one unusable row that says why there is none."""
    torch = _torch()
    if isinstance(torch, str):
        return [DeviceInfo("vulkan", "Vulkan", False, torch)]
    from backends.wgpu.device.adapters import adapters  # noqa: PLC0415  (looks for devices)

    found = adapters()
    if isinstance(found, str):
        return [DeviceInfo("vulkan", "Vulkan", False, found)]
    return [adapter.info(index) for index, adapter in enumerate(found)]


def _mps_device() -> DeviceInfo:
    """A Mac's GPU, which is one."""
    torch = _torch()
    if isinstance(torch, str):
        return DeviceInfo("mps", "MPS", False, torch)
    if not torch.backends.mps.is_available():
        return DeviceInfo("mps", "MPS", False, "torch finds no GPU of a Mac")
    from backends.eager.eager import EagerBackend  # noqa: PLC0415  (imports torch)

    return EagerBackend("mps").info


def _cpu_device() -> DeviceInfo:
    torch = _torch()
    if isinstance(torch, str):
        return DeviceInfo("cpu", "CPU", False, torch)
    from backends.eager.eager import EagerBackend  # noqa: PLC0415  (imports torch)

    return EagerBackend("cpu").info


def _torch() -> ModuleType | str:
    """The torch module, or why it is not there."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; pip install 'samestep[worker]'"
    try:
        import torch  # noqa: PLC0415  (seconds; only where a device needs it)
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {' '.join(str(error).split())}"
    return torch
