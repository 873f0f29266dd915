"""The replica: the whole trainable state of a run, identical on workers and coordinator.

Parameters and moments are flat float32 arrays, one per block. A replica has no gradients, no model
and no device. A tensor whose gradient is absent (`protocol.exact.reduction.absent`) is not updated;
for optimizers whose update depends on the number of updates (adamw), the replica counts the updates
that each tensor has missed. The counts are part of the state and its digest once one is not zero.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from protocol.base import limits
from protocol.exact.adafactor import apply_adafactor, factor_elements
from protocol.exact.digest import pieces_of, state_digest, state_digest_1, weights_digest
from protocol.exact.parameter_groups import TensorRule, tensor_rule
from protocol.exact.reduction.absent import is_absent
from protocol.exact.reduction.average import Array, is_finite
from protocol.exact.subnormals import check_subnormals
from protocol.exact.update import (
    StepScalars,
    adapt_scalars,
    apply_update,
    average_weights,
    counts_updates,
    decay_average,
    has_averaged_weights,
    moment_count,
)
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.optimizer import OptimizerSpec

PartKind = Literal[
    "parameters", "first_moment", "second_moment", "third_moment", "factors", "average",
    "missed_updates",
]  # fmt: skip
"""Kinds of state arrays: a state has one array of each of its kinds for each block."""

_MOMENTS: Final[tuple[PartKind, ...]] = ("first_moment", "second_moment", "third_moment")
FACTORS: Final = "factors"
"""Array with the row and column means of each tensor (`adafactor.factor_elements`)."""
AVERAGE: Final = "average"
"""Array with the distance from the parameters to their average."""
MISSED_UPDATES: Final = "missed_updates"
"""Array with one value per tensor of a block: the number of updates that the tensor missed."""
_MAPPED_BYTES: Final = limits.MIB
_ALIGNMENT_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class StatePart:
    """One array of a replica, sent in the pieces of `part_slices`.

    Attributes:
        kind: The kind of array.
        block: The block's number.
        values: The replica's own array: writing to it changes the replica.
    """

    kind: PartKind
    block: int
    values: Array

    def by_tensor(self, block: Block) -> Iterator[tuple[TensorSpec, Array]]:
        """Yield each tensor of the block with its values in `part_shape`."""
        for tensor, part in tensor_slices(self.kind, block):
            yield tensor, self.values[part].reshape(part_shape(self.kind, tensor))


def state_kinds(optimizer: OptimizerSpec) -> tuple[PartKind, ...]:
    """Return the kinds of arrays in every state of this optimizer, in order."""
    factors: tuple[PartKind, ...] = (FACTORS,) if optimizer.name == "adafactor" else ()
    average: tuple[PartKind, ...] = (AVERAGE,) if optimizer.average is not None else ()
    return ("parameters", *_MOMENTS[: moment_count(optimizer)], *factors, *average)


def part_shape(kind: PartKind, tensor: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a tensor's values in an array of this kind."""
    if kind == MISSED_UPDATES:
        return (1,)
    return (factor_elements(tensor.shape),) if kind == FACTORS else tensor.shape


def tensor_slices(kind: PartKind, block: Block) -> Iterator[tuple[TensorSpec, slice]]:
    """Yield each tensor with its elements of a part's flat array."""
    start = 0
    for tensor in block.tensors:
        size = math.prod(part_shape(kind, tensor))
        yield tensor, slice(start, start + size)
        start += size


def part_elements(kind: PartKind, block: Block) -> int:
    """Return the number of elements of a part."""
    if kind in {MISSED_UPDATES, FACTORS}:
        return sum(math.prod(part_shape(kind, tensor)) for tensor in block.tensors)
    return block.elements


def part_slices(kind: PartKind, block: Block) -> list[slice]:
    """Return the slices in which a part is sent: at most as many as the block has chunks."""
    elements, size = part_elements(kind, block), block.chunk_elements
    if kind == MISSED_UPDATES:
        return [slice(0, elements)]
    return [slice(lo, min(lo + size, elements)) for lo in range(0, max(1, elements), size)]


def are_counts(values: Array, limit: int) -> bool:
    """Return whether the values can be counts of missed updates: whole numbers up to `limit`."""
    return bool(((values >= 0) & (values <= limit) & (values == np.rint(values))).all())


