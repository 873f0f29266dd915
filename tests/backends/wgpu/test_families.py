"""All model families in the table of docs/vulkan.md: gradients equal torch's, or are refused.

Each model is a tiny one of transformers. Batches are padded on either side. Attention is fused, as
on a GPU, or written out, as on software Vulkan. To write the table to the page:

    SAMESTEP_REWRITE=1 python -m pytest tests/backends/wgpu/test_families.py -k page
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from backends.base.interface import Batch
from backends.wgpu.capture.capture import capture_step
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.graph.opaque import ATTENTION
from backends.wgpu.graph.passes import LOGGER
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import SamestepError
from tests.backends.wgpu.small_models import (
    TOKENS,
    assert_equals_cpu,
    class_loss,
    gradients,
    trainable,
)

SAMPLES, LENGTH, PADDING = 3, 12, 0
DOCS_PAGE = Path(__file__).parents[3] / "docs" / "vulkan.md"
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
GROUPED_HEADS = {"num_key_value_heads": 2}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}

# By name in the docs: the model_type of transformers, and options besides `SIZES`.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", GROUPED_HEADS),
    "Qwen2": ("qwen2", GROUPED_HEADS),
    "Qwen3": ("qwen3", {**GROUPED_HEADS, "head_dim": 8}),
    "Mistral": ("mistral", {**GROUPED_HEADS, "sliding_window": 8, "head_dim": 8}),
    "Gemma 2": ("gemma2", {**GROUPED_HEADS, "head_dim": 8, "sliding_window": 8}),
    "Gemma 3": ("gemma3_text", {**GROUPED_HEADS, "head_dim": 8, "sliding_window": 8}),
    "Phi": ("phi", GROUPED_HEADS),
    "GPT-2": ("gpt2", GPT2_SIZES),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPTBigCode": ("gpt_bigcode", GPT2_SIZES),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "StableLM": ("stablelm", GROUPED_HEADS),
    "Granite": ("granite", GROUPED_HEADS),
    "OLMo 2": ("olmo2", GROUPED_HEADS),
    "Cohere": ("cohere", GROUPED_HEADS),
    "Bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "GPT-Neo": (
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
    ),
    "Falcon": ("falcon", {}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("bert", {}),
    "RoBERTa": ("roberta", {"max_position_embeddings": 40}),
    "DistilBERT": ("distilbert", {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    "ALBERT": ("albert", {"embedding_size": 16}),
    "ModernBERT": ("modernbert", {"local_attention": 8}),
    "ELECTRA": ("electra", {"embedding_size": 16}),
    "ESM": ("esm", {"mask_token_id": 3, "token_dropout": False}),
    "MPNet": ("mpnet", {"max_position_embeddings": 40}),
    "DeBERTa v2": ("deberta-v2", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "T5": ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}
WITHOUT_SDPA = {"Gemma 2", "GPT-Neo", "Bloom", "MPNet", "DeBERTa v2"}
WRITTEN_OUT = {*((family, "eager") for family in (*WITHOUT_SDPA, "Falcon", "T5")), ("T5", "sdpa")}
"""Family and attention implementation of models that are never fused, because their attention has
another formula or trained biases."""
NAME_SUFFIXES = {"T5": "'s encoder"}
_TABLE = re.compile(r"\| family \| `model_type`.*?(?=\n\n)", re.DOTALL)
EXPERTS = {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
# By name: model_type, options, and a part of the error.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Mixtral": (
        "mixtral",
        {**GROUPED_HEADS, **EXPERTS},
        "cannot capture model.layers.0.mlp.experts",
    ),
    "Qwen3-MoE": (
        "qwen3_moe",
        {**GROUPED_HEADS, **EXPERTS},
        "cannot capture model.layers.0.mlp.experts",
    ),
    "DeBERTa": ("deberta", DISENTANGLED, "cannot replace in-place operators"),
}


class MeanPooledClassifier(nn.Module):
    """Classifies the mean output of an encoder, as transformers has no such model for T5."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        hidden = hidden * attention_mask[..., None]
        pooled = hidden.sum(1) / attention_mask.sum(1, keepdim=True)
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=self.head(pooled))


