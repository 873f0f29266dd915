"""The types of devices that torch supports, and the operations on them that samestep needs.

All operations use torch's generic interface (`torch.accelerator`, `torch.Stream`,
`torch.Event`, `torch.get_device_module`), so code that runs on CUDA also runs on ROCm, which torch
calls cuda too, and on Intel's XPU. `accelerator` is any other device that an extension adds to
torch.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from backends.base.device_errors import is_device_failure, is_out_of_memory, why_not_repeatable
from backends.base.interface import DeviceInfo
from protocol.base.errors import NO_MEMORY, DeviceError, DeviceOutOfMemory, describe_error
from protocol.machine.processor import processor_name


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """The properties of a kind of device.

    Attributes:
        backend: Name on the command line.
        title: Name in messages.
        is_numbered: Whether a machine can have several devices of this kind.
        copies_asynchronously: Whether devices have streams, events and pinned memory. Gradients are
            then added on the device and copied to the host while backward continues.
        has_memory_addresses: Whether `Tensor.data_ptr` is a memory address, so that it shows
            alignment.
        has_float64: Whether all devices of this kind support float64.
    """

    backend: str
    title: str
    is_numbered: bool = True
    copies_asynchronously: bool = True
    has_memory_addresses: bool = True
    has_float64: bool = True


KINDS: Final = {
    kind.backend: kind
    for kind in (
        DeviceKind("cpu", "CPU", is_numbered=False, copies_asynchronously=False),
        DeviceKind("cuda", "CUDA"),
        DeviceKind("xpu", "XPU"),
        DeviceKind(
            "mps", "MPS", is_numbered=False, copies_asynchronously=False,
            has_memory_addresses=False, has_float64=False,
        ),
        DeviceKind("accelerator", "torch's accelerator"),
    )
}  # fmt: skip


def torch_device(backend: str, index: int = 0) -> torch.device:
    """Return torch's device of this kind and number."""
    if not KINDS[backend].is_numbered:
        return torch.device(backend)
    if backend != "accelerator":
        return torch.device(backend, index)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "expected an accelerator, since the registry lists one"
    return torch.device(accelerator.type, index)


def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device."""
    return KINDS.get(device.type, KINDS["accelerator"])


def devices_of(backend: str) -> list[DeviceInfo]:
    """List the devices of a kind; if there is none, list one unusable device with the reason."""
    kind = KINDS[backend]
    if backend == "cpu":
        return [DeviceInfo("cpu", processor_name(), True, "")]
    if reason := _why_unavailable(kind):
        return [DeviceInfo(backend, kind.title, False, reason)]
    count = _device_module(torch_device(backend)).device_count() if kind.is_numbered else 1
    return [_device_info(backend, index) for index in range(count)]


def _why_unavailable(kind: DeviceKind) -> str:
    match kind.backend:
        case "cuda":
            # torch built with ROCm uses the same names for AMD's cards.
            if torch.version.cuda is None and torch.version.hip is None:
                return "this torch was built without CUDA"
            return "" if torch.cuda.is_available() else "torch finds no CUDA device or driver"
        case "xpu":
            return "" if torch.xpu.is_available() else "torch finds no XPU, or was built without it"
        case "mps":
            return "" if torch.backends.mps.is_available() else "torch finds no GPU of a Mac"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "torch finds no accelerator"
    return (
        f"torch's accelerator is {accelerator.type}; ask for that"
        if accelerator.type in KINDS
        else ""
    )


def _device_info(backend: str, index: int) -> DeviceInfo:
    device = torch_device(backend, index)
    reason = _why_too_old(device) if backend == "cuda" else ""
    name = device_name(device)
    return DeviceInfo(backend, name, not reason, reason, index, memory_bytes(device))


def _why_too_old(device: torch.device) -> str:
    """Return why this torch has no kernels for a card, empty if it has.

    By CUDA's compatibility rules, a binary kernel (sm_XY) runs on cards of its major version and at
    least its minor version, and an intermediate kernel (compute_XY) on every later card.
    """
    if torch.version.hip is not None:
        return ""
    capability = torch.cuda.get_device_capability(device)
    architectures = torch.cuda.get_arch_list()
    for architecture in architectures:
        form, _, number = architecture.partition("_")
        digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdecimal():
            continue
        supported = divmod(int(digits), 10)
        if supported <= capability and (form == "compute" or supported[0] == capability[0]):
            return ""
    if not architectures:
        return ""
    capability_text = f"{capability[0]}.{capability[1]}"
    return (
        f"torch {torch.__version__} has no kernels for compute capability {capability_text} (it "
        f"has {', '.join(architectures)}); use --backend vulkan, or an earlier torch"
    )


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def device_name(device: torch.device) -> str:
    """Return the device's model name."""
    if kind_of(device).is_numbered:
        return str(_device_module(device).get_device_name(device))
    return processor_name()


