"""A stand-in accelerator for tests on machines without a card: torch's device `standin`.

`register()` builds device.cpp with the system's C++ compiler the first time (about 20 s), and
registers the two devices in torch. They use the CPU's kernels; copies, streams, memory and errors
behave like those of a card, see the first comment of device.cpp. A process with the variables of
`environment()` gets the device when it imports torch, which loads the backends that installed
packages declare.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils import backend_registration

from worker.shell import device_watch

DEVICES: Final = 2
NAME: Final = "standin"
MEMORY_LIMIT: Final = "SAMESTEP_STANDIN_BYTES"
"""Environment variable with the memory of each device."""
KERNELS_TO_FAULT: Final = "SAMESTEP_STANDIN_KERNELS"
"""Environment variable with the number of kernels after which the devices break."""
KERNELS_TO_HANG: Final = "SAMESTEP_STANDIN_HANGS"
"""Environment variable with the number of kernels after which the devices hang; the limits for
answers are then short."""
_PREPARATION_S: Final = 45.0
"""Limit for preparing a task; tasks of the tests take a second or two."""
TOUCHED: Final = "SAMESTEP_STANDIN_TOUCHED"
"""Environment variable with a folder where each process writes, at its end, one line for each
thread and device that it used."""
_SOURCE: Final = Path(__file__).with_name("device.cpp")
_BUILD: Final = Path(sys.prefix) / "standin"
"""In the virtual environment, because the library is built for the torch in it."""
_FLAGS: Final = ("-std=c++20", "-O1", "-g0", "-w", "-fPIC", "-shared")
_memory_bytes = [0]
_ENTRY_POINTS: Final = "[torch.backends]\nstandin = tests.standin:register\n"


def why_missing() -> str:
    """Return why the device is unavailable here; empty if it is available."""
    if shutil.which("g++") is None and not _library_path().exists():
        return "the stand-in accelerator needs g++ (Debian: apt install g++)"
    return ""


def _library_path() -> Path:
    key = json.dumps([torch.__version__, _FLAGS, sysconfig.get_platform()]).encode()
    digest = hashlib.sha256(key + _SOURCE.read_bytes()).hexdigest()
    return _BUILD / f"device-{digest[:16]}.so"


def _build() -> Path:
    """Compile the device library unless it exists. Processes may do so concurrently."""
    library = _library_path()
    if library.exists():
        return library
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    headers = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    _BUILD.mkdir(exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = ["g++", *_FLAGS, *headers, str(_SOURCE), "-o", str(unfinished), *libraries]
    subprocess.run(command, check=True)
    unfinished.rename(library)
    return library


def environment(folder: Path) -> dict[str, str]:
    """Return the variables for a process with the device.

    Args:
        folder: An empty folder for the package that names the device to torch.
    """
    package = folder / "samestep_standin-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: samestep-standin\nVersion: 0\n")
    (package / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SAMESTEP_TESTED_BACKEND": "accelerator",
    }


@cache
def register() -> None:
    """Register the device in this process's torch."""
    library = _build()
    backend_registration.rename_privateuse1_backend(NAME)
    torch.ops.load_library(library)
    torch._register_device_module(NAME, _device_module())
    backend_registration.generate_methods_for_privateuse1_backend()
    # On a card torch moves a parameter's data in place. For a PrivateUse1 device it otherwise makes
    # new parameters, and unties tied ones.
    torch.__future__.set_swap_module_params_on_conversion(True)
    if limit := os.environ.get(MEMORY_LIMIT):
        set_memory_limit(int(limit))
    if kernels := os.environ.get(KERNELS_TO_FAULT):
        text = "CUDA error: an illegal memory access was encountered"
        torch.ops.standin.set_fault_after(int(kernels), text)
    if kernels := os.environ.get(KERNELS_TO_HANG):
        device_watch._LEAST_S = device_watch._LEAST_WITH_DATA_S = 1.0  # type: ignore[misc]
        device_watch._PREPARATION_S = _PREPARATION_S  # type: ignore[misc]
        torch.ops.standin.set_fault_after(int(kernels), "")
    if folder := os.environ.get(TOUCHED):
        atexit.register(_write_touched, Path(folder))
    torch.distributed.Backend.register_backend(NAME, _make_collectives, devices=[NAME])


