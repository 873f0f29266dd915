"""Settings of torch that determine the bits of a gradient, and their part of the numerics profile.

Two machines compute the same bits only if library versions, thread count, instruction set and
memory alignment agree; see "Why the bits agree" in ARCHITECTURE.md.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3

from backends.eager import torch_devices
from protocol.exact.subnormals import EXPECTED_BITS, FACTORS, INPUT_BITS

ALIGNMENT_BYTES: Final = 64
"""Kernels choose their code path by alignment; tensors mapped from a file are aligned to 8 bytes
only."""

_LOOP_SHARE: Final = 32_768
"""Fewest elements per thread when several threads share a loop (at::GRAIN_SIZE)."""

_BIT_DECIDING_VARIABLES: Final = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
)
_CARD_VARIABLES: Final = (
    "CUBLASLT_WORKSPACE_SIZE",
    "MIOPEN_DEBUG_CONV_DIRECT",
    "MIOPEN_DEBUG_CONV_GEMM",
    "MIOPEN_DEBUG_CONV_WINOGRAD",
    "MIOPEN_FIND_ENFORCE",
    "MIOPEN_FIND_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_TUNABLEOP_ENABLED",
    "ROCBLAS_LAYER",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)


def make_deterministic() -> None:
    """Make torch deterministic and turn TF32 off, process-wide. Call before CUDA is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Like use_deterministic_algorithms(True), which would also import torch's compiler and double a
    # worker's start time.
    torch.set_deterministic_debug_mode("error")
    for module, name, value in _settings():
        setattr(module, name, value)
    torch.backends.cudnn.allow_tf32 = False  # otherwise `cudnn.flags`, which reads it, raises
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is not deterministic


