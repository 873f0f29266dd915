"""Tables larger than a binding: split into parts, with the gradients of the whole table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch, BlockGradient, Loss
from backends.quantization.frozen_base import round_frozen_base
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.graph.table_parts import split_rows
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.program import CompiledProgram
from backends.wgpu.weights.host_copy import is_released
from protocol.base.errors import SamestepError
from tests.backends.wgpu.small_models import (
    assert_like_the_cpu,
    bert,
    class_loss,
    gradients,
    labeled,
    llama,
    next_token_loss,
    qwen3_with_lora,
    text,
    trainable,
)

WIDTH = 64
ROW_BYTES = 4 * WIDTH
LARGEST = 17_000
"""A table of 97 x 64 takes 24,832 bytes; nothing else in these models takes as much as this
limit."""


def program_of(device, job, batch, largest_bytes=LARGEST):
    template = Templates(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(
        device, job, template, adds_on_device=False, largest_bytes=largest_bytes
    )
    program.check(batch)
    return program


def widened(model, **changes):
    return model(hidden_size=WIDTH, intermediate_size=48, **changes)


def frozen_embeddings(module):
    """Everything is trained except the tables."""
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            layer.requires_grad_(False)
    module.get_output_embeddings() and module.get_output_embeddings().requires_grad_(False)
    return module


def short(samples=2, length=8):
    return text(samples, length)


MODELS: dict[str, Any] = {
    "a Qwen3 with LoRA": (lambda: widened(qwen3_with_lora), next_token_loss, short),
    "a Qwen3 with LoRA, its head tied": (
        lambda: widened(qwen3_with_lora, tie_word_embeddings=True), next_token_loss, short,
    ),
    "a Llama in full but for its tied table": (
        lambda: frozen_embeddings(widened(llama, tie_word_embeddings=True)), next_token_loss, short,
    ),
    "a BERT in full but for its embeddings": (
        lambda: frozen_embeddings(widened(bert)), class_loss, lambda: labeled(2, 8),
    ),
    "a Llama in full": (lambda: widened(llama), next_token_loss, short),
    "a Llama in full, its head tied": (
        lambda: widened(llama, tie_word_embeddings=True), next_token_loss, short,
    ),
    "a BERT in full": (lambda: widened(bert), class_loss, lambda: labeled(2, 8)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_the_whole_table(device, name):
    make_model, loss, batch = MODELS[name]
    assert_equals_whole_table(device, make_model(), loss, batch(), LARGEST)


def assert_equals_whole_table(device, module, loss, batch, largest, **changes):
    results = []
    for limit in (None, largest):
        job = trainable(module, loss, **changes)
        program = program_of(device, job, batch, limit)
        results.append(gradients(program, batch))
        assert (program.estimates[-1].largest_buffer[0] > largest) == (limit is None)
        program.close()
    unsplit, parts = results
    round_frozen_base(module, changes.get("base_dtype", "float32"))
    assert_like_the_cpu(module, job.blocks, loss, batch, parts)
    for number, values in unsplit.items():
        assert np.linalg.norm(values - parts[number]) <= 2e-6 * np.linalg.norm(values)


class TiedTable(nn.Module):
    """A frozen table used as embedding and head."""

    def __init__(self, tokens=600, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(tokens, width).requires_grad_(False)
        self.middle = nn.Linear(width, width)

    def forward(self, ids):
        return torch.tanh(self.middle(self.table(ids))) @ self.table.weight.T


class SlicedTable(TiedTable):
    """The head's input is not a contiguous matrix: a batch of products with one table."""

    def forward(self, ids):
        return (torch.tanh(self.middle(self.table(ids)))[:, :-1]) @ self.table.weight.T


def token_loss(module, arrays):
    logits = module(arrays["ids"])
    labels = arrays["ids"][:, -logits.shape[1] :]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def tokens(samples=1, length=3, limit=600):
    ids = np.random.default_rng(0).integers(0, limit, (samples, length))
    ids[0, :2] = 0, limit - 1
    return Batch({"ids": ids}, float(samples))


@pytest.mark.parametrize(("module", "batch"), [(TiedTable, tokens()), (SlicedTable, tokens(2, 2))])
def test_more_parts_than_a_shader_binds(device, module, batch):
    assert_equals_whole_table(device, module(), token_loss, batch, 8000)


