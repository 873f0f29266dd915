"""Added tokens: rows initialized as in transformers, and results for PEFT, merge and GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.base.interface import BlockGradient
from backends.registry import choose
from backends.wgpu.device.adapters import adapters
from protocol.base.errors import DataError
from protocol.spec.run_spec import parse_run_spec
from tests.commands import run_command
from tests.small_chat import conversation, save_chat_model, write_jsonl
from tests.small_sequences import PAIRS, save_encoder_decoders
from tests.worker.tasks.test_classify import export, perturbed_values
from worker.results.merge import merge
from worker.results.saved_model import find_saved_model
from worker.tasks.registry import build

ADDED_TOKENS = ["<tool>", "</tool>", "Zylophyte"]
TEXT = " <tool>call</tool> Zylophyte"


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    """Models with tied and untied heads: decoders, encoder-decoders and an encoder."""
    import torch
    import transformers

    path: Path = tmp_path_factory.mktemp("bases")
    save_chat_model(path / "untied")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "untied")
    torch.manual_seed(1)
    config: Any = transformers.AutoConfig.from_pretrained(path / "untied")
    config.tie_word_embeddings = True
    transformers.LlamaForCausalLM(config).save_pretrained(path / "tied")
    tokenizer.save_pretrained(path / "tied")
    # More rows than tokens, as in Qwen: the first marks use rows without a token.
    config.vocab_size = len(tokenizer) + 2
    transformers.LlamaForCausalLM(config).save_pretrained(path / "padded")
    tokenizer.save_pretrained(path / "padded")
    save_encoder_decoders(path)
    bert_config: Any = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(bert_config).save_pretrained(path / "bert")
    tokenizer.save_pretrained(path / "bert")
    chats = [conversation(n) for n in range(12)]
    for messages in chats:
        messages[-1]["content"] += TEXT
    write_jsonl(path / "chat.jsonl", [{"messages": messages} for messages in chats])
    write_jsonl(path / "pairs.jsonl", [{**row, "target": row["target"] + TEXT} for row in PAIRS])
    labeled_rows = [{"text": f"{n} plus {n}{TEXT * (n % 2)}", "label": n % 2} for n in range(12)]
    write_jsonl(path / "labels.jsonl", labeled_rows)
    return path


TASKS: dict[str, dict[str, Any]] = {
    "causal-lm": {"train": "chat.jsonl", "format": "messages", "max_tokens": 96},
    "seq2seq": {"train": "pairs.jsonl", "max_tokens": 64},
    "classify": {"train": "labels.jsonl", "max_tokens": 64},
}
BASES = {
    "tied": "causal-lm", "untied": "causal-lm", "padded": "causal-lm", "t5": "seq2seq",
    "bart": "seq2seq", "bert": "classify",
}  # fmt: skip


def spec_of(
    bases: Path, base: str, lora: Any, added_tokens: Any = ADDED_TOKENS, **overrides: Any
) -> Any:
    data = TASKS[BASES[base]]
    return parse_run_spec({
        "task": BASES[base], "seed": 7, "steps": 1, "lora": lora,
        "model": {"source": str(bases / base), "added_tokens": added_tokens, **overrides},
        "batch": {"samples": 4, "microbatch": 2},
        "data": {**data, "train": str(bases / data["train"])},
    })  # fmt: skip


def transformers_model(result_directory: Path, base: str, base_directory: Path) -> Any:
    """Load a result as transformers and PEFT do: the vocabulary resized to the tokenizer's."""
    import peft
    import transformers

    model_classes = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "classify": transformers.AutoModelForSequenceClassification,
    }
    model_class: Any = model_classes[BASES[base]]
    if not (result_directory / "adapter_config.json").is_file():
        return model_class.from_pretrained(result_directory).eval()
    model = model_class.from_pretrained(base_directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(result_directory)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
    return peft.PeftModel.from_pretrained(model, result_directory).eval()


@pytest.mark.parametrize("lora", [{"r": 2}, None], ids=["lora", "full"])
@pytest.mark.parametrize("base", list(BASES))
def test_result_in_transformers_has_the_loss_of_the_run(bases, tmp_path, base, lora):
    import torch
    import transformers

    task: Any = build(spec_of(bases, base, lora))
    assert task.manifest.notes["tokens_added"] == 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(bases / base)
    tokenizer.add_tokens(ADDED_TOKENS)
    ids: Any = tokenizer.convert_tokens_to_ids(ADDED_TOKENS)
    batch = task.batch([0, 1, 2, 3])
    batch_ids = batch.arrays["labels" if base in {"t5", "bart"} else "input_ids"]
    assert set(ids) <= {*batch_ids.reshape(-1).tolist()}
    parameters = dict(task.trainable.module.named_parameters())
    tensors = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    values = perturbed_values(task)
    with torch.no_grad():
        for block, array in zip(task.manifest.blocks, values, strict=True):
            for tensor, elements in block.slices():
                parameters[tensor.name].copy_(torch.tensor(array[elements].reshape(tensor.shape)))
        assert task.trainable.loss is not None
        run_loss = float(task.trainable.loss(task.trainable.module.eval(), tensors)) / batch.weight
    result_directory = export(task, values, tmp_path)
    model = transformers_model(result_directory, base, bases / base)
    with torch.no_grad():
        if BASES[base] == "causal-lm":  # its labels are already shifted
            logits = model(input_ids=tensors["input_ids"]).logits
            expected = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tensors["labels"].flatten()
            )
        else:
            expected = model(**tensors).loss
    assert run_loss == pytest.approx(float(expected), rel=1e-5)
    if lora is not None:
        merge(find_saved_model(result_directory), None, tmp_path / "merged")  # compares logits, too
        repeat = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
        assert repeat.convert_tokens_to_ids(ADDED_TOKENS) == ids


