"""The distillation loss: divergence from a teacher and cross-entropy, summed over tokens.

All tokens that a capture leaves out form one outcome, the tail: at T = 4 it has most of the
probability, so a loss without it teaches another distribution. The divergence includes the
teacher's entropy, a constant, so that it is zero where student and teacher agree. If the capture
sampled the teacher's tokens, there is neither tail nor entropy.
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

IGNORED_LABEL: Final = -100
"""The label of tokens that are not predicted."""
_TINY: Final = 1e-30
_EXCLUDED_LOGIT: Final = -1e30
"""Logit of tokens outside the tail. Its exponential is zero; it is finite, so that differences
of logits are finite too."""


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """The loss of a run.

    Attributes:
        alpha: Weight of the divergence; the cross-entropy has the weight 1 - alpha.
        temperature: Temperature of both distributions in the divergence.
        vocabulary: Size of the teacher's vocabulary; later logits of the student are ignored.
        has_tail: Whether the capture leaves out tokens.
        is_sampled: Whether the capture sampled the teacher's tokens. The divergence is then the
            cross-entropy against them, without the teacher's entropy.
    """

    alpha: float
    temperature: float
    vocabulary: int
    has_tail: bool
    is_sampled: bool

    @staticmethod
    def of(spec: DistilSpec, layout: CaptureLayout) -> DistillationLoss:
        """Return the loss of a run spec.

        Raises:
            DataError: The capture cannot be used at that temperature.
        """
        check_temperature(spec, layout)
        has_tail = not layout.drawn and layout.top_k < layout.vocabulary
        return DistillationLoss(
            spec.alpha, spec.temperature, layout.vocabulary, has_tail, layout.drawn
        )

    def total(self, logits: torch.Tensor, arrays: Mapping[str, Any]) -> torch.Tensor:
        """Return alpha T^2 KL + (1 - alpha) CE, a scalar.

        Args:
            logits: (samples, length, at least the vocabulary), or (tokens, ...), float32.
            arrays: `labels`, and the arrays of `teacher_arrays`.
        """
        parts = []
        if self.alpha > 0:
            parts.append(self.alpha * self.temperature**2 * self.divergence(logits, arrays))
        if self.alpha < 1:
            parts.append((1 - self.alpha) * self.cross_entropy(logits, arrays))
        return sum(parts[1:], parts[0])

    def cross_entropy(self, logits: torch.Tensor, arrays: Mapping[str, Any]) -> torch.Tensor:
        """Return the cross-entropy over the teacher's vocabulary, summed over predicted tokens."""
        return nn.functional.cross_entropy(
            logits[..., : self.vocabulary].flatten(0, -2),
            arrays["labels"].flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )

    def divergence(self, logits: torch.Tensor, arrays: Mapping[str, Any]) -> torch.Tensor:
        """Return KL(teacher || student) at the temperature, summed over predicted tokens."""
        logits_over_t = (
            logits[..., : self.vocabulary] / self.temperature
        )  # (samples, length, vocabulary)
        log_normalizer = torch.logsumexp(logits_over_t, -1)
        ids, teacher = arrays["teacher_ids"], arrays["teacher"]  # (samples, length, k)
        student = logits_over_t.gather(-1, ids) - log_normalizer.unsqueeze(-1)
        # A sum of differences, because a difference of sums loses digits by cancellation.
        token_losses = (teacher * (self._logs(teacher) - student)).sum(-1)
        if self.has_tail:
            # Every backend supports scatter_add; the k largest tokens are distinct.
            is_listed = torch.zeros_like(logits_over_t).scatter_add(
                -1, ids, torch.ones_like(teacher)
            )
            tail_logit = torch.logsumexp(logits_over_t + is_listed * _EXCLUDED_LOGIT, -1)
            tail = arrays["teacher_tail"]
            token_losses = token_losses + tail * (self._logs(tail) - (tail_logit - log_normalizer))
        is_predicted = arrays["labels"] != IGNORED_LABEL
        return torch.where(is_predicted, token_losses, torch.zeros_like(token_losses)).sum()

    def _logs(self, teacher: torch.Tensor) -> torch.Tensor:
        """Return logarithms of probabilities, finite at zero; zeros for sampled tokens."""
        return torch.zeros_like(teacher) if self.is_sampled else teacher.clamp(min=_TINY).log()


def teacher_arrays(
    records: Records, layout: CaptureLayout, temperature: float
) -> dict[str, NDArray[Any]]:
    """Return the arrays of captured samples that the loss reads, by name.

    `teacher_ids` int64 and `teacher` float32, (samples, length, k): tokens and their probabilities
    at the temperature. `teacher_tail` float32, (samples, length): the probability of all other
    tokens.
    """
    ids = records["topk_ids"].astype(np.int64)
    if layout.drawn:
        zeros = np.zeros(ids.shape[:2], np.float32)
        probabilities = np.full(ids.shape, 1 / layout.top_k, np.float32)
        return {"teacher_ids": ids, "teacher": probabilities, "teacher_tail": zeros}
    lse = records["lse_1" if temperature == 1.0 else "lse_T"].astype(np.float64)
    logs = records["topk_logits"].astype(np.float64) / temperature - lse[..., None]
    sums = np.exp(logs).sum(-1)
    # With float16 logits the sum may exceed one; without a tail it must be one.
    logs -= np.log(sums if layout.top_k == layout.vocabulary else np.maximum(sums, 1))[..., None]
    tail = np.clip(1.0 - sums, 0.0, None) * (layout.top_k < layout.vocabulary)
    return {
        "teacher_ids": ids,
        "teacher": np.exp(logs).astype(np.float32),
        "teacher_tail": tail.astype(np.float32),
    }
