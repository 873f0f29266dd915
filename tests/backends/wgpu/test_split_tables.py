"""Tables that exceed a binding are split into parts, with the gradients of whole tables."""

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
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from backends.wgpu.weights.host_copy import is_released
from protocol.base.errors import SamestepError
from tests.backends.wgpu.small_models import (
    assert_equals_cpu,
    bert,
    class_loss,
    gradients,
    labeled_batch,
    llama,
    next_token_loss,
    qwen3_with_lora,
    token_batch,
    trainable,
)

WIDTH = 64
LARGEST_BYTES = 17_000
"""A table of 97 x 64 takes 24,832 bytes; all other tensors in these models are below this limit."""
TEN_PARTS_BYTES = 8000
"""A table of 600 x 32 takes 76,800 bytes, so it has ten parts: more than a shader binds."""


def new_program(device, job, batch, largest_bytes=LARGEST_BYTES):
    kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(
        device, job, kernel_options, adds_on_device=False, largest_bytes=largest_bytes
    )
    program.check(batch)
    return program


def make_wide(make_model, **options):
    return make_model(hidden_size=WIDTH, intermediate_size=48, **options)


def freeze_tables(module):
    """Freeze embeddings and head; all other tensors are trained."""
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            layer.requires_grad_(False)
    head = module.get_output_embeddings()
    if head is not None:
        head.requires_grad_(False)
    return module


def short_batch(samples=2, length=8):
    return token_batch(samples, length)


MODELS: dict[str, Any] = {
    "Qwen3 with LoRA": (lambda: make_wide(qwen3_with_lora), next_token_loss, short_batch),
    "Qwen3 with LoRA and a tied head": (
        lambda: make_wide(qwen3_with_lora, tie_word_embeddings=True), next_token_loss, short_batch,
    ),
    "Llama with a frozen tied table": (
        lambda: freeze_tables(make_wide(llama, tie_word_embeddings=True)),
        next_token_loss,
        short_batch,
    ),
    "BERT with frozen embeddings": (
        lambda: freeze_tables(make_wide(bert)), class_loss, lambda: labeled_batch(2, 8),
    ),
    "Llama": (lambda: make_wide(llama), next_token_loss, short_batch),
    "Llama with a tied head": (
        lambda: make_wide(llama, tie_word_embeddings=True), next_token_loss, short_batch,
    ),
    "BERT": (lambda: make_wide(bert), class_loss, lambda: labeled_batch(2, 8)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_whole_tables(device, name):
    make_model, loss, make_batch = MODELS[name]
    assert_equals_whole_tables(device, make_model(), loss, make_batch(), LARGEST_BYTES)


def assert_equals_whole_tables(device, module, loss, batch, largest_bytes, **options):
    """Compare gradients with split tables with those of whole tables and of torch.

    `options` are those of `Trainable`.
    """
    results = []
    for limit_bytes in (None, largest_bytes):
        job = trainable(module, loss, **options)
        program = new_program(device, job, batch, limit_bytes)
        results.append(gradients(program, batch))
        is_larger = program.estimates[-1].largest_buffer[0] > largest_bytes
        assert is_larger == (limit_bytes is None)
        program.close()
    whole, split = results
    round_frozen_base(module, options.get("base_dtype", "float32"))
    assert_equals_cpu(module, job.blocks, loss, batch, split)
    for block, values in whole.items():
        assert np.linalg.norm(values - split[block]) <= 2e-6 * np.linalg.norm(values)


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
    """The head's input is a slice, so the head is a batch of products with one table."""

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
def test_a_table_may_have_more_parts_than_a_shader_binds(device, module, batch):
    assert_equals_whole_tables(device, module(), token_loss, batch, TEN_PARTS_BYTES)


class WithHead(nn.Module):
    """A trained layer and a frozen head, which may be quantized."""

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
    ("base_dtype", "largest_bytes"),
    [
        pytest.param("float32", 30_000, marks=pytest.mark.slow),
        ("bfloat16", 20_000),
        ("int8", 17_000),
        ("int4", 16_500),
    ],
)
def test_a_frozen_head_is_split_in_any_storage_type(device, base_dtype, largest_bytes):
    x = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)
    batch = Batch({"x": x}, 3.0)
    module = WithHead()
    assert_equals_whole_tables(
        device, module, square_loss, batch, largest_bytes, base_dtype=base_dtype
    )


@pytest.mark.parametrize(
    ("base_dtype", "largest_bytes"),
    [
        ("float32", LARGEST_BYTES),
        ("int4", 1 << 20),
        pytest.param("float32", 1 << 20, marks=pytest.mark.slow),
        pytest.param("int4", LARGEST_BYTES, marks=pytest.mark.slow),
    ],
)
def test_values_are_readable_after_their_release_on_the_host(device, base_dtype, largest_bytes):
    """The reader keeps quantized weights on the host, and reads all others from the device."""
    job = trainable(
        make_wide(qwen3_with_lora, tie_word_embeddings=True), next_token_loss, base_dtype=base_dtype
    )
    kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(
        device, job, kernel_options, adds_on_device=False, largest_bytes=largest_bytes
    )
    current_values = program.make_value_reader()
    values_before = current_values()
    program.check(short_batch())
    values_after = current_values()
    assert job.module is not None
    released = [name for name, parameter in job.module.named_parameters() if is_released(parameter)]
    assert any("embed_tokens" in name for name in released)
    assert len(released) > 5, "also weights of layers"
    assert values_before.keys() == values_after.keys()
    for name, value in values_before.items():
        assert torch.equal(value, values_after[name]), name