class WithHead(nn.Module):
    """A frozen head that may be stored in fewer bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 600).requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.middle(x)))


def square_loss(module, arrays):
    return (module(arrays["x"]) ** 2).sum()


@pytest.mark.parametrize(
    ("base_dtype", "largest"),
    [
        pytest.param("float32", 30_000, marks=pytest.mark.slow),  # as the table above
        ("bfloat16", 20_000),
        ("int8", 17_000),
        ("int4", 16_500),
    ],
)
def test_frozen_head_in_any_storage_form(device, base_dtype, largest):
    x = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)
    batch = Batch({"x": x}, 3.0)
    module = WithHead()
    assert_equals_whole_table(device, module, square_loss, batch, largest, base_dtype=base_dtype)


@pytest.mark.parametrize(
    ("base_dtype", "largest_bytes"),
    [
        ("float32", LARGEST),
        ("int4", 1 << 20),
        pytest.param("float32", 1 << 20, marks=pytest.mark.slow),
        pytest.param("int4", LARGEST, marks=pytest.mark.slow),
    ],
)
def test_values_are_readable_after_the_host_released_them(device, base_dtype, largest_bytes):
    """Quantized weights are kept as stored; other weights are read back, tables in parts."""
    job = trainable(
        widened(qwen3_with_lora, tie_word_embeddings=True), next_token_loss, base_dtype=base_dtype
    )
    template = Templates(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(
        device, job, template, adds_on_device=False, largest_bytes=largest_bytes
    )
    values = program.make_value_reader()
    before = values()
    program.check(short())
    after = values()
    assert job.module is not None
    released = [n for n, each in job.module.named_parameters() if is_released(each)]
    assert any("embed_tokens" in name for name in released)
    assert len(released) > 5
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_evaluation_and_loss_equal_the_whole_table(device):
    def evaluate(module, arrays):
        return {"loss": float(token_loss(module, arrays))}

    module = TiedTable()
    job = trainable(module, token_loss, evaluate=evaluate)
    program = program_of(device, job, tokens(), 8000)
    (*_, loss) = program.gradients([(tokens(), 0)])
    assert isinstance(loss, Loss)
    evaluation_loss = program.evaluate(tokens())["loss"]
    program.close()
    arrays = {name: torch.tensor(array) for name, array in tokens().arrays.items()}
    with torch.no_grad():
        assert evaluation_loss == pytest.approx(evaluate(module, arrays)["loss"], rel=1e-6)
    assert loss.loss_sum == pytest.approx(evaluation_loss, rel=1e-6)


class PenalizedTable(TiedTable):
    def forward(self, ids):
        return super().forward(ids) + self.table.weight.square().sum()


class Layer(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, ids):
        return ids + 0.0 * self.table(ids.long()).sum(-1)


class InLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(
            Layer(nn.Embedding(600, 32).requires_grad_(False)) for _ in range(2)
        )

    def forward(self, ids):
        x = ids.float()
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def summed_loss(module, arrays):
    return module(arrays["ids"]).sum()


REFUSED: dict[str, Any] = {
    r"'table.weight' .*in the loss": (PenalizedTable, token_loss, tokens(), 8000),
    r"in layers.0": (InLayers, summed_loss, tokens(), 8000),
    r"'an intermediate result'.*fewer tokens": (TiedTable, token_loss, tokens(1, 6), 8000),
}


def test_trained_table_is_loaded_and_summed_in_parts(device):
    module = widened(llama, tie_word_embeddings=True)
    job = trainable(module, next_token_loss)
    draws = np.random.default_rng(1)
    values = [draws.normal(0, 0.05, block.elements).astype(np.float32) for block in job.blocks]
    template = Templates(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(device, job, template, adds_on_device=True, largest_bytes=LARGEST)
    program.check(short())
    before = gradients(program, short())
    program.load(values)
    after = gradients(program, short())
    assert_like_the_cpu(module, job.blocks, next_token_loss, short(), after)
    assert any(before[n].tobytes() != after[n].tobytes() for n in before)
    contents = []
    for compute in (program.gradients, program.sum_on_host):
        items = compute([(short(), leaf) for leaf in range(2)])
        contents.append([x.values.tobytes() for x in items if isinstance(x, BlockGradient)])
    program.close()
    assert contents[0] == contents[1]


@pytest.mark.parametrize("message", REFUSED)
def test_tables_that_cannot_be_split_are_refused_before_the_start(device, message):
    module, loss, batch, largest = REFUSED[message]
    with pytest.raises(SamestepError, match=message):
        program_of(device, trainable(module(), loss), batch, largest)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_a_table_of_140_mib_on_a_device_that_binds_128(device, frozen):
    if device.largest_buffer_bytes >= 140 * 2**20:
        pytest.skip("this device binds it whole")
    rows, width = 143_360, 256
    module = TiedTable(1, width)
    module.table = nn.Embedding.from_pretrained(torch.rand(rows, width) - 0.5, freeze=frozen)
    job = trainable(module, token_loss)
    batch = tokens(limit=rows)
    program = program_of(device, job, batch, None)
    assert_like_the_cpu(module, job.blocks, token_loss, batch, gradients(program, batch))
    assert program.estimates[-1].weights == 4 * (rows * width + width * width + width)
    program.close()


def test_parts_are_even_and_aligned_to_64():
    parts = split_rows("t", 151_936, 4 * 151_936 * 2560, 128 * 2**20)
    assert [part.first for part in parts] == [*range(0, 151_936, parts[0].rows)]
    assert parts[0].rows % 64 == 0
    assert all(4 * 2560 * part.rows <= 128 * 2**20 for part in parts)
    assert parts[-1].end == 151_936
    assert len(parts) == 12
    assert split_rows("t", 10, 4000, 999) == split_rows("t", 10, 4000, 800)
    assert [part.rows for part in split_rows("t", 10, 4000, 999)] == [2] * 5
    assert len(split_rows("t", 10, 4000, 399)) == 1, "not a row fits: refused elsewhere"
