"""The student's loss and gradients against plain torch over all of a teacher's logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from protocol.base.errors import DataError
from protocol.datasets.logits_file import Records, record_dtype
from protocol.spec.manifest import CaptureLayout
from protocol.spec.sections.tasks import DistilSpec
from worker.distillation.distillation_loss import IGNORED_LABEL, DistillationLoss, teacher_arrays

SAMPLES, LENGTH, VOCABULARY = 2, 12, 600


def random_logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make logits of a teacher and of a partly trained student, and labels, in float64.

    As in a trained model, few tokens have most of the probability (Zipf's law, squared).
    """
    random = np.random.default_rng(1)
    shape = SAMPLES, LENGTH, VOCABULARY
    ranks = random.permuted(np.broadcast_to(np.arange(1.0, VOCABULARY + 1), shape), axis=-1)
    teacher = -2 * np.log(ranks) + random.standard_normal(shape) / 2
    student = teacher + random.standard_normal(shape)
    labels = random.integers(0, VOCABULARY, (SAMPLES, LENGTH))
    labels[1, 7:] = IGNORED_LABEL
    # Both computations get exactly the same inputs.
    return torch.tensor(teacher), torch.tensor(student).float().double(), torch.tensor(labels)


def captured_records(teacher: torch.Tensor, layout: CaptureLayout) -> Records:
    records = np.zeros(SAMPLES, record_dtype(layout))
    shifted_logits = teacher - teacher.amax(-1, keepdim=True)
    best = shifted_logits.topk(layout.top_k)
    records["topk_ids"], records["topk_logits"] = best.indices, best.values
    records["lse_1"] = shifted_logits.logsumexp(-1)
    records["lse_T"] = (shifted_logits / layout.temperature).logsumexp(-1)
    return records


def as_captured(teacher: torch.Tensor) -> torch.Tensor:
    """Return all of a teacher's logits, rounded as in a capture."""
    # numpy rounds float64 to float16 directly; torch rounds to float32 first.
    shifted_logits = (teacher - teacher.amax(-1, keepdim=True)).numpy()
    return torch.tensor(shifted_logits.astype(np.float16).astype(np.float64))