class Replica:
    """Parameters, moments and counters.

    Attributes:
        step: Steps applied or skipped.
        optimizer_step: Steps applied.
        missed: For each block, the number of updates that each tensor has missed; always zero for
            optimizers that do not depend on the number of updates.

    Args:
        blocks: The manifest's blocks.
        optimizer: The optimizer.
        memory: Returns the array of a kind and block, 64-byte aligned; None allocates zeros.
    """

    def __init__(
        self,
        blocks: tuple[Block, ...],
        optimizer: OptimizerSpec,
        memory: Callable[[PartKind, int], Array] | None = None,
    ) -> None:
        self.step = 0
        self.optimizer_step = 0
        self._blocks = blocks
        self._optimizer = optimizer
        self._rules = [[tensor_rule(t.name, optimizer) for t in b.tensors] for b in blocks]
        self._runs = tuple(map(_runs, blocks, self._rules))
        kinds = state_kinds(optimizer)
        if memory is None:
            self._state = {
                kind: [aligned_zeros(part_elements(kind, b)) for b in blocks] for kind in kinds
            }
        else:
            self._state = {kind: [memory(kind, n) for n in range(len(blocks))] for kind in kinds}
        self.missed = [np.zeros(len(block.tensors), np.float32) for block in blocks]
        self._is_finite = False  # True if the last update checked all values and none changed since
        self._hashes: dict[tuple[str, int], bytes] = {}  # made by the last update, for one digest

    @property
    def parameters(self) -> list[Array]:
        """The replica's own arrays, one flat, 64-byte aligned array per block."""
        return self._state["parameters"]

    @property
    def kinds(self) -> tuple[PartKind, ...]:
        """The kinds of arrays in every state, in order."""
        return tuple(self._state)

    @property
    def has_averaged_weights(self) -> bool:
        """Whether the trained weights are an average instead of the parameters."""
        return has_averaged_weights(self._optimizer)

    def trained_weights(self) -> list[Array]:
        """Return the trained weights: the parameters, or new arrays if the optimizer averages."""
        everything = slice(None)
        return [
            average_weights(
                self._optimizer,
                values,
                self._moments(block, everything),
                self._average(block, everything),
            )
            if self._blocks[block].is_trained
            else values
            for block, values in enumerate(self.parameters)
        ]

    def _moments(self, block: int, part: slice) -> tuple[Array, ...]:
        return tuple(self._state[kind][block][part] for kind in _MOMENTS if kind in self._state)

    def _average(self, block: int, part: slice) -> Array | None:
        return self._state[AVERAGE][block][part] if AVERAGE in self._state else None

    def load_parameters(self, values: Sequence[Array]) -> None:
        """Copy parameters from one flat array per block; moments and counters do not change."""
        self._check(values)
        self._discard_caches()
        for parameters, value in zip(self.parameters, values, strict=True):
            np.copyto(parameters, value)

    def reset(self, parameters: Sequence[Array]) -> None:
        """Reset the state to step 0 with these parameters."""
        self.load_parameters(parameters)
        self.clear_moments()
        self.step = self.optimizer_step = 0

    def clear_moments(self) -> None:
        """Reset the moments to their state before the first update."""
        self._hashes = {}
        for kind, arrays in self._state.items():
            if kind != "parameters":
                for array in arrays:
                    array.fill(0)
        self.clear_missed()

    def clear_missed(self) -> None:
        """Reset the counts of missed updates."""
        for counts in self.missed:
            counts.fill(0)

    def apply(
        self, averages: Sequence[Array], scalars: StepScalars, *, should_hash: bool = False
    ) -> None:
        """Apply one step.

        Args:
            averages: Averaged gradients, or mean changes of buffers, one flat float32 array per
                block; not changed. Tensors whose gradient is absent are not updated.
            scalars: The step's scalars.
            should_hash: Hash the new state while it is in the processor's cache, for the next
                `state_digest`.

        Raises:
            SubnormalsFlushed: This thread would compute different bits; the replica is unchanged.
        """
        check_subnormals("the thread that applies updates")
        self._check(averages)
        self._hashes = {}
        all_finite, updated_elements = True, 0
        for index, gradient in enumerate(averages):
            if not self._blocks[index].is_trained:
                all_finite &= _add_change(self._blocks[index], self.parameters[index], gradient)
                updated_elements += gradient.size
                continue
            if self._optimizer.name == "adafactor":
                all_finite &= self._apply_by_tensor(index, gradient, scalars)
                updated_elements += gradient.size
                continue
            for part, rule, part_scalars in self._updates(index, gradient, scalars):
                size = part.stop - part.start
                updated_elements += size
                hashes = self._hashes_for(index) if should_hash and size == gradient.size else None
                all_finite &= apply_update(
                    self._optimizer,
                    rule.scalars(part_scalars),
                    self.parameters[index][part],
                    gradient[part],
                    self._moments(index, part),
                    decay=rule.decays,
                    average=self._average(index, part),
                    hashes=hashes,
                )
                if hashes is not None:
                    for kind, pieces in zip(self._state, hashes, strict=True):
                        self._hashes[kind, index] = pieces.tobytes()
        all_updated = updated_elements == sum(block.elements for block in self._blocks)
        self._is_finite = all_finite and (all_updated or self._is_finite)
        self.step += 1
        self.optimizer_step += 1

    def _hashes_for(self, index: int) -> NDArray[np.uint8]:
        """Return an array for the hashes of a block's parameters, moments and average."""
        pieces = pieces_of(self._blocks[index].elements)
        return np.empty((len(self._state), pieces, 16), np.uint8)

    def _updates(
        self, index: int, gradient: Array, scalars: StepScalars
    ) -> Iterator[tuple[slice, TensorRule, StepScalars]]:
        """Yield the parts of a block to update: elements, rule, and the scalars for the rule.

        Counts the missed updates of tensors whose gradient is absent.
        """
        block, missed = self._blocks[index], self.missed[index]
        absent_flags = [is_absent(gradient[part]) for _, part in block.slices()]
        if not any(absent_flags) and not missed.any():
            yield from ((part, rule, scalars) for part, rule in self._runs[index])
            return
        counts = counts_updates(self._optimizer)
        missed += np.array(absent_flags, np.float32) * counts
        for number, (_, part) in enumerate(block.slices()):
            if absent_flags[number]:
                self._keep_average(index, part, scalars)
                continue
            tensor_scalars = scalars
            if missed[number]:
                updates = self.optimizer_step + 1 - int(missed[number])
                tensor_scalars = adapt_scalars(self._optimizer, scalars, updates)
            yield part, self._rules[index][number], tensor_scalars

    def _keep_average(self, index: int, part: slice, scalars: StepScalars) -> None:
        """Move the average of a tensor that is not updated toward the tensor."""
        if (average := self._average(index, part)) is not None:
            assert scalars.average_keep is not None
            decay_average(average, scalars.average_keep)

    def _apply_by_tensor(self, index: int, gradient: Array, scalars: StepScalars) -> bool:
        """Update a block by a rule that reads whole tensors; return whether all new values are
        finite."""
        block, finite = self._blocks[index], True
        factors = tensor_slices(FACTORS, block)
        for (tensor, part), (_, factors_slice), rule in zip(
            block.slices(), factors, self._rules[index], strict=True
        ):
            if is_absent(gradient[part]):
                self._keep_average(index, part, scalars)
                continue
            finite &= apply_adafactor(
                self._optimizer,
                rule.scalars(scalars),
                self.parameters[index][part].reshape(tensor.shape),
                gradient[part].reshape(tensor.shape),
                self._state[FACTORS][index][factors_slice],
                decay=rule.decays,
                average=self._average(index, part),
            )
        return finite

    def skip(self) -> None:
        """Skip a step: only the schedule advances."""
        self.step += 1

    def tensors(self) -> dict[str, Array]:
        """Return views of the parameters by name, each in its shape."""
        return self._by_name(self.parameters)

    def trained_tensors(self) -> dict[str, Array]:
        """Return the trained weights by name, each in its shape."""
        return self._by_name(self.trained_weights())

    def weights_digest(self) -> str:
        """Return the digest of the trained weights."""
        return weights_digest(self.trained_tensors())

    def state_digest(self) -> str:
        """Return the digest of parameters, moments and counters, which replicas compare."""
        # Used once: a later digest also detects values that changed in memory since the update.
        hashes, self._hashes = self._hashes, {}
        return state_digest(self.step, self.optimizer_step, self._arrays_by_kind().items(), hashes)

    def initial_digest(self) -> str:
        """Return the state's digest in format 1, which admission records have."""
        kinds = {
            kind: self._by_name(arrays, kind) for kind, arrays in self._arrays_by_kind().items()
        }
        return state_digest_1(self.step, self.optimizer_step, kinds.items())

    def has_digest(self, recorded_digest: str) -> bool:
        """Return whether the state has this digest, which an older release may have recorded."""
        return self.state_digest() == recorded_digest or self.initial_digest() == recorded_digest

    def non_finite_location(self) -> str:
        """Return the location of a value that is not finite; empty if all are finite."""
        if self._is_finite:
            return ""
        for kind, arrays in self._state.items():
            for block, array in zip(self._blocks, arrays, strict=True):
                if is_finite(array):
                    continue
                name = next(
                    tensor.name
                    for tensor, part in tensor_slices(kind, block)
                    if not is_finite(array[part])
                )
                return f"block {block.name!r}, tensor {name!r} ({kind.replace('_', ' ')})"
        return ""

    @property
    def has_missed_updates(self) -> bool:
        """Whether any tensor has missed an update that counts."""
        return any(counts.any() for counts in self.missed)

    def parts(self) -> list[StatePart]:
        """Return all arrays in a fixed order, for sending; missed updates only if not zero."""
        self._discard_caches()
        return [
            StatePart(kind, block, values)
            for kind, arrays in self._arrays_by_kind().items()
            for block, values in enumerate(arrays)
        ]

    def arrays(self, kind: PartKind) -> list[Array]:
        """Return the replica's own arrays of a kind, by block; empty if the state lacks them."""
        self._discard_caches()
        return self.missed if kind == MISSED_UPDATES else self._state.get(kind, [])

    def load_piece(self, kind: PartKind, block: int, piece: int, values: Array) -> None:
        """Copy in a piece (`part_slices`) of another replica's part; parameters come first.

        Parameters reset the counts of missed updates, which are sent only if not zero.
        """
        if kind == "parameters":
            self.clear_missed()
        if arrays := self.arrays(kind):
            arrays[block][part_slices(kind, self._blocks[block])[piece]] = values

    def set_counters(self, step: int, optimizer_step: int) -> None:
        """Set the counters, once all parts are loaded."""
        assert 0 <= optimizer_step <= step
        self.step = step
        self.optimizer_step = optimizer_step

    def copy(self) -> Replica:
        """Return a copy that shares no memory with this replica."""
        other = Replica(self._blocks, self._optimizer)
        for part in self.parts():
            np.copyto(other.arrays(part.kind)[part.block], part.values)
        other.set_counters(self.step, self.optimizer_step)
        return other

    def _discard_caches(self) -> None:
        """Discard the last update's check for finite values and its hashes."""
        self._is_finite, self._hashes = False, {}

    def _arrays_by_kind(self) -> dict[PartKind, list[Array]]:
        kinds: dict[PartKind, list[Array]] = dict(self._state)
        if self.has_missed_updates:
            kinds[MISSED_UPDATES] = self.missed
        return kinds

    def _by_name(self, arrays: Sequence[Array], kind: PartKind = "parameters") -> dict[str, Array]:
        return {
            tensor.name: values
            for number, (block, array) in enumerate(zip(self._blocks, arrays, strict=True))
            for tensor, values in StatePart(kind, number, array).by_tensor(block)
        }

    def _check(self, arrays: Sequence[Array]) -> None:
        # np.copyto would broadcast an array of one element over a whole block.
        assert len(arrays) == len(self._blocks)
        for block, array in zip(self._blocks, arrays, strict=True):
            assert array.dtype == np.float32
            assert array.shape == (block.elements,)


