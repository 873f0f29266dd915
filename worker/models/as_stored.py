"""A base that is to be narrow is not made wide first: its weights stay as their files have them.

Files of safetensors are mapped, so what stays as it is takes no memory that the system could not
take back. A device narrows each weight by itself; see `backends.base.frozen_base`.
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

_HALVES: Final = {"BF16": torch.bfloat16, "F16": torch.float16}


def dtype_of(place: str) -> torch.dtype:
    """What all tensors of a model's directory are stored in, if that is one of 16 bits; else
    float32."""
    found = set()
    try:
        for file in sorted(Path(place).glob("*.safetensors")):
            with safe_open(file, "np") as tensors:
                names = tensors.keys()
                found |= {tensors.get_slice(name).get_dtype() for name in names}
    except (OSError, SafetensorError):
        return torch.float32  # who reads it says what is wrong with it
    return _HALVES.get(found.pop(), torch.float32) if len(found) == 1 else torch.float32


def widen_but_the_base(model: Any, drawn: Collection[str]) -> bool:
    """Make all float32 but the matrices of the body, which an adapter leaves as they are.

    Args:
        model: Read in its files' own type.
        drawn: Names of what the files lack.

    Returns:
        False for a model that has computed something in that type, and so has to be read again.
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


class Wide(Mapping[str, NDArray[Any]]):
    """Tensors as arrays, those of half the bits as float32: each is made when it is asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> NDArray[Any]:
        tensor = self._tensors[name]
        whole = tensor.float() if tensor.dtype in _HALVES.values() else tensor
        return np.asarray(whole.numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