def reference_loss(
    teacher: torch.Tensor, student: torch.Tensor, labels: torch.Tensor, alpha: float, t: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient in float64, over the whole vocabulary."""
    student = student.clone().requires_grad_()
    label_mask = labels != IGNORED_LABEL
    divergence = torch.nn.functional.kl_div(
        (student / t).log_softmax(-1)[label_mask],
        (teacher / t).log_softmax(-1)[label_mask],
        reduction="sum",
        log_target=True,
    )
    cross_entropy_sum = torch.nn.functional.cross_entropy(
        student[label_mask], labels[label_mask], reduction="sum"
    )
    loss = alpha * t**2 * divergence + (1 - alpha) * cross_entropy_sum
    (gradient,) = torch.autograd.grad(loss, student)
    return loss.detach(), gradient


def distillation_loss(
    records: Records,
    layout: CaptureLayout,
    student: torch.Tensor,
    labels: torch.Tensor,
    alpha: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    spec = DistilSpec(alpha=alpha, temperature=layout.temperature)
    arrays: dict[str, Any] = {"labels": labels}
    for name, array in teacher_arrays(records, layout, layout.temperature).items():
        arrays[name] = torch.tensor(array)
    logits = student.float().requires_grad_()
    loss = DistillationLoss.of(spec, layout).total(logits, arrays)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach().double(), gradient.double()


def layout_of(k: int, t: float, *, is_sampled: bool = False) -> CaptureLayout:
    return CaptureLayout(
        tokens=LENGTH, vocabulary=VOCABULARY, top_k=k, temperature=t, drawn=is_sampled
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_loss_with_all_logits_equals_torch(alpha, temperature):
    teacher, student, labels = random_logits()
    layout = layout_of(VOCABULARY, temperature)
    loss, gradient = distillation_loss(
        captured_records(teacher, layout), layout, student, labels, alpha
    )
    expected, exact = reference_loss(as_captured(teacher), student, labels, alpha, temperature)
    assert abs(loss - expected) <= 1e-6 * abs(expected)
    assert (gradient - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize(
    ("temperature", "loss_error", "gradient_error"),
    [(1.0, 0.02, 0.005), (2.0, 0.35, 0.12), (4.0, 0.72, 0.6)],
)
def test_error_with_64_of_600_logits_is_bounded(temperature, loss_error, gradient_error):
    """The tail is one outcome: the higher the temperature, the larger its probability.

    Measured: 0.0135, 0.326 and 0.695 of the loss, 0.0027, 0.105 and 0.569 of the gradient.
    """
    teacher, student, labels = random_logits()
    layout = layout_of(64, temperature)
    loss, gradient = distillation_loss(
        captured_records(teacher, layout), layout, student, labels, 1.0
    )
    expected, exact = reference_loss(teacher, student, labels, 1.0, temperature)
    errors = float((expected - loss) / expected), float((gradient - exact).norm() / exact.norm())
    # Joining outcomes never increases a divergence (data processing inequality).
    assert -1e-3 <= errors[0] <= loss_error
    assert errors[1] <= gradient_error
    # Without the tail, the rest would be no distribution: that is far worse.
    records = captured_records(teacher, layout)
    arrays = teacher_arrays(records, layout, temperature)
    left_out = 1 - arrays["teacher"].sum(-1)
    assert arrays["teacher_tail"] == pytest.approx(left_out, abs=1e-5)


def test_loss_is_zero_where_teacher_and_student_agree():
    teacher, _, labels = random_logits()
    layout = layout_of(64, 2.0)
    loss, gradient = distillation_loss(
        captured_records(teacher, layout), layout, teacher, labels, 1.0
    )
    label_count = int((labels != IGNORED_LABEL).sum())
    assert abs(float(loss)) / label_count < 1e-3
    assert float(gradient.norm()) / label_count < 1e-2


def test_mean_over_draws_converges_to_the_full_gradient():
    teacher, student, labels = random_logits()
    layout = layout_of(20_000, 2.0, is_sampled=True)
    records = np.zeros(SAMPLES, record_dtype(layout))
    chances = (teacher / 2.0).softmax(-1).reshape(-1, VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    draws = torch.multinomial(chances, layout.top_k, replacement=True, generator=generator)
    records["topk_ids"] = draws.reshape(SAMPLES, LENGTH, -1)
    _, gradient = distillation_loss(records, layout, student, labels, 1.0)
    _, exact = reference_loss(teacher, student, labels, 1.0, 2.0)
    assert (gradient - exact).norm() <= 0.1 * exact.norm()


def test_loss_is_additive_over_samples():
    teacher, student, labels = random_logits()
    layout = layout_of(16, 1.0)
    records = captured_records(teacher, layout)
    total_loss, _ = distillation_loss(records, layout, student, labels, 0.5)
    parts = [
        distillation_loss(records[n : n + 1], layout, student[n : n + 1], labels[n : n + 1], 0.5)[0]
        for n in range(SAMPLES)
    ]
    assert float(sum(parts)) == pytest.approx(float(total_loss), rel=1e-6)


def test_padding_of_the_student_s_vocabulary_is_not_compared():
    teacher, student, labels = random_logits()
    layout = layout_of(16, 1.0)
    wider = torch.cat([student, torch.full((SAMPLES, LENGTH, 8), 50.0)], -1)
    unpadded_loss, _ = distillation_loss(
        captured_records(teacher, layout), layout, student, labels, 0.5
    )
    padded, gradient = distillation_loss(
        captured_records(teacher, layout), layout, wider, labels, 0.5
    )
    assert padded == unpadded_loss
    assert not gradient[..., VOCABULARY:].any()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (layout_of(4, 4.0), "distil.temperature 1 or 4"),
        (layout_of(4, 3.0, is_sampled=True), "distil.temperature=3"),
    ],
)
def test_a_temperature_that_was_not_captured_is_refused(layout, message):
    with pytest.raises(DataError, match=message):
        DistillationLoss.of(DistilSpec(temperature=2.0), layout)
