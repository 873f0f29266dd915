"""Labels and indices that torch's own functions refuse, in the words of the data.

Torch says "Target 7 is out of bounds" or "index out of range in self". What it was looking at is in
the frames of its functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch


class Outside(NamedTuple):
    """An index that its table has not.

    Attributes:
        text: What came, and what was expected.
        row: Of the input; None if that is not known.
    """

    text: str
    row: int | None


def index_outside(error: BaseException, arrays: Mapping[str, torch.Tensor]) -> Outside | None:
    """What torch has raised this for; None if it was for something else.

    Args:
        error: As caught: its traceback is looked through.
        arrays: Of the batch, by the names that the user knows.
    """
    found: Outside | None = None
    trace = error.__traceback__
    while trace is not None and found is None:
        looked_up = _looked_up(trace.tb_frame)
        found = looked_up and _outside(*looked_up, arrays)
        trace = trace.tb_next
    return found


def _looked_up(frame: FrameType) -> tuple[torch.Tensor, int, int | None] | None:
    """Indices, how many rows there are, and the index that is none."""
    if frame.f_globals.get("__name__") != "torch.nn.functional":
        return None
    given: Mapping[str, Any] = frame.f_locals
    match frame.f_code.co_name:
        case "cross_entropy" | "nll_loss":
            classes = given["input"].shape[min(given["input"].dim() - 1, 1)]
            return given["target"], classes, given["ignore_index"]
        case "embedding":
            return given["input"], given["weight"].shape[0], None
    return None


def _outside(
    indices: torch.Tensor, rows: int, ignored: int | None, arrays: Mapping[str, torch.Tensor]
) -> Outside | None:
    if indices.is_floating_point():  # probabilities of classes
        return None
    wrong = (indices < 0) | (indices >= rows)
    if ignored is not None:
        wrong &= indices != ignored
    if not wrong.any():
        return None
    value, name = int(indices[wrong][0]), _name_of(indices, arrays)
    place: list[int] = wrong.nonzero()[0].tolist()
    whole = name is not None and arrays[name].shape == indices.shape
    at = f" at {place}" if whole and place else ""
    text = (
        f"{'an index is' if name is None else f'input {name!r} has'} {value}{at}, which the model, "
        f"or its loss, looks up in {rows} rows: expected 0 to {rows - 1}"
    )
    return Outside(text, place[0] if whole and place else None)


def _name_of(indices: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> str | None:
    """The array in whose memory they lie."""
    memory = indices.untyped_storage().data_ptr()
    for name, array in arrays.items():
        if array.untyped_storage().data_ptr() == memory:
            return name
    return None
