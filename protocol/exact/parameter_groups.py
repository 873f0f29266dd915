"""Parameter groups: how the update of a tensor differs from others, by the tensor's name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from protocol.exact.update import StepScalars, nearest_float32
from protocol.spec.manifest import Block
from protocol.spec.sections.optimizer import OptimizerSpec


class TensorRule(NamedTuple):
    """How the update treats a tensor.

    Attributes:
        lr_scale: Factor of the learning rate.
        weight_decay: Weight decay; 0 for none.
    """

    lr_scale: float
    weight_decay: float

    @property
    def decays(self) -> bool:
        """Whether the weight decay is not 0, as float32."""
        return nearest_float32(self.weight_decay) != 0.0

    def scalars(self, step: StepScalars) -> StepScalars:
        """Return the scalars of this tensor's update, given those of the step.

        They are computed in float64 from the step's float32 scalars, and rounded once.
        """
        usual_decay = not self.decays or nearest_float32(self.weight_decay) == step.weight_decay
        if self.lr_scale == 1.0 and usual_decay:
            return step  # without decay, `apply_update` ignores its scalars
        rate = nearest_float32(step.learning_rate * self.lr_scale)
        exact = {
            "step_size": step.step_size * self.lr_scale,
            "drift": step.drift * self.lr_scale,
            "weight_decay": self.weight_decay,
            "decay_factor": 1.0 - rate * self.weight_decay,
        }
        scaled = {name: nearest_float32(value) for name, value in exact.items()}
        return step.model_copy(update={"learning_rate": rate, **scaled})


def tensor_rule(name: str, spec: OptimizerSpec) -> TensorRule:
    """Return the rule of a tensor: that of the first group with a pattern that matches its name."""
    usual = spec.weight_decay if decays(name, spec) else 0.0
    for group in spec.groups:
        if any(fnmatchcase(name, pattern) for pattern in group.match):
            own = group.weight_decay
            return TensorRule(group.lr_scale, usual if own is None else own)
    return TensorRule(1.0, usual)


def decays(name: str, spec: OptimizerSpec) -> bool:
    """Whether weight decay applies outside of groups: no part in `no_decay`, ignoring case."""
    lower = name.lower()
    return not any(part.lower() in lower for part in spec.no_decay)


_NAMES_SHOWN = 8


def unmatched_pattern(spec: OptimizerSpec, blocks: Sequence[Block]) -> str:
    """Describe a pattern of `optimizer.groups` that no tensor is left for; empty if none."""
    names = [t.name for block in blocks if block.is_trained for t in block.tensors]
    left = dict.fromkeys(names)
    for number, group in enumerate(spec.groups):
        matched = set()
        for pattern in group.match:
            found = [name for name in left if fnmatchcase(name, pattern)]
            if not found:
                taken = any(fnmatchcase(name, pattern) for name in names)
                why = "all that match are in earlier groups" if taken else "none matches"
                more = ", ..." if len(names) > _NAMES_SHOWN else ""
                return (
                    f"optimizer.groups[{number}].match: expected the name of a trained tensor, got "
                    f"{pattern!r}; {why} (* stands for any characters); the "
                    f"{len(names)} names are {', '.join(names[:_NAMES_SHOWN])}{more}"
                )
            matched.update(found)
        for name in matched:
            del left[name]
    return ""
