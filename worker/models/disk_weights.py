"""Keep converted weights on disk while loading a base that will be stored in low precision.

transformers converts all weights before the device quantizes the first: it converts GGUF files and
checkpoints of several dtypes to float32, and stacks the experts of a mixture. Here each large
weight is written to an unnamed file as soon as it is converted. The file is memory-mapped, so the
weight's pages can be dropped. Weights that safetensors has mapped are not copied. Values do not
change. If a transformers release loads differently, loading only takes more memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import modeling_gguf_pytorch_utils as gguf_utils

from protocol.base import limits
from protocol.datasets.disk_texts import DiskFile
from protocol.machine.allocator import give_back_freed_memory
from protocol.machine.mapped_pages import is_mapped_file, release_mapped_files

_SMALL_BYTES: Final = limits.MIB
_RELEASE_BATCH_BYTES: Final = 128 * limits.MIB
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_SEQUENTIAL_LOAD: Final = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that keeps transformers' threads from converting weights before they are
needed."""


@contextmanager
def weights_on_disk(directory: Path) -> Iterator[None]:
    """Context for `from_pretrained` that keeps converted weights on disk.

    Args:
        directory: Directory of the model's files, whose pages are released.

    Raises:
        StorageFailed: The disk has no room for the converted weights.
    """
    storage = _DiskWeights(directory)
    previous_setting = os.environ.get(_SEQUENTIAL_LOAD)
    os.environ[_SEQUENTIAL_LOAD] = "1"
    register = nn.modules.module.register_module_parameter_registration_hook
    hook = register(storage.store_parameter)  # type: ignore[arg-type]  # its return value replaces the parameter
    original_numpy = vars(gguf_utils).get("np")
    try:
        if original_numpy is not None:
            vars(gguf_utils)["np"] = _NumpyWithDiskCopy(storage)
        yield
    finally:
        if original_numpy is not None:
            vars(gguf_utils)["np"] = original_numpy
        hook.remove()
        if previous_setting is None:
            del os.environ[_SEQUENTIAL_LOAD]
        else:
            os.environ[_SEQUENTIAL_LOAD] = previous_setting


def hide_progress_bar() -> None:
    """Hide the progress bar for GGUF files, which transformers' own option does not hide."""
    if "tqdm" in vars(gguf_utils):
        vars(gguf_utils)["tqdm"] = _no_progress_bar


def _no_progress_bar(iterable: Any, **_: object) -> Any:
    return iterable


class _DiskWeights:
    """Weights in an unnamed file, which exists while any of the weights is in use."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = DiskFile()
        self._unreleased_bytes = 0

    def store_array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Store values and return them as mapped; copy them if they are small or not float32."""
        if values.nbytes < _SMALL_BYTES or values.dtype != np.float32:
            return np.copy(values)
        return self._write_and_map(np.ascontiguousarray(values))

    def store_parameter(self, module: nn.Module, name: str, original: Any) -> nn.Parameter | None:
        """Store a parameter that a module registers, and return its mapped replacement.

        Returns None for a parameter that stays in memory. The signature is that of torch's hook.
        """
        del module, name
        values = original.detach() if isinstance(original, nn.Parameter) else None
        if values is None or values.device.type != "cpu" or values.nbytes < _SMALL_BYTES:
            return None
        if values.dtype not in _DTYPES or is_mapped_file(values.data_ptr()):
            return None
        content = self._write_and_map(values.contiguous().view(torch.uint8).numpy())
        mapped_values = torch.from_numpy(content).view(values.dtype)
        mapped_parameter = nn.Parameter(mapped_values, original.requires_grad)
        vars(mapped_parameter).update(vars(original))
        return mapped_parameter

    def _write_and_map(self, values: NDArray[Any]) -> NDArray[Any]:
        content = self._file.append_mapped(values.reshape(-1).view(np.uint8).data)
        self._unreleased_bytes += len(content)
        if self._unreleased_bytes > _RELEASE_BATCH_BYTES:
            self._unreleased_bytes = 0
            release_mapped_files(self._directory)
            give_back_freed_memory()
        return np.frombuffer(content, values.dtype).reshape(values.shape)


class _NumpyWithDiskCopy:
    """Stands in for numpy in transformers' GGUF reader; only `copy` differs."""

    def __init__(self, storage: _DiskWeights) -> None:
        self.copy = storage.store_array

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
