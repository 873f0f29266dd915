"""A replica: the whole trainable state of a run, the same in every worker and the coordinator.

Parameters and moments are flat float32 arrays, one per block. It holds no gradient and no model,
and knows nothing of devices. A tensor whose gradient is absent (`protocol.exact.absent`) is left as
it is; where an update depends on how many there were (adamw), the replica counts for each tensor
the updates that it has missed. As long as none has missed any, its state and digest have no trace
of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from protocol.exact.absent import is_absent
from protocol.exact.digest import state_digest, weights_digest
from protocol.exact.subnormals import check_subnormals
from protocol.exact.update import (
    Array,
    StepScalars,
    apply_update,
    averaged,
    averages,
    counts_updates,
    decays,
    is_finite,
    moment_count,
    scalars_after,
)
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.run_spec import OptimizerSpec

PartKind = Literal["parameters", "first_moment", "second_moment", "missed_updates"]

KINDS: Final[tuple[PartKind, ...]] = ("parameters", "first_moment", "second_moment")
"""Of arrays with a value for each element of a block."""
MISSED: Final = "missed_updates"
"""Has a value for each tensor of a block."""
_ALIGNMENT_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class StatePart:
    """One array of a replica; `values` is the replica's own, so writing to it fills the state.

    It travels in the pieces of `part_slices`.
    """

    kind: PartKind
    block: int
    values: Array

    def by_tensor(self, block: Block) -> Iterator[tuple[TensorSpec, Array]]:
        """Each tensor of the part's block, and its values in its shape; of counts in shape (1,)."""
        for number, (tensor, place) in enumerate(block.slices()):
            if self.kind == MISSED:
                yield tensor, self.values[number : number + 1]
            else:
                yield tensor, self.values[place].reshape(tensor.shape)


def part_slices(kind: PartKind, block: Block) -> list[slice]:
    """The pieces in which a part travels: the chunks of its block; missed updates in one."""
    if kind == MISSED:
        return [slice(0, len(block.tensors))]
    return [block.chunk_slice(chunk) for chunk in range(block.chunks)]


def are_counts(values: Array, most: int) -> bool:
    """Whether these can be missed updates: whole numbers from 0 to `most`."""
    return bool(((values >= 0) & (values <= most) & (values == np.rint(values))).all())


class Digests(NamedTuple):
    """Of the whole state, and of the parameters alone.

    Attributes:
        not_finite: Where the state has a value that is not finite; empty if nowhere.
    """

    state: str
    weights: str
    not_finite: str = ""