def _settings() -> Iterator[tuple[Any, str, object]]:
    """Yield each setting of torch that affects bits: module, attribute, and the value for a run."""
    backends = torch.backends
    # If set, torch fills new tensors with NaN; samestep writes new tensors before it reads them.
    yield torch.utils.deterministic, "fill_uninitialized_memory", False
    yield backends.cudnn, "benchmark", False
    for name in (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        if hasattr(backends.cuda.matmul, name):  # the last one exists since torch 2.7
            yield backends.cuda.matmul, name, False
    if not hasattr(backends, "fp32_precision"):  # before torch 2.9
        yield backends.cuda.matmul, "allow_tf32", False
        yield backends.cudnn, "allow_tf32", False
        return
    # Not set_float32_matmul_precision and allow_tf32: they do not override a user's setting for
    # convolutions, and torch raises if both are read.
    yield backends, "fp32_precision", "ieee"
    yield backends.cuda.matmul, "fp32_precision", "ieee"
    for library in (backends.cudnn, backends.mkldnn):
        for part in (library, *(getattr(library, n, None) for n in ("conv", "rnn", "matmul"))):
            if hasattr(part, "fp32_precision"):
                yield part, "fp32_precision", "ieee"


@contextmanager
def restore_settings() -> Iterator[None]:
    """Context after which every setting is restored that `make_deterministic` and `use_threads`
    change."""
    saved_settings = [(module, name, getattr(module, name)) for module, name, _ in _settings()]
    legacy_tf32 = _legacy_tf32()
    mode, threads = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    sdp = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_cudnn_sdp(sdp)
        for module, name, value in saved_settings:
            setattr(module, name, value)
        if legacy_tf32 is not None:
            torch.backends.cudnn.allow_tf32 = legacy_tf32


def _legacy_tf32() -> bool | None:
    """Return cuDNN's single switch for TF32, None if the user has set its parts differently."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return None


def use_threads(threads: int) -> None:
    """Set the thread count of the calling thread: OpenMP has one per thread.

    MKL's vector functions choose their code at first use. They are first called on one thread here,
    since with several the choice may differ between threads.
    """
    torch.set_num_threads(1)
    values = torch.linspace(0.1, 1.0, 4096)
    for function in (torch.sqrt, torch.exp, torch.log, torch.tanh, torch.erf, torch.sin, torch.cos):
        function(values)
    torch.set_num_threads(threads)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seed every generator that a model's forward may draw from, on the host and the device."""
    # torch.manual_seed would check every kind of device, at each microbatch.
    torch.default_generator.manual_seed(seed)
    torch_devices.seed(device, seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the global generator is what models draw from)
    random.seed(seed)


def move_to_own_storage(module: torch.nn.Module, device: torch.device) -> None:
    """Move every weight and buffer to its own aligned, contiguous storage on the device.

    Tied parameters stay tied, since they are one object.
    """
    tensors = (*module.parameters(), *module.buffers())
    if any(tensor.device != device for tensor in tensors):
        module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        has_real_address = torch_devices.kind_of(device).has_memory_addresses
        assert not has_real_address or tensor.data_ptr() % ALIGNMENT_BYTES == 0


def numerics_profile(device: torch.device, threads: int) -> Mapping[str, str]:
    """Return everything that determines the bits on this device, by name."""
    profile = {
        "device": device.type,
        "processor" if device.type == "cpu" else "name": torch_devices.device_name(device),
        "torch": str(torch.__version__),
        "torch_build": blake3(torch.__config__.show().encode()).hexdigest(16),
        "numpy": np.__version__,
    }
    # A card's bits do not depend on the host's processor: the card also sums microbatches.
    if not torch_devices.kind_of(device).copies_asynchronously:
        profile["threads"] = str(threads)
        profile["isa"] = torch.backends.cpu.get_cpu_capability()
    else:
        # Libraries choose kernels by these, and cards of one name can differ in them.
        profile["memory"] = str(torch_devices.memory_bytes(device))
        profile["multiprocessors"] = str(torch_devices.multiprocessors(device))
    if device.type == "xpu":
        profile["driver"] = str(torch.xpu.get_device_properties(device).driver_version)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        profile["cublas_workspace"] = os.environ["CUBLAS_WORKSPACE_CONFIG"]
        profile["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        profile["compute_capability"] = f"{major}.{minor}"
        if torch.version.hip is None:
            profile["cuda"] = str(torch.version.cuda)
            profile["driver"] = _cuda_driver()
            profile["cuda_libraries"] = _cuda_libraries()
        else:  # ROCm's libraries are part of torch, whose build is recorded above
            profile["rocm"] = str(torch.version.hip)
            profile["architecture"] = str(torch.cuda.get_device_properties(device).gcnArchName)
            profile["driver"] = f"{platform.system()} {platform.release()}"
    if device.type == "mps":
        profile["driver"] = f"macOS {platform.mac_ver()[0]}"
    card_variables = (*_BIT_DECIDING_VARIABLES, *_CARD_VARIABLES)
    for variable in card_variables if device.type != "cpu" else _BIT_DECIDING_VARIABLES:
        if variable in os.environ:
            profile[variable] = os.environ[variable]
    return profile


def keeps_subnormals(device: torch.device, *, in_every_thread: bool) -> bool:
    """Whether arithmetic keeps subnormal numbers: see `protocol.exact.subnormals`.

    Args:
        device: The device.
        in_every_thread: On a CPU, check all threads that share a loop, not only the calling one.
    """
    times = _LOOP_SHARE * torch.get_num_threads() if in_every_thread else 1
    inputs = torch.tensor(INPUT_BITS, dtype=torch.int32).view(torch.float32).repeat(times)
    product = inputs.to(device) * torch.tensor(FACTORS).repeat(times).to(device)
    expected = torch.tensor(EXPECTED_BITS, dtype=torch.int32).repeat(times)
    return bool(torch.equal(product.cpu().view(torch.int32), expected))


def _cuda_driver() -> str:
    """Return the release of NVIDIA's driver, if the kernel reports it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(errors="replace").split()
    except OSError:
        words = []
    return next((word for word in words if word[:1].isdigit() and "." in word), "not told")


def _cuda_libraries() -> str:
    """Return one digest of the installed NVIDIA libraries that torch uses."""
    libraries = {
        f"{distribution.name} {distribution.version}"
        for distribution in importlib.metadata.distributions()
        if (distribution.name or "").startswith("nvidia-") and distribution.name != "nvidia-ml-py"
    }
    return blake3("\n".join(sorted(libraries)).encode()).hexdigest(16)
