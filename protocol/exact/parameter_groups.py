"""Parameter groups: rules for the update of a tensor, selected by the tensor's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from protocol.exact.reduction.average import Array, nearest_float32, square_sum
from protocol.exact.update import GradientNorms, StepScalars, global_norm
from protocol.spec.manifest import Block
from protocol.spec.sections.optimizer import OptimizerSpec


class TensorRule(NamedTuple):
    """How the update treats a tensor.

    Attributes:
        lr_scale: Factor of the learning rate.
        weight_decay: Weight decay; 0 for none.
        clip_group: Index of the tensor's group in `OptimizerSpec.clipped_groups`; None if it is in
            none of them.
        scales: Index of the tensor's list of learning-rate factors in
            `OptimizerSpec.scheduled_scales`; None if `lr_scale` applies.
    """

    lr_scale: float
    weight_decay: float
    clip_group: int | None = None
    scales: int | None = None

    @property
    def decays(self) -> bool:
        """Whether the weight decay is not 0, as float32."""
        return nearest_float32(self.weight_decay) != 0.0

    def scalars(self, step: StepScalars) -> StepScalars:
        """Return the scalars of this tensor's update.

        Args:
            step: The scalars of the step, from which the result is computed in float64 and rounded
                once.
        """
        if self.clip_group is not None:
            clip = step.group_clips[self.clip_group]
            step = step if clip == step.clip else step.model_copy(update={"clip": clip})
        has_step_decay = not self.decays or nearest_float32(self.weight_decay) == step.weight_decay
        scale = self.lr_scale if self.scales is None else step.group_scales[self.scales]
        if scale == 1.0 and has_step_decay:
            return step  # without decay, `apply_update` ignores the scalars of weight decay
        rate = nearest_float32(step.learning_rate * scale)
        float64_values = {
            "step_size": step.step_size * scale,
            "drift": step.drift * scale,
            "weight_decay": self.weight_decay,
            "decay_factor": 1.0 - rate * self.weight_decay,
        }
        float32_values = {name: nearest_float32(value) for name, value in float64_values.items()}
        return step.model_copy(update={"learning_rate": rate, **float32_values})


def tensor_rule(name: str, spec: OptimizerSpec) -> TensorRule:
    """Return the rule of the first group with a pattern that matches the tensor's name."""
    default_decay = spec.weight_decay if decays(name, spec) else 0.0
    for group in spec.groups:
        if any(fnmatchcase(name, pattern) for pattern in group.match):
            group_decay = group.weight_decay
            clip_index = spec.clipped_groups.index(group) if group.clip_norm is not None else None
            scales = spec.scheduled_scales.index(group.lr_scales) if group.lr_scales else None
            return TensorRule(
                group.lr_scale,
                default_decay if group_decay is None else group_decay,
                clip_index,
                scales,
            )
    return TensorRule(1.0, default_decay)


def decays(name: str, spec: OptimizerSpec) -> bool:
    """Return whether weight decay applies to a tensor outside of groups.

    It does unless the name contains a text of `no_decay`, ignoring case.
    """
    lower = name.lower()
    return not any(part.lower() in lower for part in spec.no_decay)


class ClippedGroups:
    """The groups of tensors whose gradients are clipped by the norm of the group.

    Args:
        spec: The optimizer.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec = spec
        self._count = len(spec.clipped_groups)
        self._group_of: dict[str, int] = {}

    def square_sums(self, block: Block, average: Array) -> tuple[float, ...]:
        """Return the `square_sum` of a block's tensors in each group, then of the others.

        Tensors are added in order. Empty if there are no such groups.
        """
        if not self._count:
            return ()
        sums = [0.0] * (self._count + 1)
        for tensor, part in block.slices():
            if tensor.name not in self._group_of:
                group = tensor_rule(tensor.name, self._spec).clip_group
                self._group_of[tensor.name] = self._count if group is None else group
            sums[self._group_of[tensor.name]] += square_sum(average[part])
        return tuple(sums)

    def norms(self, sums: Iterable[tuple[float, tuple[float, ...]]]) -> GradientNorms:
        """Return the norms of averaged gradients from sums of squares.

        Args:
            sums: `square_sum` and `square_sums` of each trained block, in order.
        """
        sums = list(sums)
        whole_norm = global_norm(square_sum for square_sum, _ in sums)
        if not self._count:
            return GradientNorms.of(whole_norm)
        *groups, others = map(global_norm, zip(*(by_group for _, by_group in sums), strict=True))
        return GradientNorms(whole_norm, others, tuple(groups))

    def norms_of(self, blocks: Sequence[Block], averages: Sequence[Array]) -> GradientNorms:
        """Return the norms of averaged gradients; changes of buffers do not count."""
        return self.norms(
            (square_sum(average), self.square_sums(block, average))
            for block, average in zip(blocks, averages, strict=True)
            if block.is_trained
        )


_MAX_NAMES_SHOWN: Final = 8


def unmatched_pattern(spec: OptimizerSpec, blocks: Sequence[Block]) -> str:
    """Describe a pattern of `optimizer.groups` that selects no tensor; empty if there is none."""
    names = [t.name for block in blocks if block.is_trained for t in block.tensors]
    remaining = dict.fromkeys(names)
    for number, group in enumerate(spec.groups):
        group_names = set()
        for pattern in group.match:
            matches = [name for name in remaining if fnmatchcase(name, pattern)]
            if not matches:
                is_matched = any(fnmatchcase(name, pattern) for name in names)
                reason = "all matches are in earlier groups" if is_matched else "none matches"
                ellipsis = ", ..." if len(names) > _MAX_NAMES_SHOWN else ""
                return (
                    f"optimizer.groups[{number}].match: expected the name of a trained tensor, got "
                    f"{pattern!r}; {reason} (* stands for any characters); the "
                    f"{len(names)} names are {', '.join(names[:_MAX_NAMES_SHOWN])}{ellipsis}"
                )
            group_names.update(matches)
        for name in group_names:
            del remaining[name]
    return ""
