"""Keeps a GGUF file's widened weights on disk while a base is loaded that will be stored narrow.

transformers widens all of them to float32 before a device narrows the first. Here each large one is
written to an unnamed file as soon as it is wide, and mapped from there, so the system can drop its
pages. The values are the same; with a transformers release that loads differently, loading only
takes more memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import modeling_gguf_pytorch_utils as gguf_utils

from protocol.base import limits
from protocol.datasets.disk_texts import DiskFile

_SMALL_BYTES: Final = limits.MIB


@contextmanager
def weights_on_disk() -> Iterator[None]:
    """Context for `from_pretrained` of a GGUF file that is loaded for a narrow base.

    Raises:
        StorageFailed: The disk has no room for the weights in float32.
    """
    storage = _DiskWeights()
    register = nn.modules.module.register_module_parameter_registration_hook
    hook = register(storage.parameter)  # type: ignore[arg-type]  # its return value replaces the parameter
    original_numpy = vars(gguf_utils).get("np")
    try:
        if original_numpy is not None:
            vars(gguf_utils)["np"] = _Numpy(storage)
        yield
    finally:
        if original_numpy is not None:
            vars(gguf_utils)["np"] = original_numpy
        hook.remove()


def hide_progress_bar() -> None:
    """Hide the progress bar for GGUF files, which transformers' own switch does not."""
    if "tqdm" in vars(gguf_utils):
        vars(gguf_utils)["tqdm"] = _unchanged


def _unchanged(each: Any, **_: object) -> Any:
    return each


class _DiskWeights:
    """Weights in an unnamed file, which exists as long as any of them is in use."""

    def __init__(self) -> None:
        self._file = DiskFile()
        self._addresses: set[int] = set()

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values, mapped from the file; small ones copied."""
        if values.nbytes < _SMALL_BYTES or values.dtype != np.float32:
            return np.copy(values)
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        mapped = np.frombuffer(self._file.mapped(content), np.float32).reshape(values.shape)
        self._addresses.add(mapped.ctypes.data)
        return mapped

    def parameter(self, module: nn.Module, name: str, given: Any) -> nn.Parameter | None:
        """Replace a parameter that a module registers; None to keep it.

        transformers does not call `np.copy` for every model family.
        """
        del module, name
        values = given.detach() if isinstance(given, nn.Parameter) else None
        if values is None or values.device.type != "cpu" or values.data_ptr() in self._addresses:
            return None
        if values.dtype != torch.float32 or values.nbytes < _SMALL_BYTES:
            return None
        mapped = nn.Parameter(torch.from_numpy(self.array(values.numpy())), given.requires_grad)
        vars(mapped).update(vars(given))
        return mapped


class _Numpy:
    """Stands in for numpy in transformers' GGUF reader; only `copy` differs."""

    def __init__(self, storage: _DiskWeights) -> None:
        self.copy = storage.array

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
