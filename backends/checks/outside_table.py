"""Find labels and indices that are out of range, and name the user's array that has them.

On the CPU torch raises "Target 7 is out of bounds" or "index out of range in self", and the frames
of the error's traceback hold the tensors (`find_failing_index`). On a card such a lookup makes the
device unusable for the process. So for cards `TableLookups` records once which arrays of a batch
are looked up in which tables, and later batches are checked on the host before they are sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class OutsideIndex(NamedTuple):
    """An index that is out of range.

    Attributes:
        text: A sentence with the index and the expected range.
        row: The sample's row; None if unknown.
    """

    text: str
    row: int | None


class TableLookup(NamedTuple):
    """A lookup of an array of the batch in a table.

    Attributes:
        array: The array's name.
        rows: Number of rows of the table.
        ignored: The index that the loss ignores; None if there is none.
    """

    array: str
    rows: int
    ignored: int | None


class TableLookups(TorchFunctionMode):
    """A torch mode that records lookups of a batch's arrays, or of views of them, in tables.

    A lookup out of range raises IndexError before the device computes it.

    Args:
        arrays: The batch's arrays.
    """

    def __init__(self, arrays: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._arrays = arrays
        self.lookups: set[TableLookup] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in _LOOKUPS:
            call = inspect.signature(func).bind(*args, **keywords)
            call.apply_defaults()
            if lookup := _lookup_of(func.__name__, call.arguments):
                self._record(*lookup)
        return func(*args, **keywords)

    def _record(self, indices: torch.Tensor, rows: int, ignored: int | None) -> None:
        if bad_index := _first_outside(indices, rows, ignored, self._arrays):
            raise IndexError(bad_index.text)
        name = _name_of(indices, self._arrays)
        if name is not None and not indices.is_floating_point():
            self.lookups.add(TableLookup(name, rows, ignored))


_LOOKUPS: Final = frozenset({functional.embedding, functional.cross_entropy, functional.nll_loss})


def find_outside_index(
    lookups: Collection[TableLookup], arrays: Mapping[str, torch.Tensor]
) -> OutsideIndex | None:
    """Return the first index of a batch on the host that is out of range; None if there is
    none."""
    for lookup in sorted(lookups):
        if bad_index := _first_outside(arrays[lookup.array], lookup.rows, lookup.ignored, arrays):
            return bad_index
    return None


def find_failing_index(
    error: BaseException, arrays: Mapping[str, torch.Tensor]
) -> OutsideIndex | None:
    """Return the index for which torch raised an error; None if the error has another cause.

    Args:
        error: The error, with its traceback.
        arrays: The batch's arrays by name.
    """
    bad_index: OutsideIndex | None = None
    trace = error.__traceback__
    while trace is not None and bad_index is None:
        lookup = _lookup_in_frame(trace.tb_frame)
        bad_index = lookup and _first_outside(*lookup, arrays)
        trace = trace.tb_next
    return bad_index


def _lookup_in_frame(frame: FrameType) -> tuple[torch.Tensor, int, int | None] | None:
    """Return the indices, the number of rows, and the ignored index of a frame's lookup."""
    if frame.f_globals.get("__name__") != "torch.nn.functional":
        return None
    return _lookup_of(frame.f_code.co_name, frame.f_locals)


def _lookup_of(
    function: str, arguments: Mapping[str, Any]
) -> tuple[torch.Tensor, int, int | None] | None:
    match function:
        case "cross_entropy" | "nll_loss":
            scores = arguments["input"]
            classes = scores.shape[min(scores.dim() - 1, 1)]
            return arguments["target"], classes, arguments["ignore_index"]
        case "embedding":
            return arguments["input"], arguments["weight"].shape[0], None
    return None


def _first_outside(
    indices: torch.Tensor, rows: int, ignored: int | None, arrays: Mapping[str, torch.Tensor]
) -> OutsideIndex | None:
    if indices.is_floating_point():  # probabilities of classes
        return None
    is_outside = (indices < 0) | (indices >= rows)
    if ignored is not None:
        is_outside &= indices != ignored
    if not is_outside.any():
        return None
    value, name = int(indices[is_outside][0]), _name_of(indices, arrays)
    position: list[int] = is_outside.nonzero()[0].tolist()
    is_whole_array = name is not None and arrays[name].shape == indices.shape
    position_text = f" at {position}" if is_whole_array and position else ""
    text = (
        f"{'an index is' if name is None else f'input {name!r} has'} {value}{position_text}, which "
        f"the model, or its loss, looks up in {rows} rows: expected 0 to {rows - 1}"
    )
    return OutsideIndex(text, position[0] if is_whole_array and position else None)


def _name_of(indices: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the array of which the indices are a view; None if there is none."""
    memory = indices.untyped_storage().data_ptr()
    for name, array in arrays.items():
        if array.untyped_storage().data_ptr() == memory:
            return name
    return None