def _write_touched(folder: Path) -> None:
    lines = [*take_touched(), *take_reports()]
    (folder / f"rank-{os.environ.get('RANK', '')}-{os.getpid()}").write_text("\n".join(lines))


def _make_collectives(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from tests.standin.collectives import HostCollectives

    return HostCollectives(store, rank, size, timeout)


def _device_module() -> types.ModuleType:
    """Return the module that torch expects as `torch.standin`, like `torch.cuda`."""
    ops = torch.ops.standin

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(ops.current_device())
        return device if isinstance(device, int) else torch.device(device).index or 0

    @contextmanager
    def device(index: Any) -> Iterator[None]:
        previous_device = int(ops.current_device())
        ops.set_device(index_of(index))
        try:
            yield
        finally:
            ops.set_device(previous_device)

    module: Any = types.ModuleType("torch.standin")
    module.device = device
    module.device_count = lambda: DEVICES
    module.is_available = module.is_initialized = lambda: True
    module._initialized = True  # otherwise gradient checkpointing does not restore its generators
    module._is_in_bad_fork = lambda: False
    module.current_device = lambda: int(ops.current_device())
    module.set_device = lambda device: ops.set_device(index_of(device))
    module.manual_seed_all = module.manual_seed = lambda seed: ops.seed(seed % 2**63)
    module.synchronize = lambda device=None: ops.synchronize(index_of(device))
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    module.get_device_name = lambda _device=None: "Stand-in Accelerator"
    module.get_device_properties = lambda _device=None: types.SimpleNamespace(
        name="Stand-in Accelerator", total_memory=_memory_bytes[0]
    )
    module.get_device_capability = lambda _device=None: (0, 0)
    module.get_rng_state = lambda device=None: ops.rng_state(index_of(device))
    module.set_rng_state = lambda state, device=None: ops.set_rng_state(index_of(device), state)
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
    module.stream = lambda stream: nullcontext() if stream is None else stream
    module.empty_cache = lambda: None
    return module


def take_reports() -> list[str]:
    """Return reports of accesses that did not wait as required, since the last call."""
    return list(torch.ops.standin.take_reports())


def take_counts() -> dict[str, int]:
    """Return the counts of kernels, copies and waits by name, since the last call."""
    return dict(torch.ops.standin.take_counts())


def take_kernel_bytes() -> int:
    """Return the bytes of the tensors that kernels read and wrote, since the last call."""
    return int(torch.ops.standin.take_kernel_bytes())


def take_touched() -> list[str]:
    """Return a line for each pair of a device and a thread that used it, since the last call."""
    return list(torch.ops.standin.take_touched())


def peak_bytes(device: int) -> int:
    """Return the peak memory of a device since the last call."""
    return int(torch.ops.standin.peak_bytes(device))


def set_memory_limit(limit_bytes: int | None) -> None:
    """Limit the memory of each device; None: no limit."""
    _memory_bytes[0] = limit_bytes or 0
    torch.ops.standin.set_limit(-1 if limit_bytes is None else limit_bytes)


def set_fault(text: str = "") -> None:
    """Break all devices: each later call raises this text. Without a text, repair them."""
    torch.ops.standin.set_fault(text)


def set_float64(*, has_float64: bool) -> None:
    """Set whether the devices have float64, which Intel's Arc cards and Apple's do not have."""
    torch.ops.standin.set_float64(has_float64)


def set_hanging(*, hangs: bool) -> None:
    """Set whether waits for the device never return."""
    torch.ops.standin.set_hanging(hangs)