class Replica:
    """Parameters, moments and counters.

    Attributes:
        step: Steps applied or skipped.
        optimizer_step: Steps applied.
        missed: By block, how many of those each tensor has missed; zeros where none counts.

    Args:
        blocks: Those of the manifest, in its order.
        optimizer: Decides the update rule and how many moments there are.
    """

    def __init__(self, blocks: tuple[Block, ...], optimizer: OptimizerSpec) -> None:
        self.step = 0
        self.optimizer_step = 0
        self._blocks = blocks
        self._optimizer = optimizer
        self._runs = tuple(_decay_runs(block, optimizer) for block in blocks)
        kinds = KINDS[: 1 + moment_count(optimizer)]
        self._state = {kind: [aligned_zeros(b.elements) for b in blocks] for kind in kinds}
        self.missed = [np.zeros(len(block.tensors), np.float32) for block in blocks]

    @property
    def parameters(self) -> list[Array]:
        """One flat array per block, 64-byte aligned: the replica's own, changed by `apply`."""
        return self._state["parameters"]

    @property
    def averages(self) -> bool:
        """Whether what was trained is not the parameters, at which gradients are taken."""
        return averages(self._optimizer)

    def trained(self) -> list[Array]:
        """What is evaluated, saved and named by its digest: the parameters themselves, or new
        arrays where the optimizer averages."""
        moments = [arrays for kind, arrays in self._state.items() if kind != "parameters"]
        return [
            averaged(self._optimizer, values, tuple(arrays[block] for arrays in moments))
            for block, values in enumerate(self.parameters)
        ]

    def load_parameters(self, values: Sequence[Array]) -> None:
        """Copy in one flat array per block; moments and counters stay as they are."""
        self._check(values)
        for mine, given in zip(self.parameters, values, strict=True):
            np.copyto(mine, given)

    def reset(self, parameters: Sequence[Array]) -> None:
        """Begin anew from these values."""
        self.load_parameters(parameters)
        self.clear_moments()
        self.step = self.optimizer_step = 0

    def clear_moments(self) -> None:
        """As they are before the first update."""
        for kind, arrays in self._state.items():
            if kind != "parameters":
                for array in arrays:
                    array.fill(0)
        self.clear_missed()

    def clear_missed(self) -> None:
        """Every tensor has had all updates."""
        for counts in self.missed:
            counts.fill(0)

    def apply(self, averages: Sequence[Array], scalars: StepScalars) -> None:
        """Take one step: averaged gradients, one flat array per block, left as they are.

        Tensors whose gradient is absent stay as they are.

        Raises:
            SubnormalsFlushed: This thread would give other bits; nothing is changed.
        """
        check_subnormals("the thread that applies updates")
        self._check(averages)
        moments = [arrays for kind, arrays in self._state.items() if kind != "parameters"]
        for index, gradient in enumerate(averages):
            for part, decay, own_scalars in self._updates(index, gradient, scalars):
                apply_update(
                    self._optimizer,
                    own_scalars,
                    self.parameters[index][part],
                    gradient[part],
                    tuple(arrays[index][part] for arrays in moments),
                    decay=decay,
                )
        self.step += 1
        self.optimizer_step += 1

    def _updates(
        self, index: int, gradient: Array, scalars: StepScalars
    ) -> Iterator[tuple[slice, bool, StepScalars]]:
        """What of a block is updated: where, whether it decays, and by which scalars."""
        block, missed = self._blocks[index], self.missed[index]
        absent = [is_absent(gradient[part]) for _, part in block.slices()]
        if not any(absent) and not missed.any():
            yield from ((part, decay, scalars) for part, decay in self._runs[index])
            return
        counts = counts_updates(self._optimizer)
        missed += np.array(absent, np.float32) * counts
        for number, (tensor, part) in enumerate(block.slices()):
            if absent[number]:
                continue
            own_scalars = scalars
            if missed[number]:
                updates = self.optimizer_step + 1 - int(missed[number])
                own_scalars = scalars_after(self._optimizer, scalars, updates)
            yield part, decays(tensor.name, self._optimizer), own_scalars

    def skip(self) -> None:
        """Pass over a step: the schedule goes on, nothing else changes."""
        self.step += 1

    def tensors(self) -> dict[str, Array]:
        """The parameters by name, each in its own shape: views, not copies."""
        return self._named(self.parameters)

    def trained_tensors(self) -> dict[str, Array]:
        """What was trained by name, as `tensors` has the parameters."""
        return self._named(self.trained())

    def weights_digest(self) -> str:
        """Digest of what was trained."""
        return weights_digest(self.trained_tensors())

    def state_digest(self) -> str:
        """Digest of parameters, moments and counters."""
        return self._state_and_weights()[0]

    def digests(self) -> Digests:
        """Both digests, the weights hashed once, and whether all values are finite."""
        return Digests(*self._state_and_weights(), self._not_finite())

    def _state_and_weights(self) -> tuple[str, str]:
        groups = [(kind, weights_digest(self._named(mine))) for kind, mine in self._state.items()]
        if self.has_missed:
            groups.append((MISSED, weights_digest(self._named(self.missed, MISSED))))
        state = state_digest(self.step, self.optimizer_step, groups)
        return state, self.weights_digest() if self.averages else dict(groups)["parameters"]

    def _not_finite(self) -> str:
        for kind, arrays in self._state.items():
            for block, array in zip(self._blocks, arrays, strict=True):
                if is_finite(array):
                    continue
                name = next(t.name for t, part in block.slices() if not is_finite(array[part]))
                return f"block {block.name!r}, tensor {name!r} ({kind.replace('_', ' ')})"
        return ""

    @property
    def has_missed(self) -> bool:
        """Whether any tensor has missed an update that counts."""
        return any(counts.any() for counts in self.missed)

    def parts(self) -> list[StatePart]:
        """Every array in a fixed order, to send the state; missed updates only if there are any."""
        kinds: dict[PartKind, list[Array]] = dict(self._state)
        if self.has_missed:
            kinds[MISSED] = self.missed
        return [
            StatePart(kind, block, values)
            for kind, arrays in kinds.items()
            for block, values in enumerate(arrays)
        ]

    def arrays(self, kind: PartKind) -> list[Array]:
        """The replica's own arrays of one kind, by block; none where its optimizer has none."""
        return self.missed if kind == MISSED else self._state.get(kind, [])

    def load_piece(self, kind: PartKind, block: int, piece: int, values: Array) -> None:
        """Copy in a piece of another's part (`part_slices`); parameters come first.

        A state of which no missed updates come has none.
        """
        if kind == "parameters":
            self.clear_missed()
        if arrays := self.arrays(kind):
            arrays[block][part_slices(kind, self._blocks[block])[piece]] = values

    def restore(self, step: int, optimizer_step: int) -> None:
        """Set the counters, after the parts were filled."""
        assert 0 <= optimizer_step <= step
        self.step = step
        self.optimizer_step = optimizer_step

    def copy(self) -> Replica:
        """A snapshot that shares no memory with this one."""
        other = Replica(self._blocks, self._optimizer)
        for part in self.parts():
            np.copyto(other.arrays(part.kind)[part.block], part.values)
        other.restore(self.step, self.optimizer_step)
        return other

    def _named(self, arrays: Sequence[Array], kind: PartKind = "parameters") -> dict[str, Array]:
        return {
            tensor.name: values
            for number, (block, array) in enumerate(zip(self._blocks, arrays, strict=True))
            for tensor, values in StatePart(kind, number, array).by_tensor(block)
        }

    def _check(self, arrays: Sequence[Array]) -> None:
        # np.copyto would spread an array of one element over a whole block.
        assert len(arrays) == len(self._blocks)
        for block, array in zip(self._blocks, arrays, strict=True):
            assert array.dtype == np.float32
            assert array.shape == (block.elements,)


def aligned_zeros(elements: int) -> Array:
    """Flat float32 zeros at a multiple of 64 bytes; alignment can decide the bits of a product."""
    raw = np.zeros(elements * 4 + _ALIGNMENT_BYTES, np.uint8)
    lead = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[lead : lead + elements * 4].view(np.float32)


def _decay_runs(block: Block, spec: OptimizerSpec) -> tuple[tuple[slice, bool], ...]:
    """The block cut where weight decay turns on or off: fewer, longer stretches to update."""
    runs: list[tuple[slice, bool]] = []
    for tensor, part in block.slices():
        decay = decays(tensor.name, spec)
        if runs and runs[-1][1] == decay:
            runs[-1] = (slice(runs[-1][0].start, part.stop), decay)
        else:
            runs.append((part, decay))
    return tuple(runs)
