"""Every model family that docs/vulkan.md names: gradients equal torch's CPU, or one clear error.

Each model is a tiny one of transformers, padded on either side, with attention fused as on a card
and unfused as in software. The page's table is generated from the results:

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
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import SamestepError
from tests.backends.wgpu.small_models import (
    TOKENS,
    assert_like_the_cpu,
    class_loss,
    gradients,
    trainable,
)

SAMPLES, LENGTH, PADDING = 3, 12, 0
PAGE = Path(__file__).parents[3] / "docs" / "vulkan.md"
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
SHARED = {"num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}

# By its name on the page: transformers' model_type, and the sizes it needs.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", SHARED),
    "Qwen2": ("qwen2", SHARED),
    "Qwen3": ("qwen3", {**SHARED, "head_dim": 8}),
    "Mistral": ("mistral", {**SHARED, "sliding_window": 8, "head_dim": 8}),
    "Gemma 2": ("gemma2", {**SHARED, "head_dim": 8, "sliding_window": 8}),
    "Gemma 3": ("gemma3_text", {**SHARED, "head_dim": 8, "sliding_window": 8}),
    "Phi": ("phi", SHARED),
    "GPT-2": ("gpt2", GPT2),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPTBigCode": ("gpt_bigcode", GPT2),
    "OPT": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "StableLM": ("stablelm", SHARED),
    "Granite": ("granite", SHARED),
    "OLMo 2": ("olmo2", SHARED),
    "Cohere": ("cohere", SHARED),
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
"""Never fused: their formulas, or learned biases, are their own."""
PART_OF = {"T5": "'s encoder"}
_TABLE = re.compile(r"\| family \| `model_type`.*?(?=\n\n)", re.DOTALL)
EXPERTS = {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Mixtral": ("mixtral", {**SHARED, **EXPERTS}, "cannot capture model.layers.0.mlp.experts"),
    "Qwen3-MoE": ("qwen3_moe", {**SHARED, **EXPERTS}, "cannot capture model.layers.0.mlp.experts"),
    "DeBERTa": ("deberta", DISENTANGLED, "cannot replace in-place operators"),
}


class Pooled(nn.Module):
    """A classifier on an encoder's mean output, where transformers has none without a decoder."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        hidden = hidden * attention_mask[..., None]
        pooled = hidden.sum(1) / attention_mask.sum(1, keepdim=True)
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=self.head(pooled))


def model(kind: str, sizes: Mapping[str, Any], attention: str, *, decoder: bool) -> nn.Module:
    """A tiny model with drawn weights, and no dropout, because its draws are not torch's."""
    torch.manual_seed(0)
    defaults = transformers.AutoConfig.for_model(kind)
    rates = {key: 0.0 for key, rate in defaults.to_dict().items() if "drop" in key and rate}
    heads = {} if decoder else {"num_labels": 3}
    arguments = {**SIZES, **rates, **heads, **sizes}
    config = transformers.AutoConfig.for_model(kind, **arguments)
    module: nn.Module
    if kind == "t5":
        config._attn_implementation = attention
        module = Pooled(transformers.T5EncoderModel(config))  # type: ignore[arg-type]
    elif decoder:
        module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        )
    else:
        module = transformers.AutoModelForSequenceClassification.from_config(
            config, attn_implementation=attention
        )
    with torch.no_grad():  # values that begin as zeros or ones would hide where they are used
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return module


def decoder_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    logits = module(input_ids=arrays["input_ids"], attention_mask=arrays["attention_mask"]).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


def padded(side: str, *, decoder: bool) -> Batch:
    """Texts of three lengths, one of them the longest."""
    draws = np.random.default_rng(1)
    positions = np.arange(LENGTH) if side == "right" else np.arange(LENGTH)[::-1]
    mask = (positions < np.array([[LENGTH], [7], [4]])).astype(np.int64)
    ids = draws.integers(4, TOKENS, (SAMPLES, LENGTH)) * mask + PADDING * (1 - mask)
    # Classes differ from sample to sample, or the gradients of a head's bias would cancel to
    # rounding.
    classes = np.array([0, 2, 2])
    labels = np.where(mask == 1, np.roll(ids, -1, 1), -100) if decoder else classes
    arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Batch(arrays, float(SAMPLES))


@pytest.fixture
def compiled(device) -> Iterator[Callable[..., CompiledProgram]]:
    programs: list[CompiledProgram] = []

    def compile_(
        module: nn.Module, loss: Any, *, cooperative: bool, bindings: int = 8
    ) -> CompiledProgram:
        templates = Templates(cooperative, MatmulTuner(device).shader, bindings=bindings)
        job = trainable(module, loss)
        programs.append(CompiledProgram(device, job, templates, adds_on_device=True))
        return programs[-1]

    yield compile_
    for program in programs:
        program.close()


def attention_in_one_piece(module: nn.Module, loss: Any, batch: Batch) -> bool:
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    names = [name for name, tensor in module.named_parameters() if tensor.requires_grad]
    capture = capture_step(module, loss, names, arrays, lambda _: True)
    graphs = [capture.graph, *(kind.graph for kind in capture.kinds)]
    return any(node.target is ATTENTION for graph in graphs for node in graph.graph.nodes)


