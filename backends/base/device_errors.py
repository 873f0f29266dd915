"""Distinguish the errors of a device, which another machine may not have, from those of a model."""

from __future__ import annotations

from typing import Final

import torch

_OUT_OF_MEMORY_TEXTS: Final = (
    "out of memory",
    "_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER, hipBLAS
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
)
_FAILURE_TEXTS: Final = (
    "CUDA error", "CUDA driver error", "CUDA driver initialization failed", "CUDA unknown error",
    "No CUDA GPUs are available", "CUDNN_STATUS", "CUBLAS_STATUS", "CUSOLVER_STATUS",
    "CUSPARSE_STATUS", "NCCL error", "NCCL Error",
    "HIP error", "HIPBLAS_STATUS", "rocblas_status", "miopenStatus",
    "XPU error", "UR_RESULT_ERROR", "level_zero backend failed", "XCCL error",
    "MPS backend", "Metal error",
)  # fmt: skip
"""Parts of the error texts of torch and of the libraries of NVIDIA, AMD, Intel and Apple."""
_DEVICE_CLASS: Final = getattr(torch, "AcceleratorError", None)
"""The class of device errors since torch 2.8; None in earlier releases."""
_NONDETERMINISTIC_TEXT: Final = "does not have a deterministic implementation"
_REPLACEMENTS: Final = {
    "cumsum": " (of x, (..., n), by x @ torch.ones(n, n, device=x.device).triu())",
    "adaptive_avg_pool2d": " (by avg_pool2d where the sizes divide)",
}
"""For a part of an operator's name, how to compute its values with a deterministic kernel."""
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, not the host, is out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in _OUT_OF_MEMORY_TEXTS)


def is_device_failure(error: BaseException) -> bool:
    """Whether the device, not the model, has failed.

    After a failure this process can compute nothing more on the device.
    """
    if _DEVICE_CLASS is not None and isinstance(error, _DEVICE_CLASS):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _FAILURE_TEXTS)


def is_bad_index(error: BaseException) -> bool:
    """Whether a kernel got an index outside its table, which also makes the device fail."""
    return isinstance(error, RuntimeError) and "device-side assert" in str(error)


def why_not_repeatable(error: BaseException) -> str:
    """Return why torch refused an operator whose bits change from run to run; empty if the error
    has another cause.

    In deterministic mode torch raises this error at the operator's forward or backward.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or "deterministic" not in text:
        return ""
    if _WORKSPACE in text:
        return (
            f"torch multiplied matrices before {_WORKSPACE} was set, so their bits change from run "
            f"to run; import samestep first, or set {_WORKSPACE}=:4096:8"
        )
    if _NONDETERMINISTIC_TEXT not in text:
        return ""
    operator = text.partition(" ")[0]
    replacement = next((text for name, text in _REPLACEMENTS.items() if name in operator), "")
    return (
        f"{operator} adds in no fixed order, so its bits change from run to run; replace that "
        f"operator{replacement}, or use --backend cpu or vulkan"
    )


def is_machine_specific(error: BaseException) -> bool:
    """Whether the computation that raised the error may succeed on another machine."""
    is_device_error = is_out_of_memory(error) or is_device_failure(error)
    return (is_device_error and not is_bad_index(error)) or bool(why_not_repeatable(error))