@pytest.mark.parametrize("base", ["untied", "padded", "t5"])
def test_new_rows_are_initialized_as_in_transformers(bases, base):
    import torch
    import transformers

    task = build(spec_of(bases, base, {"r": 2}))
    rows = {
        tensor.name: values[elements].reshape(tensor.shape)
        for block, values in zip(task.manifest.blocks, task.initial_parameters(), strict=True)
        for tensor, elements in block.slices()
        if "trainable_tokens_delta" in tensor.name
    }
    assert len(rows) == (2 if base == "untied" else 1)
    assert all(array.shape[0] == 3 for array in rows.values())
    model_class: Any = transformers.AutoModelForCausalLM
    if base == "t5":
        model_class = transformers.AutoModelForSeq2SeqLM
    model = model_class.from_pretrained(bases / base)
    if base == "padded":
        model.resize_token_embeddings(model.config.vocab_size - 2)
    count = model.get_input_embeddings().num_embeddings
    torch.manual_seed(0)
    model.resize_token_embeddings(count + 3)
    for name, new_rows in rows.items():
        table = model.get_output_embeddings() if "lm_head" in name else model.get_input_embeddings()
        np.testing.assert_allclose(new_rows, table.weight.detach()[count:].numpy(), atol=1e-3)
    repeat = build(spec_of(bases, base, {"r": 2}))
    for one, other in zip(task.initial_parameters(), repeat.initial_parameters(), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("base_dtype", ["bfloat16", "nf4"])
def test_rows_are_trained_with_a_quantized_base(bases, base_dtype):
    assert (np.abs(row_gradients(bases, "cpu", base_dtype=base_dtype)).max(axis=1) > 0).all()


def row_gradients(bases: Path, backend: str, **model: Any) -> Any:
    """Return the gradients of the added rows, (rows, width), for a microbatch with all of them."""
    task = build(spec_of(bases, "tied", {"r": 2}, **model))
    [rows] = [
        gradient
        for name, gradient in gradients(task, choose(backend).backend).items()
        if "trainable_tokens_delta" in name
    ]
    return rows


def gradients(task: Any, backend: Any) -> dict[str, Any]:
    """Return a microbatch's gradients by tensor name, and its loss."""
    batch = task.batch([0, 1])
    program = backend.compile(task.trainable, batch)
    program.load(perturbed_values(task))
    items = [*program.gradients([(batch, 0)])]
    program.close()
    flat = {item.block: item.values for item in items if isinstance(item, BlockGradient)}
    loss = {"loss": np.float32(items[-1].loss_sum)}
    return loss | {
        tensor.name: flat[number][elements].reshape(tensor.shape)
        for number, block in enumerate(task.manifest.blocks)
        for tensor, elements in block.slices()
    }


@pytest.mark.parametrize("base", ["tied", pytest.param("untied", marks=pytest.mark.slow)])
def test_vulkan_gradients_of_rows_equal_torch(bases, base):
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    expected, results = (
        gradients(build(spec_of(bases, base, {"r": 2})), backend)
        for backend in (choose("cpu").backend, choose("vulkan").backend)
    )
    rows = [name for name in results if "trainable_tokens_delta" in name]
    assert len(rows) == (2 if base == "untied" else 1)
    for name, gradient in results.items():
        is_close = np.linalg.norm(gradient - expected[name]) <= 1e-4 * np.linalg.norm(
            expected[name]
        )
        assert is_close, name


def test_every_command_reads_a_result_with_added_tokens(bases, tmp_path):
    pytest.importorskip("gguf")
    task = build(spec_of(bases, "tied", {"r": 2}))
    result_directory = export(task, perturbed_values(task), tmp_path)
    process = run_command(
        "worker", "generate", str(result_directory), f"What is{TEXT}?", "--max-tokens", "4"
    )
    assert process.returncode == 0, process.stderr
    export_process = run_command(
        "worker", "export", str(result_directory), "--gguf", "f32", "--out", str(tmp_path / "gguf")
    )
    assert export_process.returncode == 0, export_process.stderr
    import gguf

    [file] = (tmp_path / "gguf").glob("*.gguf")
    tokens = gguf.GGUFReader(file).get_field("tokenizer.ggml.tokens")
    assert tokens is not None
    assert tokens.contents()[-3:] == ADDED_TOKENS
    task = build(spec_of(bases, "bert", {"r": 2}))
    (tmp_path / "bert").mkdir()
    result_directory = export(task, perturbed_values(task), tmp_path / "bert")
    process = run_command("worker", "classify", str(result_directory), f"1 plus 1{TEXT}", "--json")
    assert process.returncode == 0, process.stderr
    merged = run_command(
        "worker", "merge", str(result_directory), "--out", str(tmp_path / "merged")
    )
    assert merged.returncode == 0, merged.stderr
    repeat = run_command(
        "worker", "classify", str(tmp_path / "merged"), f"1 plus 1{TEXT}", "--json"
    )
    one, other = (json.loads(each.stdout) for each in (process, repeat))
    assert one["label"] == other["label"]
    assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


@pytest.mark.parametrize(
    ("added_tokens", "lora", "expected"),
    [
        (["plus"], {"r": 2}, "'plus', which the tokenizer has as an ordinary token"),
        (ADDED_TOKENS, {"targets": ["embed_tokens"]}, "lora.targets names 'embed_tokens'"),
    ],
)
def test_invalid_added_tokens_are_refused_in_one_line(bases, added_tokens, lora, expected):
    with pytest.raises(DataError) as error:
        build(spec_of(bases, "tied", lora, added_tokens))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
