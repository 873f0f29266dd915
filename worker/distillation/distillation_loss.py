"""What a student loses on a teacher's word: divergence and cross-entropy, summed over tokens.

What a capture does not name is an outcome of its own, the tail: at T = 4 most of the probability is
there, so to leave it out would teach another distribution. A teacher's own part of the divergence
is a constant, which comes along: the loss is zero where both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from protocol.datasets.capture_check import check_temperature
from protocol.datasets.logits_file import Records
from protocol.spec.manifest import CaptureLayout
from protocol.spec.sections.tasks import DistilSpec

NOTHING: Final = -100
"""The label of what is not predicted."""
_TINY: Final = 1e-30
_NONE_OF_IT: Final = -1e30
"""Stands for the logit of what is not in the tail: its exponential is zero, and finite is its
difference to any other."""


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """The loss of a run.

    Attributes:
        alpha: Share of the divergence.
        temperature: Of both distributions in it.
        vocabulary: How many of the student's logits are compared: the teacher's.
        has_tail: Whether the capture leaves something out.
        drawn: Whether tokens were drawn: then it is cross-entropy against them, which differs
            from the divergence by the teacher's entropy.
    """

    alpha: float
    temperature: float
    vocabulary: int
    has_tail: bool
    drawn: bool

    @staticmethod
    def of(spec: DistilSpec, layout: CaptureLayout) -> DistillationLoss:
        """The loss that a run spec asks for.

        Raises:
            DataError: The capture cannot be used at that temperature.
        """
        check_temperature(spec, layout)
        tail = not layout.drawn and layout.top_k < layout.vocabulary
        return DistillationLoss(spec.alpha, spec.temperature, layout.vocabulary, tail, layout.drawn)

    def total(self, logits: torch.Tensor, arrays: Mapping[str, Any]) -> torch.Tensor:
        """Alpha T^2 KL + (1 - alpha) CE, a scalar.

        Args:
            logits: (samples, length, at least the vocabulary), or (tokens, ...), float32.
            arrays: `labels` and what `teacher_arrays` gives.
        """
        parts = []
        if self.alpha > 0:
            parts.append(self.alpha * self.temperature**2 * self.divergence(logits, arrays))
        if self.alpha < 1:
            parts.append((1 - self.alpha) * self.cross_entropy(logits, arrays))
        return sum(parts[1:], parts[0])

    def cross_entropy(self, logits: torch.Tensor, arrays: Mapping[str, Any]) -> torch.Tensor:
        """Summed over the tokens predicted, among those that the teacher knows too."""
        return nn.functional.cross_entropy(
            logits[..., : self.vocabulary].flatten(0, -2),
            arrays["labels"].flatten(),
            ignore_index=NOTHING,
            reduction="sum",
        )

    def divergence(self, logits: torch.Tensor, arrays: Mapping[str, Any]) -> torch.Tensor:
        """KL(teacher || student) at the temperature, summed over the tokens predicted."""
        scaled = logits[..., : self.vocabulary] / self.temperature  # (samples, length, vocabulary)
        whole = torch.logsumexp(scaled, -1)
        ids, teacher = arrays["teacher_ids"], arrays["teacher"]  # (samples, length, k)
        student = scaled.gather(-1, ids) - whole.unsqueeze(-1)
        # Difference by difference: sums of both would lose the digits in which they differ.
        each = (teacher * (self._logs(teacher) - student)).sum(-1)
        if self.has_tail:
            # Adding ones is what every backend can do; tokens of the k largest come once.
            named = torch.zeros_like(scaled).scatter_add(-1, ids, torch.ones_like(teacher))
            rest = torch.logsumexp(scaled + named * _NONE_OF_IT, -1)
            tail = arrays["teacher_tail"]
            each = each + tail * (self._logs(tail) - (rest - whole))
        counted = arrays["labels"] != NOTHING
        return torch.where(counted, each, torch.zeros_like(each)).sum()

    def _logs(self, teacher: torch.Tensor) -> torch.Tensor:
        """Of probabilities, finite at zero; zeros for draws, whose own entropy says nothing."""
        return torch.zeros_like(teacher) if self.drawn else teacher.clamp(min=_TINY).log()


def teacher_arrays(
    records: Records, layout: CaptureLayout, temperature: float
) -> dict[str, NDArray[Any]]:
    """What the loss reads of captured samples, by name.

    `teacher_ids` int64 and `teacher` float32 (samples, length, k): tokens and their probability at
    the temperature. `teacher_tail` float32 (samples, length): that of all others.
    """
    ids = records["topk_ids"].astype(np.int64)
    if layout.drawn:
        zeros = np.zeros(ids.shape[:2], np.float32)
        each = np.full(ids.shape, 1 / layout.top_k, np.float32)
        return {"teacher_ids": ids, "teacher": each, "teacher_tail": zeros}
    lse = records["lse_1" if temperature == 1.0 else "lse_T"].astype(np.float64)
    logs = records["topk_logits"].astype(np.float64) / temperature - lse[..., None]
    whole = np.exp(logs).sum(-1)
    # float16 may round their sum to more than one; and without a tail it is one.
    logs -= np.log(whole if layout.top_k == layout.vocabulary else np.maximum(whole, 1))[..., None]
    probabilities = np.exp(logs)
    tail = np.clip(1.0 - whole, 0.0, None) * (layout.top_k < layout.vocabulary)
    return {
        "teacher_ids": ids,
        "teacher": probabilities.astype(np.float32),
        "teacher_tail": tail.astype(np.float32),
    }