def build_model(
    model_type: str, options: Mapping[str, Any], attention: str, *, is_decoder: bool
) -> nn.Module:
    """Build a tiny model with random weights, without dropout, whose masks would not be torch's."""
    torch.manual_seed(0)
    defaults = transformers.AutoConfig.for_model(model_type).to_dict()
    no_dropout = {key: 0.0 for key, rate in defaults.items() if "drop" in key and rate}
    classes = {} if is_decoder else {"num_labels": 3}
    arguments = {**SIZES, **no_dropout, **classes, **options}
    config = transformers.AutoConfig.for_model(model_type, **arguments)
    module: nn.Module
    if model_type == "t5":
        config._attn_implementation = attention
        module = MeanPooledClassifier(transformers.T5EncoderModel(config))  # type: ignore[arg-type]
    elif is_decoder:
        module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        )
    else:
        module = transformers.AutoModelForSequenceClassification.from_config(
            config, attn_implementation=attention
        )
    with torch.no_grad():  # zeros and ones would hide whether the device uses a weight
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return module


def decoder_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    logits = module(input_ids=arrays["input_ids"], attention_mask=arrays["attention_mask"]).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


def padded_batch(side: str, *, is_decoder: bool) -> Batch:
    """Return texts of three lengths, padded on the left or right.

    Labels are next tokens for decoders, and classes otherwise.
    """
    rng = np.random.default_rng(1)
    positions = np.arange(LENGTH) if side == "right" else np.arange(LENGTH)[::-1]
    mask = (positions < np.array([[LENGTH], [7], [4]])).astype(np.int64)
    ids = rng.integers(4, TOKENS, (SAMPLES, LENGTH)) * mask + PADDING * (1 - mask)
    # With one sample per class, the gradients of a head's bias would cancel except for rounding.
    classes = np.array([0, 2, 2])
    labels = np.where(mask == 1, np.roll(ids, -1, 1), -100) if is_decoder else classes
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Batch(arrays, float(SAMPLES))


@pytest.fixture
def compile_program(device) -> Iterator[Callable[..., CompiledProgram]]:
    """Provide a function that compiles a model; its programs are closed after the test."""
    programs: list[CompiledProgram] = []

    def compile_for_device(
        module: nn.Module, loss: Any, *, cooperative: bool, bindings: int = 8
    ) -> CompiledProgram:
        kernel_options = KernelOptions(cooperative, MatmulTuner(device).shader, bindings=bindings)
        job = trainable(module, loss)
        programs.append(CompiledProgram(device, job, kernel_options, adds_on_device=True))
        return programs[-1]

    yield compile_for_device
    for program in programs:
        program.close()


def has_fused_attention(module: nn.Module, loss: Any, batch: Batch) -> bool:
    """Whether a capture contains fused attention, if any size may be fused."""
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    names = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
    capture = capture_step(module, loss, names, arrays, lambda _: True)
    graphs = [capture.graph, *(kind.graph for kind in capture.kinds)]
    return any(node.target is ATTENTION for graph in graphs for node in graph.graph.nodes)


def families_table() -> str:
    """Return the table of families and results as Markdown."""
    rows = ["| family | `model_type` | gradients | attention on a card |", "|---|---|---|---|"]
    for name, (model_type, _) in (DECODERS | ENCODERS).items():
        fused = [
            f"`{attention}`"
            for attention in attention_implementations(name)
            if (name, attention) not in WRITTEN_OUT
        ]
        description = f"fused: {' and '.join(fused)}" if fused else "written out"
        full_name = name + NAME_SUFFIXES.get(name, "")
        rows.append(f"| {full_name} | `{model_type}` | as torch's | {description} |")
    rows.append("| T5, encoder and decoder | `t5` | as torch's | written out |")
    rows += [
        f"| {name} | `{model_type}` | refused | |" for name, (model_type, _, _) in REFUSED.items()
    ]
    return "\n".join(rows)


def attention_implementations(family: str) -> tuple[str, ...]:
    """Return the values of `model.attention` that transformers supports for a family."""
    return ("eager",) if family in WITHOUT_SDPA else ("eager", "sdpa")


def test_page_has_the_table_of_families():
    text = DOCS_PAGE.read_text("utf-8")
    if os.environ.get("SAMESTEP_REWRITE"):
        text = _TABLE.sub(lambda _: families_table(), text)
        DOCS_PAGE.write_text(text, "utf-8")
    match = _TABLE.search(text)
    assert match is not None
    assert match[0] == families_table()


