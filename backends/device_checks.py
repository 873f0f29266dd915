"""Report the devices that a worker can use, and how to repair the others, for `worker doctor`.

The registry reports torch's view of the devices. These checks compute a gradient on each usable
device, and ask the kernel which cards exist, whether a driver is loaded, and whether this user may
open their device files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.version import InvalidVersion, Version

from backends.base.interface import DeviceInfo
from backends.registry import devices
from protocol.base.device_name import parse_backend
from protocol.base.limits import byte_size
from protocol.cli.doctor import Finding, failure, ok, warning

_DISPLAY_CLASS: Final = "0x03"
"""PCI class of display controllers."""
_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_DEVICE_FILES: Final = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "dri/renderD*", "kfd")
_INSTALL_HINT: Final = (
    "from NVIDIA's repository, since Debian's is older (docs/deploying.md), then reboot"
)
OLDEST_DRIVERS: Final = {11: "450", 12: "525", 13: "580"}
"""For each major version of CUDA, the oldest Linux driver that runs all of its minor versions.

Table 1 of NVIDIA's "CUDA Compatibility".
"""
LOCKED_CUDA: Final = 13
"""Major CUDA version of the torch in `requirements/cuda.txt`, whose heading names the driver."""


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """The file systems in which the kernel describes devices."""

    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    def cards(self) -> dict[str, int]:
        """Count the display controllers by vendor."""
        counts: dict[str, int] = {}
        for device in (self.sys / "bus/pci/devices").glob("*"):
            vendor = _VENDORS.get(_read_text(device / "vendor"))
            if vendor and _read_text(device / "class").startswith(_DISPLAY_CLASS):
                counts[vendor] = counts.get(vendor, 0) + 1
        return counts

    def inaccessible_files(self) -> list[str]:
        """List the device files that this user may not open."""
        files = (file for pattern in _DEVICE_FILES for file in sorted(self.dev.glob(pattern)))
        return [str(file) for file in files if not os.access(file, os.R_OK | os.W_OK)]

    def nvidia_driver(self) -> str:
        """Return the version of the loaded NVIDIA driver; empty if none is loaded."""
        words = _read_text(self.proc / "driver/nvidia/version").split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "")


def device_findings(
    name: str, requested: Sequence[int | str], machine: KernelFiles
) -> Iterator[Finding]:
    """Check the devices that a worker with these options uses.

    Args:
        name: The value of --backend.
        requested: Devices, by number or by part of their names, in lower case.
        machine: The kernel's file systems.
    """
    kind, _ = parse_backend(name)
    inaccessible = machine.inaccessible_files()
    if inaccessible:
        yield warning(
            "device files", f"this user may not open {', '.join(inaccessible)}",
            "usermod -aG render,video USER, then log in again",
        )  # fmt: skip
    # With auto, devices emulated in software are skipped, as in the registry.
    rows = [
        row for row in devices() if kind == row.backend or (kind == "auto" and not row.software)
    ]
    cards = machine.cards()
    for row in rows:
        if row.usable:
            yield _trial_finding(row)
        elif kind != "auto":
            yield failure("device", f"{row.backend}: {row.reason}", _advice(row, cards, machine))
        elif advice := _advice(row, cards, machine):
            yield warning("device", f"{row.backend}: {row.reason}", advice)
    usable_rows = [row for row in rows if row.usable]
    names = ", ".join(map(str, requested))
    if kind == "auto" and names and all(row.backend == "cpu" for row in usable_rows):
        missing_device = f"expected device {names}, found none but the CPU"
        yield failure("device", missing_device, "see: worker devices")
        return
    if not usable_rows:
        if kind == "auto":
            yield failure("device", "none is usable", "see: worker devices")
        return
    same_backend = [row for row in usable_rows if row.backend == usable_rows[0].backend]
    missing_names = ", ".join(
        str(device)
        for device in requested
        if not any(_matches(row, device) for row in same_backend)
    )
    if missing_names and usable_rows[0].backend != "cpu":
        missing_device = f"there is no {usable_rows[0].backend} device {missing_names}"
        yield failure("device", missing_device, "see: worker devices")


def _matches(row: DeviceInfo, device: int | str) -> bool:
    return row.index == device if isinstance(device, int) else device in row.name.lower()


def _trial_finding(row: DeviceInfo) -> Finding:
    """Compute a gradient on a device that the registry calls usable."""
    from backends.device_trial import is_gradient_right  # noqa: PLC0415 -- imports torch: seconds

    memory = f", {byte_size(row.memory_bytes)}" if row.memory_bytes else ""
    description = f"{row.backend} {row.index}: {row.name}{memory}"
    try:
        is_right = is_gradient_right(row.backend, row.index)
    except Exception as error:  # noqa: BLE001 -- any error of a driver is a finding
        reason = " ".join(str(error).split())[:300]
        advice = "is another program using all its memory? otherwise reinstall its driver"
        return failure("device", f"{description} cannot compute: {reason}", advice)
    if not is_right:
        return failure(
            "device", f"{description} computes wrongly", "do not use it, or update its driver"
        )
    return ok("device", f"{description}, computes")


def _advice(row: DeviceInfo, cards: dict[str, int], machine: KernelFiles) -> str:
    """Return advice that makes a device usable; empty if this machine has no such hardware."""
    if row.backend == "cuda":
        return _cuda_advice(cards, machine)
    if row.backend == "vulkan" and (cards.get("AMD") or cards.get("Intel")):
        return "apt install mesa-vulkan-drivers libvulkan1, and pip install 'wgpu>=0.32'"
    return ""


def _cuda_advice(cards: dict[str, int], machine: KernelFiles) -> str:
    driver = machine.nvidia_driver()
    cuda = _cuda_of_torch()
    oldest_driver = oldest_driver_for(cuda)
    if not driver:
        return (
            f"install NVIDIA's driver {oldest_driver} or later {_INSTALL_HINT}"
            if cards.get("NVIDIA")
            else ""
        )
    if is_older(driver, oldest_driver):
        requirement = f"torch with CUDA {cuda} needs" if cuda else "torch's CUDA build needs"
        return (
            f"NVIDIA's driver {driver} is loaded, {requirement} {oldest_driver} or later: install "
            f"that {_INSTALL_HINT}"
        )
    return f"NVIDIA's driver {driver} is loaded; {_torch_error()}"


def _cuda_of_torch() -> str | None:
    """Return the CUDA release that torch was built with; None without CUDA or torch."""
    try:
        import torch  # noqa: PLC0415 -- seconds
    except (ImportError, OSError):
        return None
    return torch.version.cuda


def _torch_error() -> str:
    """Return torch's reason for not using a driver that is recent enough."""
    try:
        import torch  # noqa: PLC0415 -- seconds
    except (ImportError, OSError):
        return "install torch: bash deploy/environment.sh run"
    if torch.version.cuda is None:
        return "install torch's CUDA build: TORCH=cuda bash deploy/environment.sh run"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        message = " ".join(str(error).split())[:300]
        return f"torch {torch.__version__} says: {message}; update the driver, then reboot"
    return "look at: nvidia-smi"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def oldest_driver_for(cuda: str | None) -> str:
    """Return the oldest driver that works with a CUDA release.

    Args:
        cuda: `torch.version.cuda`, such as "13.0"; None for the locked torch.

    Returns:
        A version; empty for an unknown CUDA release.
    """
    major = LOCKED_CUDA if cuda is None else int(cuda.split(".")[0])
    return OLDEST_DRIVERS.get(major, "")


def is_older(driver: str, required: str) -> bool:
    """Whether a driver is too old; False if the versions cannot be compared."""
    try:
        return Version(driver) < Version(required)
    except InvalidVersion:
        return False