def table() -> str:
    """Build the table of families and results."""
    rows = ["| family | `model_type` | gradients | attention on a card |", "|---|---|---|---|"]
    for name, (kind, _) in (DECODERS | ENCODERS).items():
        fused = {a for a in ("eager", "sdpa") if (name, a) not in WRITTEN_OUT}
        fused -= {"sdpa"} if name in WITHOUT_SDPA else set()
        fused_kinds = " and ".join(f"`{each}`" for each in sorted(fused))
        attention = f"fused: {fused_kinds}" if fused else "written out"
        rows.append(f"| {name}{PART_OF.get(name, '')} | `{kind}` | as torch's | {attention} |")
    rows.append("| T5, encoder and decoder | `t5` | as torch's | written out |")
    rows += [f"| {name} | `{kind}` | refused | |" for name, (kind, _, _) in REFUSED.items()]
    return "\n".join(rows)


def test_page_has_the_table_of_families():
    text = PAGE.read_text("utf-8")
    if os.environ.get("SAMESTEP_REWRITE"):
        text = _TABLE.sub(lambda _: table(), text)
        PAGE.write_text(text, "utf-8")
    match = _TABLE.search(text)
    assert match is not None
    assert match[0] == table()


@pytest.mark.slow
@pytest.mark.parametrize("cooperative", [True, False], ids=["fused", "written out"])
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        (family, attention)
        for family in (*DECODERS, *ENCODERS)
        for attention in ("eager", "sdpa")
        if attention == "eager" or family not in WITHOUT_SDPA
    ],
)
def test_gradients_are_those_of_the_cpu(compiled, family, cooperative, attention):
    decoder = family in DECODERS
    kind, sizes = (DECODERS if decoder else ENCODERS)[family]
    loss = decoder_loss if decoder else class_loss
    module = model(kind, sizes, attention, decoder=decoder)
    job = trainable(module, loss)
    bindings = 16 if attention == "sdpa" else 8  # bindings of cards, and of every adapter
    program = compiled(module, loss, cooperative=cooperative, bindings=bindings)
    program.check(padded("right", decoder=decoder))
    for side in ("right", "left"):
        batch = padded(side, decoder=decoder)
        assert_like_the_cpu(module, job.blocks, loss, batch, gradients(program, batch))
    if cooperative:
        in_one_piece = attention_in_one_piece(module, loss, batch)
        assert in_one_piece == ((family, attention) not in WRITTEN_OUT)


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
def test_an_encoder_with_its_decoder(compiled, cooperative):
    torch.manual_seed(0)
    kind, sizes = ENCODERS["T5"]
    settings = {**SIZES, **sizes, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **settings)
    module = transformers.T5ForConditionalGeneration(config)  # type: ignore[arg-type]
    job, batch = trainable(module, translation_loss), padded("right", decoder=True)
    program = compiled(module, translation_loss, cooperative=cooperative)
    program.check(batch)
    actual = gradients(program, batch)
    assert_like_the_cpu(module, job.blocks, translation_loss, batch, actual)


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
def test_packed_documents_do_not_attend_to_each_other(compiled, family, cooperative):
    """Packed as in `worker.data.packing`: positions restart; each padding token is its own
    document."""
    kind, sizes = DECODERS[family]
    module = model(kind, sizes, "sdpa", decoder=True)
    batch = padded("right", decoder=True)
    positions = np.array([[*range(5), *range(7)], [*range(4), *range(3), *[0] * 5], range(LENGTH)])
    ids, labels = batch.arrays["input_ids"], batch.arrays["labels"]
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
    job, packed = trainable(module, packed_loss), Batch(arrays, batch.weight)
    program = compiled(module, packed_loss, cooperative=cooperative)
    program.check(packed)
    assert_like_the_cpu(module, job.blocks, packed_loss, packed, gradients(program, packed))
    first_document = packed_loss(module, {k: torch.tensor(v[:1, :5]) for k, v in arrays.items()})
    first_document += packed_loss(module, {k: torch.tensor(v[:1, 5:]) for k, v in arrays.items()})
    whole_sample = packed_loss(module, {k: torch.tensor(v[:1]) for k, v in arrays.items()})
    assert float(whole_sample.detach()) == pytest.approx(float(first_document.detach()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_refusals_are_one_line(compiled, family, caplog):
    logging.getLogger(LOGGER).addHandler(caplog.handler)
    kind, sizes, reason = REFUSED[family]
    decoder = not family.startswith("DeBERTa")
    loss = decoder_loss if decoder else class_loss
    module = model(kind, sizes, "eager", decoder=decoder)
    program = compiled(module, loss, cooperative=False)
    with pytest.raises(SamestepError, match=reason) as error:
        program.check(padded("right", decoder=decoder))
    logging.getLogger(LOGGER).removeHandler(caplog.handler)
    assert "\n" not in str(error.value)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