def aligned_zeros(elements: int) -> Array:
    """Allocate 64-byte aligned float32 zeros; alignment can affect the bits of a matrix product.

    Large arrays are mapped: on the heap they would lie between the arrays of a step and leave gaps
    too small for the largest ones.
    """
    if elements * 4 >= _MAPPED_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, elements * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.float32)
    raw = np.zeros(elements * 4 + _ALIGNMENT_BYTES, np.uint8)
    lead = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[lead : lead + elements * 4].view(np.float32)


def _add_change(block: Block, buffers: Array, change: Array) -> bool:
    """Add the mean change of a block's buffers, in place; return whether all values are finite."""
    with np.errstate(all="ignore"):
        np.add(buffers, np.rint(change) if block.kind == "counters" else change, out=buffers)
    return is_finite(buffers)


def _runs(block: Block, rules: Sequence[TensorRule]) -> tuple[tuple[slice, TensorRule], ...]:
    """Divide a block into as few runs of tensors with equal rules as possible."""
    runs: list[tuple[slice, TensorRule]] = []
    for (_, part), rule in zip(block.slices(), rules, strict=True):
        if runs and runs[-1][1] == rule:
            runs[-1] = (slice(runs[-1][0].start, part.stop), rule)
        else:
            runs.append((part, rule))
    return tuple(runs)
