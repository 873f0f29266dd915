"""Indices outside their table are refused before the upload, as torch raises an error for them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from backends.base.interface import Batch, LossFailed, Trainable
from backends.wgpu.capture.capture import capture_step
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.graph.table_indices import TableIndices
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import DataError
from tests.backends.wgpu.small_models import gradients
from worker.models.blocks import cut_into_blocks

TOKENS, CLASSES = 10, 3


class Classifier(nn.Module):
    """Classifies the mean embedding of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(TOKENS, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table(ids).mean(1))
        return logits


def loss(module: nn.Module, arrays: Any) -> torch.Tensor:
    return functional.cross_entropy(module(arrays["x"]), arrays["y"], reduction="sum")


def make_arrays(ids: int = 9, label: int = 2) -> dict[str, Any]:
    return {"x": np.array([[0, ids], [1, 2]]), "y": np.array([0, label])}


Y_LOOKUP = "which the model, or its loss, looks up in 3 rows: expected 0 to 2"
# Messages by token id and label.
OUTSIDE_TABLE = {
    (10, 2): "input 'x' has 10 at [0, 1], which table looks up in 10 rows: expected 0 to 9",
    (-1, 2): "input 'x' has -1 at [0, 1], which table looks up in 10 rows: expected 0 to 9",
    (9, 3): f"input 'y' has 3 at [1], {Y_LOOKUP}",
    (9, -1): f"input 'y' has -1 at [1], {Y_LOOKUP}",
}


def refuse_indices_outside(loss: Any, arrays: dict[str, Any]) -> None:
    """Capture the loss with valid arrays, and check these arrays."""
    module = Classifier()
    tensors = {name: torch.tensor(array) for name, array in make_arrays().items()}
    names = [name for name, _ in module.named_parameters()]
    capture = capture_step(module, loss, names, tensors)
    TableIndices(capture.graph, capture.arrays).refuse_indices_outside(arrays)


@pytest.mark.parametrize(("id_and_label", "message"), OUTSIDE_TABLE.items())
def test_refusals_name_input_position_and_table(id_and_label, message):
    arrays = make_arrays(*id_and_label)
    with pytest.raises((IndexError, RuntimeError)):
        loss(Classifier(), {name: torch.tensor(array) for name, array in arrays.items()})
    with pytest.raises(DataError, match=re.escape(message)):
        refuse_indices_outside(loss, arrays)


@pytest.mark.parametrize("label", [*range(CLASSES), -100])
def test_valid_and_ignored_indices_pass(label):
    refuse_indices_outside(loss, make_arrays(9, label))


def test_the_loss_defines_the_ignored_label():
    def loss_ignoring_7(module: nn.Module, arrays: Any) -> torch.Tensor:
        logits = module(arrays["x"])
        return functional.cross_entropy(logits, arrays["y"], ignore_index=7, reduction="sum")

    refuse_indices_outside(loss_ignoring_7, make_arrays(9, 7))
    with pytest.raises(DataError, match="input 'y' has -100"):
        refuse_indices_outside(loss_ignoring_7, make_arrays(9, -100))


def test_negative_indices_are_valid_except_in_gather():
    def indexed_loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return module(arrays["x"])[arrays["y"]].sum()

    refuse_indices_outside(indexed_loss, make_arrays(9, -2))
    with pytest.raises(DataError, match=r"'y' has -3 at \[1\], .* in 2 rows: expected -2 to 1"):
        refuse_indices_outside(indexed_loss, make_arrays(9, -3))

    def gathered_loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return module(arrays["x"]).gather(1, arrays["y"][:, None]).sum()

    with pytest.raises(DataError, match=r"'y' has -2 at \[1\], .* in 3 rows: expected 0 to 2"):
        refuse_indices_outside(gathered_loss, make_arrays(9, -2))


def test_a_token_that_is_no_label_may_exceed_the_number_of_classes():
    def next_token_loss(module: Any, arrays: Any) -> torch.Tensor:
        """The first token is no label, and the last has none."""
        padded = functional.pad(arrays["x"], (0, 1), value=-100)
        logits = module.table(arrays["x"]).flatten(0, 1)
        labels = padded[..., 1:].contiguous().view(-1)
        losses = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return losses + arrays["y"].sum()

    with pytest.raises(DataError, match=r"'x' has 9 at \[0, 1\], .* in 4 rows: expected 0 to 3"):
        refuse_indices_outside(next_token_loss, make_arrays(9))
    refuse_indices_outside(next_token_loss, make_arrays(3))
    arrays = make_arrays(3)
    arrays["x"][:, 0] = 9  # valid in the token table
    refuse_indices_outside(next_token_loss, arrays)


def test_a_constant_index_is_refused_without_a_position():
    def padded_loss(module: Any, arrays: Any) -> torch.Tensor:
        ids = functional.pad(arrays["x"], (1, 0), value=TOKENS)
        result: torch.Tensor = module(ids).sum()
        return result

    with pytest.raises(DataError, match=f"input 'x' has {TOKENS}, which table"):
        refuse_indices_outside(padded_loss, make_arrays())


def test_float_indices_are_truncated():
    def truncating_loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return module(arrays["x"])[:, arrays["z"].long()].sum()

    module, names = Classifier(), ["table.weight"]
    tensors = {"x": torch.zeros((2, 2), dtype=torch.int64), "z": torch.zeros(2)}
    capture = capture_step(module, truncating_loss, names, tensors)
    indices = TableIndices(capture.graph, capture.arrays)
    indices.refuse_indices_outside({"x": np.zeros((2, 2), int), "z": np.array([-3.9, 2.9], "f4")})
    with pytest.raises(DataError, match=r"'z' has 3 at \[0\], .* in 3 rows"):
        indices.refuse_indices_outside({"x": np.zeros((2, 2), int), "z": np.array([3.1, 0], "f4")})


def test_only_the_computed_index_must_be_valid():
    def clamped_loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return module(arrays["x"].clamp(0, 9)).gather(1, arrays["y"][:, None] % 3).sum()

    refuse_indices_outside(clamped_loss, make_arrays(99, 17))


def test_program_refuses_invalid_indices_in_training_and_evaluation(device):
    module = Classifier()

    def evaluate(module: nn.Module, arrays: Any) -> dict[str, float]:
        return {"loss": float(loss(module, arrays))}

    job = Trainable(cut_into_blocks(module), module, loss, evaluate)
    kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(device, job, kernel_options, adds_on_device=True)
    try:
        valid_batch, invalid_batch = Batch(make_arrays(), 2.0), Batch(make_arrays(99), 2.0)
        program.check(valid_batch)
        with pytest.raises(
            DataError, match=r"'x' has 99 at \[0, 1\], which table looks up"
        ) as error:
            gradients(program, invalid_batch)
        assert isinstance(error.value, LossFailed)
        assert error.value.batch is invalid_batch
        assert error.value.row == 0
        assert program.evaluate(valid_batch)["loss"] > 0
        with pytest.raises(DataError, match=r"has 99 at \[0, 1\], which table looks up in 10 rows"):
            program.evaluate(invalid_batch)
        with pytest.raises(DataError, match=rf"^input 'y' has 7 at \[1\], {Y_LOOKUP}$"):
            program.evaluate(Batch(make_arrays(9, 7), 2.0))
        assert gradients(program, valid_batch)
    finally:
        program.close()
