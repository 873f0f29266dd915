"""Loads a base that will be stored narrow without widening it: weights keep their files' dtype.

Safetensors files are memory-mapped, so weights that are not converted occupy only pages that the
system can drop. The device narrows one weight at a time; see `backends.base.frozen_base`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from backends.base.frozen_base import frozen_base
from backends.base.progress import Meter

_HALVES: Final = {"BF16": torch.bfloat16, "F16": torch.float16}


def dtype_of(directory: str) -> torch.dtype:
    """The common dtype of all tensors in a model's directory if it has 16 bits, else float32."""
    dtypes = set()
    try:
        for file in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(file, "np") as tensors:
                names = tensors.keys()
                dtypes |= {tensors.get_slice(name).get_dtype() for name in names}
    except (OSError, SafetensorError):
        return torch.float32  # loading it will report the error
    return _HALVES.get(dtypes.pop(), torch.float32) if len(dtypes) == 1 else torch.float32


def widen_but_the_base(model: Any, drawn: Collection[str]) -> bool:
    """Convert all parameters to float32 except the frozen matrices of the model's body.

    Args:
        model: A model loaded in its files' dtype.
        drawn: Names of parameters that the files lack.

    Returns:
        False if the model has computed a buffer in that dtype, and must be loaded in float32.
    """
    half = (torch.bfloat16, torch.float16)
    if any(buffer.dtype in half for buffer in model.buffers()):
        return False
    flags = {name: each.requires_grad for name, each in model.named_parameters()}
    model.requires_grad_(requires_grad=False)
    body = getattr(model, "base_model_prefix", "") + "."
    base = {name for name in frozen_base(model) if name.startswith(body) and name not in drawn}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags[name])
        if name not in base:
            parameter.data = parameter.data.float()
    return True


class Float32View(Mapping[str, NDArray[Any]]):
    """Tensors as arrays, 16-bit ones converted to float32 on access, one at a time.

    Mapped files are read here first, so it says how far it is.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._meter = Meter("read", sum(tensor.nbytes for tensor in tensors.values()))

    def __getitem__(self, name: str) -> NDArray[Any]:
        tensor = self._tensors[name]
        self._meter.add(tensor.nbytes)
        converted = tensor.float() if tensor.dtype in _HALVES.values() else tensor
        return np.asarray(converted.numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
