"""A model that attends to later tokens is refused, even if transformers calls it causal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from protocol.base.errors import DataError
from protocol.spec.run_spec import RunSpec, parse_run_spec
from protocol.spec.sections.model import ModelSpec
from tests.small_chat import save_chat_tokenizer
from worker.models.causality import check_causality
from worker.models.pretrained import load_causal_lm
from worker.tasks.registry import build

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "vocab_size": 300,
}


def bert(**changes: Any) -> transformers.BertConfig:
    return transformers.BertConfig(
        **SIZES, num_attention_heads=2, max_position_embeddings=64, **changes
    )


def save(config: Any, directory: Path) -> str:
    save_chat_tokenizer(directory)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def spec_of(directory: Path, task: str = "causal-lm", **model: Any) -> RunSpec:
    text = directory / "digits.txt"
    text.write_text("".join(f"{n * n}\n" for n in range(400)))
    return parse_run_spec({
        "task": task, "seed": 7, "steps": 1, "model": model, "batch": {"samples": 2},
        "data": {"train": str(text), "max_tokens": 16},
    })  # fmt: skip


@pytest.mark.parametrize("task", ["causal-lm", "teacher-logits"])
def test_pretrained_encoder_is_refused(tmp_path, task):
    source = save(bert(), tmp_path / "model")
    with pytest.raises(DataError, match="expected a decoder"):
        build(spec_of(tmp_path, task, source=source))
    with pytest.raises(DataError, match="expected a decoder"):
        load_causal_lm(ModelSpec(source=source), 0)


def test_new_encoder_is_refused_and_new_decoder_is_accepted(tmp_path):
    config = {
        "model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    with pytest.raises(DataError, match="is_decoder: true"):
        build(spec_of(tmp_path, config=config))
    build(spec_of(tmp_path, config=config | {"is_decoder": True}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probe_distinguishes_encoders_in_any_dtype(dtype):
    for is_decoder in (False, True):
        torch.manual_seed(0)
        config = bert(is_decoder=is_decoder, initializer_range=0.3)  # like those of a trained model
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.data = parameter.data.to(dtype)
        if is_decoder:
            check_causality(model, 300, {"use_cache": False})
        else:
            with pytest.raises(DataError, match="it would see the token to predict"):
                check_causality(model, 300, {"use_cache": False})
        assert model.training


def test_model_with_mismatched_sizes_is_refused_in_one_line():
    class MismatchedModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3, 4))

        def forward(self, input_ids):
            return input_ids @ self.weight

    with pytest.raises(DataError, match=r"logits of tokens, got: .*check its config") as error_info:
        check_causality(MismatchedModel(), 300, {})
    assert "\n" not in str(error_info.value)
