"""Weights missing from a checkpoint are drawn, reported, trained and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import torch
import transformers

from backends.base.interface import Array
from protocol.base.errors import DataError
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.small_chat import conversation, save_chat_tokenizer, write_jsonl
from tests.worker.tasks.test_classify import perturbed_values
from worker.results.load import load
from worker.results.merge import merge
from worker.results.saved_model import find_saved_model
from worker.tasks.base.task import Task
from worker.tasks.registry import build

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 300,
}


def save_masked_lm(directory: Path) -> Path:
    """Save a masked language model whose checkpoint has neither pooler nor classification head."""
    save_chat_tokenizer(directory)
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_attention_heads=2, max_position_embeddings=128)
    transformers.BertForMaskedLM(config).save_pretrained(directory)
    return directory


def save_headless_llama(directory: Path) -> Path:
    """Save a Llama without its head."""
    save_chat_tokenizer(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaModel(config).save_pretrained(directory)
    return directory


def spec_of(task: str, source: Path, directory: Path, **changes: Any) -> RunSpec:
    rows: list[Any]
    if task == "classify":
        rows = [{"text": f"number {n}", "label": "ab"[n % 2]} for n in range(20)]
        data = {"train": str(write_jsonl(directory / "texts.jsonl", rows))}
    else:
        rows = [{"messages": conversation(n)} for n in range(20)]
        data = {"train": str(write_jsonl(directory / "chat.jsonl", rows)), "format": "messages"}
    return parse_run_spec({
        "task": task, "seed": 7, "steps": 1, "model": {"source": str(source)}, "lora": {"r": 2},
        "data": data | {"max_tokens": 96}, "batch": {"samples": 4, "microbatch": 2}, **changes,
    })  # fmt: skip


def export(task: Task, values: list[Array], directory: Path) -> Path:
    """Save as the coordinator does, and load the values into the task's own module."""
    plan = task.manifest.export
    assert task.trainable.module is not None
    parameters, tensors = dict(task.trainable.module.named_parameters()), {}
    for block, array in zip(task.manifest.blocks, values, strict=True):
        for tensor, elements in block.slices():
            value = array[elements].reshape(tensor.shape)
            tensors[plan.names.get(tensor.name, tensor.name)] = value
            parameters[tensor.name].data = torch.from_numpy(value)
    directory.mkdir()
    safetensors.numpy.save_file(tensors, directory / plan.weights_file, {"format": "pt"})
    for name, text in plan.files.items():
        (directory / name).write_text(text)
    return directory


IDS = torch.arange(40).reshape(2, 20) * 7 % 300


def logits_of(module: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = module.eval()(input_ids=IDS).logits
    return logits


def logits_in_peft(kind: Any, source: Path, adapter: Path, **keywords: Any) -> torch.Tensor:
    import peft

    torch.manual_seed(99)  # random values for missing weights must not matter
    base = kind.from_pretrained(source, attn_implementation="eager", **keywords)
    return logits_of(peft.PeftModel.from_pretrained(base, str(adapter)))


def test_a_drawn_pooler_is_saved_with_the_adapter(tmp_path):
    source = save_masked_lm(tmp_path / "model")
    task = build(spec_of("classify", source, tmp_path))
    assert "drawn_as_the_checkpoint_lacks[bert.pooler.dense]" in task.manifest.notes
    adapter = export(task, perturbed_values(task), tmp_path / "adapter")
    peft_logits = logits_in_peft(
        transformers.AutoModelForSequenceClassification, source, adapter, num_labels=2
    )
    assert torch.allclose(logits_of(task.trainable.module), peft_logits, atol=1e-5)
    assert torch.allclose(
        peft_logits, logits_of(load(find_saved_model(adapter), None).model), atol=1e-5
    )


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
def test_drawn_head_is_saved_with_the_adapter(tmp_path, base_dtype):
    source = save_headless_llama(tmp_path / "model")
    model = {"source": str(source), "base_dtype": base_dtype}
    task = build(spec_of("causal-lm", source, tmp_path, model=model))
    assert "drawn_as_the_checkpoint_lacks[lm_head]" in task.manifest.notes
    adapter = export(task, perturbed_values(task), tmp_path / "adapter")
    loaded_result = load(find_saved_model(adapter), None)
    assert loaded_result.base_digest == task.manifest.digests["base_weights"]
    if base_dtype == "float32":
        peft_logits = logits_in_peft(transformers.AutoModelForCausalLM, source, adapter)
        assert torch.allclose(logits_of(task.trainable.module), peft_logits, atol=1e-5)
        merged = merge(find_saved_model(adapter), None, tmp_path / "whole")
        assert merged.difference < 1e-5
        assert torch.allclose(
            logits_of(task.trainable.module), logits_of(loaded_result.model), atol=1e-5
        )


def test_missing_head_is_refused_by_other_uses(tmp_path):
    source = save_headless_llama(tmp_path / "model")
    with pytest.raises(DataError, match=r"lacks lm_head\.weight"):
        load(find_saved_model(source), None)
    with pytest.raises(DataError, match=r"lacks lm_head\.weight"):
        build(spec_of("teacher-logits", source, tmp_path, lora=None))
    pair = {"prompt": "What is 1?", "chosen": "It is 1.", "rejected": "It is 2."}
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [pair | {"prompt": f"{n}?"} for n in range(9)])
    with pytest.raises(DataError, match=r"lacks lm_head\.weight"):
        build(spec_of("dpo", source, tmp_path, data={"train": str(pairs)}))


def test_older_adapter_without_its_pooler_is_read(tmp_path):
    """`worker classify` draws the missing pooler as the run did."""
    from backends.registry import choose
    from worker.tasks.labels.prediction import classify

    source = save_masked_lm(tmp_path / "model")
    task = build(spec_of("classify", source, tmp_path))
    adapter = export(task, task.initial_parameters(), tmp_path / "adapter")
    new_scores = [
        max(p.scores.values())
        for p in classify(adapter, ["number 3"], lambda: choose("cpu").backend)
    ]
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    assert config["modules_to_save"][:2] == ["classifier", "bert.pooler.dense"]
    path.write_text(json.dumps(config | {"modules_to_save": ["classifier"]}))
    weights = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    older_weights = {name: value for name, value in weights.items() if "pooler" not in name}
    assert len(older_weights) == len(weights) - 2
    safetensors.numpy.save_file(
        older_weights, adapter / "adapter_model.safetensors", {"format": "pt"}
    )
    old_scores = [
        max(p.scores.values())
        for p in classify(adapter, ["number 3"], lambda: choose("cpu").backend)
    ]
    assert old_scores == pytest.approx(new_scores, abs=1e-6)