def memory_bytes(device: torch.device) -> int:
    """Return the size of the device's own memory; 0 if it has none."""
    if not kind_of(device).is_numbered:
        return 0
    return int(_device_module(device).get_device_properties(device).total_memory)


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, as CUDA calls them; 0 if torch does not report it."""
    properties = _device_module(device).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count", "max_compute_units"):
        if hasattr(properties, name):
            return int(getattr(properties, name))
    return 0


def has_float64(device: torch.device) -> bool:
    """Whether the device supports float64; Intel's Arc cards of the first generation do not."""
    if device.type != "xpu":
        return kind_of(device).has_float64
    return bool(torch.xpu.get_device_properties(device).has_fp64)


def enable_expandable_segments(device: torch.device) -> None:
    """Let a card's memory segments grow in place, so varying sequence lengths do not fragment
    memory.

    This sets an option of the process, so it must be called before the first tensor on the card. A
    user's environment variable takes precedence.
    """
    variables = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if device.type != "cuda" or torch.version.hip is not None or variables:
        return
    # Exists since torch 2.9, where the earlier name warns.
    set_options = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # noqa: SLF001
    (set_options or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")  # noqa: SLF001


def set_current(device: torch.device) -> None:
    """Make the device the calling thread's default."""
    if kind_of(device).is_numbered:
        _device_module(device).set_device(device)


def seed(device: torch.device, seed: int) -> None:
    """Seed the device's own generators."""
    if device.type == "mps":
        torch.mps.manual_seed(seed)
    elif device.type != "cpu":
        _device_module(device).manual_seed_all(seed)


def release_memory(device: torch.device) -> None:
    """Free unreferenced memory on the device, and torch's cache."""
    if device.type == "cpu":
        return
    gc.collect()  # a model may be in a reference cycle, and a full card starts no collection
    _device_module(device).empty_cache()


@contextmanager
def convert_device_errors(device: torch.device, need: str = "") -> Iterator[None]:
    """Context in which errors of a device become `DeviceError`; other errors pass through.

    Args:
        device: The device that computes.
        need: The computation that needs the memory, for the error message.

    Raises:
        DeviceError: The device has failed.
        DeviceOutOfMemory: The device has too little memory.
    """
    try:
        yield
    except RuntimeError as error:
        if device.type == "cpu" or describe_error(error) == NO_MEMORY:
            raise
        kind = kind_of(device)
        name = f"{kind.backend} {device.index}" if kind.is_numbered else kind.backend
        first_line = str(error).partition("\n")[0]
        if is_out_of_memory(error):
            advice = (
                f"{need or 'this'} does not fit; set a smaller batch.microbatch, "
                "model.gradient_checkpointing: true or a narrower model.base_dtype, or end what "
                "else uses the device"
            )
            raise DeviceOutOfMemory(name, f"out of memory: {advice} ({first_line})") from error
        if is_device_failure(error):
            raise DeviceError(name, first_line) from error
        if reason := why_not_repeatable(error):
            raise DeviceError(name, reason) from error
        raise