def test_evaluation_and_loss_are_equal_with_a_split_table(device):
    def evaluate(module, arrays):
        return {"loss": float(token_loss(module, arrays))}

    module = TiedTable()
    job = trainable(module, token_loss, evaluate=evaluate)
    program = new_program(device, job, tokens(), TEN_PARTS_BYTES)
    (*_, loss) = program.gradients([(tokens(), 0)])
    assert isinstance(loss, Loss)
    evaluation_loss = program.evaluate(tokens())["loss"]
    program.close()
    arrays = {name: torch.tensor(array) for name, array in tokens().arrays.items()}
    with torch.no_grad():
        assert evaluation_loss == pytest.approx(evaluate(module, arrays)["loss"], rel=1e-6)
    assert loss.loss_sum == pytest.approx(evaluation_loss, rel=1e-6)


class PenalizedTable(TiedTable):
    """Also uses the table outside lookups and products."""

    def forward(self, ids):
        return super().forward(ids) + self.table.weight.square().sum()


class LookupLayer(nn.Module):
    """Looks up rows, without an effect on its result."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, ids):
        return ids + 0.0 * self.table(ids.long()).sum(-1)


class TablesInLayers(nn.Module):
    """Layers that each have a table."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(
            LookupLayer(nn.Embedding(600, 32).requires_grad_(False)) for _ in range(2)
        )

    def forward(self, ids):
        x = ids.float()
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def sum_loss(module, arrays):
    return module(arrays["ids"]).sum()


# Model, loss, batch and limit in bytes, by the error.
REFUSED: dict[str, Any] = {
    r"'table.weight' .*in the loss": (PenalizedTable, token_loss, tokens(), TEN_PARTS_BYTES),
    r"in layers.0": (TablesInLayers, sum_loss, tokens(), TEN_PARTS_BYTES),
    r"'an intermediate result'.*fewer tokens": (
        TiedTable,
        token_loss,
        tokens(1, 6),
        TEN_PARTS_BYTES,
    ),
}


def test_a_trained_table_is_loaded_and_summed_in_parts(device):
    """The device adds gradient sums with the bits of sums on the host."""
    module = make_wide(llama, tie_word_embeddings=True)
    job = trainable(module, next_token_loss)
    rng = np.random.default_rng(1)
    values = [rng.normal(0, 0.05, block.elements).astype(np.float32) for block in job.blocks]
    kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(
        device, job, kernel_options, adds_on_device=True, largest_bytes=LARGEST_BYTES
    )
    program.check(short_batch())
    initial_gradients = gradients(program, short_batch())
    program.load(values)
    loaded_gradients = gradients(program, short_batch())
    assert_equals_cpu(module, job.blocks, next_token_loss, short_batch(), loaded_gradients)
    assert any(
        values.tobytes() != loaded_gradients[block].tobytes()
        for block, values in initial_gradients.items()
    )
    sums = []
    for compute in (program.gradients, program.sum_on_host):
        items = compute([(short_batch(), leaf) for leaf in range(2)])
        sums.append([item.values.tobytes() for item in items if isinstance(item, BlockGradient)])
    program.close()
    assert sums[0] == sums[1]


@pytest.mark.parametrize("message", REFUSED)
def test_tables_that_cannot_be_split_are_refused_before_the_start(device, message):
    make_module, loss, batch, largest_bytes = REFUSED[message]
    with pytest.raises(SamestepError, match=message):
        new_program(device, trainable(make_module(), loss), batch, largest_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_table_of_140_mib_on_a_device_that_binds_128_mib(device, is_frozen):
    if device.largest_buffer_bytes >= 140 * 2**20:
        pytest.skip("this device binds the whole table")
    rows, width = 143_360, 256
    module = TiedTable(1, width)
    module.table = nn.Embedding.from_pretrained(torch.rand(rows, width) - 0.5, freeze=is_frozen)
    job = trainable(module, token_loss)
    batch = tokens(limit=rows)
    program = new_program(device, job, batch, None)
    assert_equals_cpu(module, job.blocks, token_loss, batch, gradients(program, batch))
    assert program.estimates[-1].weights == 4 * (rows * width + width * width + width)
    program.close()


def test_parts_have_equal_multiples_of_64_rows_if_possible():
    parts = split_rows("t", 151_936, 4 * 151_936 * 2560, 128 * 2**20)
    assert [part.first for part in parts] == [*range(0, 151_936, parts[0].rows)]
    assert parts[0].rows % 64 == 0
    assert all(4 * 2560 * part.rows <= 128 * 2**20 for part in parts)
    assert parts[-1].end == 151_936
    assert len(parts) == 12
    row_bytes = 400
    two_rows_fit = split_rows("t", 10, 10 * row_bytes, 999)
    assert two_rows_fit == split_rows("t", 10, 10 * row_bytes, 800)
    assert [part.rows for part in two_rows_fit] == [2] * 5
    no_row_fits = split_rows("t", 10, 10 * row_bytes, 399)
    assert len(no_row_fits) == 1, "the program refuses this table"
