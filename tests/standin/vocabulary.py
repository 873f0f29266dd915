"""Tests of the memory of losses over a large vocabulary, counted by the stand-in accelerator.

test_standin.py runs these in a process in which torch has the device.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import samestep.hf
from backends.base.interface import Trainable
from backends.eager.eager import EagerBackend
from backends.losses import vocabulary_loss
from samestep.hf.losses import SAMPLES, SummedLoss
from tests import standin
from tests.backends.losses.test_vocabulary_loss import LARGE_CASES, LARGE_VOCABULARY
from tests.samestep.test_hf_large_vocabulary import batch as trainer_batch
from tests.samestep.test_hf_large_vocabulary import items, make_trainer
from tests.small_heads import padded_texts
from worker.models.blocks import cut_into_blocks

TOKENS, CHUNK_TOKENS = 48, 12
LOGITS_BYTES = 4 * TOKENS * LARGE_VOCABULARY


def peak_growth(trainable: Trainable, microbatch: Any) -> tuple[int, int]:
    """Return the peak growth of memory during training and during evaluation, in bytes."""
    program = EagerBackend("accelerator").compile(trainable, microbatch)
    peaks = []
    for compute in (
        lambda: list(program.gradients([(microbatch, 0)])),
        lambda: program.evaluate(microbatch),
    ):
        gc.collect()
        standin.peak_bytes(0)
        start_bytes = standin.peak_bytes(0)
        compute()
        peaks.append(standin.peak_bytes(0) - start_bytes)
    program.close()
    return peaks[0], peaks[1]


def make_trainable(model: Any, loss: Any) -> Trainable:
    """Return a task that trains only one norm, so that logits take most of the memory."""
    model.requires_grad_(requires_grad=False)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name.lower()]
    norms[-1].requires_grad_(requires_grad=True)
    return Trainable(
        cut_into_blocks(model),
        model,
        loss,
        evaluate=lambda module, arrays: {"loss_sum": float(loss(module, arrays))},
    )


@pytest.mark.parametrize("case", LARGE_CASES)
def test_quarter_of_the_tokens_at_once_takes_a_third_of_the_memory(case, monkeypatch):
    build_model, loss, make_batch = LARGE_CASES[case]
    growths = []
    for chunk_tokens in (TOKENS, CHUNK_TOKENS):
        monkeypatch.setattr(vocabulary_loss, "tokens_per_part", lambda _, count=chunk_tokens: count)
        growths.append(
            peak_growth(
                make_trainable(build_model(LARGE_VOCABULARY), loss), make_batch(LARGE_VOCABULARY)
            )
        )
    assert_memory_is_a_third(growths)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "bart"])
def test_quarter_of_the_tokens_takes_a_third_of_the_memory_in_a_trainer(
    name, tmp_path, monkeypatch
):
    build_model, growths = LARGE_CASES[name][0], []
    microbatch = padded_texts(LARGE_VOCABULARY)
    arrays = {**microbatch.arrays, SAMPLES: torch.tensor(2.0).numpy()}
    for chunk_tokens in (TOKENS, CHUNK_TOKENS):
        monkeypatch.setattr(vocabulary_loss, "tokens_per_part", lambda _, count=chunk_tokens: count)
        model = build_model(LARGE_VOCABULARY)
        trainer: Any = make_trainer(samestep.hf.Trainer, model, tmp_path)
        losses = SummedLoss(trainer, [trainer_batch(trainer, items(LARGE_VOCABULARY)[:1])])
        growths.append(
            peak_growth(make_trainable(model, losses.loss), type(microbatch)(arrays, 2.0))
        )
    assert_memory_is_a_third(growths)


def assert_memory_is_a_third(growths: Any) -> None:
    """Compare the growth with all tokens at once and with a quarter; layers add to both."""
    for whole_bytes, parts_bytes in zip(*growths, strict=True):
        assert whole_bytes > 2 * LOGITS_BYTES
        assert parts_bytes < 0.35 * whole_bytes, (whole_bytes, parts_bytes)