@pytest.mark.slow
@pytest.mark.parametrize("cooperative", [True, False], ids=["fused", "written out"])
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        (family, attention)
        for family in (*DECODERS, *ENCODERS)
        for attention in attention_implementations(family)
    ],
)
def test_gradients_equal_those_of_the_cpu(compile_program, family, cooperative, attention):
    is_decoder = family in DECODERS
    model_type, options = (DECODERS if is_decoder else ENCODERS)[family]
    loss = decoder_loss if is_decoder else class_loss
    module = build_model(model_type, options, attention, is_decoder=is_decoder)
    job = trainable(module, loss)
    bindings = 16 if attention == "sdpa" else 8  # those of GPUs, and those of every adapter
    program = compile_program(module, loss, cooperative=cooperative, bindings=bindings)
    program.check(padded_batch("right", is_decoder=is_decoder))
    for side in ("right", "left"):
        batch = padded_batch(side, is_decoder=is_decoder)
        assert_equals_cpu(module, job.blocks, loss, batch, gradients(program, batch))
    if cooperative:
        is_fused = has_fused_attention(module, loss, batch)
        assert is_fused == ((family, attention) not in WRITTEN_OUT)


def translation_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    logits = module(
        input_ids=arrays["input_ids"], attention_mask=arrays["attention_mask"],
        decoder_input_ids=arrays["input_ids"][:, :7],
    ).logits  # fmt: skip
    labels = arrays["labels"][:, :7].flatten()
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum"
    )


@pytest.mark.slow
@pytest.mark.parametrize("cooperative", [True, False], ids=["fused", "written out"])
def test_gradients_of_t5_with_its_decoder_equal_those_of_the_cpu(compile_program, cooperative):
    torch.manual_seed(0)
    model_type, options = ENCODERS["T5"]
    settings = {**SIZES, **options, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, **settings)
    module = transformers.T5ForConditionalGeneration(config)  # type: ignore[arg-type]
    job, batch = trainable(module, translation_loss), padded_batch("right", is_decoder=True)
    program = compile_program(module, translation_loss, cooperative=cooperative)
    program.check(batch)
    actual = gradients(program, batch)
    assert_equals_cpu(module, job.blocks, translation_loss, batch, actual)


def packed_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    logits = module(input_ids=arrays["input_ids"], position_ids=arrays["position_ids"]).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


@pytest.mark.parametrize(
    "cooperative",
    [pytest.param(True, id="fused", marks=pytest.mark.slow), pytest.param(False, id="written out")],
)
@pytest.mark.parametrize(
    "family",
    ["Llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("GPT-2", "Mistral"))],
)
def test_packed_documents_do_not_attend_to_each_other(compile_program, family, cooperative):
    """As in `worker.data.packing`, positions restart at each document, and each padding token is a
    separate document."""
    model_type, options = DECODERS[family]
    module = build_model(model_type, options, "sdpa", is_decoder=True)
    batch = padded_batch("right", is_decoder=True)
    positions = np.array([[*range(5), *range(7)], [*range(4), *range(3), *[0] * 5], range(LENGTH)])
    ids, labels = batch.arrays["input_ids"], batch.arrays["labels"]
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
    job, packed = trainable(module, packed_loss), Batch(arrays, batch.weight)
    program = compile_program(module, packed_loss, cooperative=cooperative)
    program.check(packed)
    assert_equals_cpu(module, job.blocks, packed_loss, packed, gradients(program, packed))

    def first_sample_loss(tokens: slice) -> float:
        inputs = {name: torch.tensor(array[:1, tokens]) for name, array in arrays.items()}
        return float(packed_loss(module, inputs).detach())

    separate = first_sample_loss(slice(5)) + first_sample_loss(slice(5, None))
    assert first_sample_loss(slice(None)) == pytest.approx(separate, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_refusals_are_one_line(compile_program, family, caplog):
    logging.getLogger(LOGGER).addHandler(caplog.handler)
    model_type, options, reason = REFUSED[family]
    is_decoder = not family.startswith("DeBERTa")
    loss = decoder_loss if is_decoder else class_loss
    module = build_model(model_type, options, "eager", is_decoder=is_decoder)
    program = compile_program(module, loss, cooperative=False)
    with pytest.raises(SamestepError, match=reason) as error:
        program.check(padded_batch("right", is_decoder=is_decoder))
    logging.getLogger(LOGGER).removeHandler(caplog.handler)
    assert "\n" not in str(error.value)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
