"""Merge, GGUF export and generation from the result of a LoRA run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from backends.eager.quantized_base import quantize_frozen_base
from backends.eager.quantized_linear import QuantizedLinear
from backends.quantization.frozen_base import frozen_base
from protocol.base.errors import DataError, SamestepError
from protocol.spec.model_card import EvaluationRecord, card_text, read_card
from protocol.spec.sections.model import ModelSpec
from tests.commands import run_command
from tests.finished_run import write_finished_run
from tests.small_chat import CHATML, write_chat_run
from worker.models import disk_weights
from worker.models.pretrained import load_causal_lm
from worker.models.tokens import end_tokens
from worker.results.generate import Sampling, choose_token
from worker.results.gguf_export import export_gguf
from worker.results.gguf_file import Storage, write_gguf
from worker.results.load import load, probe
from worker.results.merge import check_outputs, merge, merge_weights
from worker.results.saved_model import find_saved_model


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The directory of a finished run, with random LoRA values."""
    directory = tmp_path_factory.mktemp("chat")
    changes = {"source": str(directory / "model"), "base_dtype": "int8"}
    return write_finished_run(write_chat_run(directory, model=changes), directory / "run", "chat-1")


def test_card_has_the_record_of_the_run(run):
    card = read_card(run / "adapter")
    assert card is not None
    assert (card.run_id, card.steps, card.adapter, card.base_dtype) == ("chat-1", 4, True, "int8")
    text = (run / "adapter" / "README.md").read_text()
    assert "License: not stated" in text
    assert card.digests["base_weights"] in text
    assert "ab" * 32 in text
    assert "## Run spec\n\n```yaml\nname: " in text


def test_a_hub_reads_the_front_matter_of_a_card(run):
    from huggingface_hub import ModelCard

    card = read_card(run / "adapter")
    assert card is not None
    record = EvaluationRecord(
        step=4, figures={"perplexity": 3.5, "loss_per_token": 1.25, "f1": None}
    )
    change = {"base": "org/base", "data_name": "org/set", "evaluations": (record,)}
    read = ModelCard(card_text(card.model_copy(update=change))).data.to_dict()
    expected = {
        "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["samestep", "lora"],
        "base_model": "org/base", "base_model_relation": "adapter", "datasets": ["org/set"],
        "metrics": ["perplexity"],
    }  # fmt: skip
    assert {key: read[key] for key in expected} == expected
    [result] = read["model-index"][0]["results"]
    assert result["dataset"]["type"] == "org/set"
    assert [(metric["name"], metric["value"]) for metric in result["metrics"]] == [
        ("perplexity", 3.5)
    ]
    # A hub has no model of a path, and refuses a card that names one.
    metadata = ModelCard((run / "adapter" / "README.md").read_text()).data.to_dict()
    assert not {"base_model", "datasets"} & metadata.keys()


def test_a_merged_model_computes_what_base_and_adapter_do(run, tmp_path):
    completed = run_command("worker", "merge", str(run), "--out", str(tmp_path / "whole"))
    assert completed.returncode == 0, completed.stderr
    adapted = load(find_saved_model(run), None)
    merged = load(find_saved_model(tmp_path / "whole"), None)
    assert (probe(adapted.model, 300) - probe(merged.model, 300)).abs().max() < 1e-5
    assert not hasattr(merged.model, "merge_and_unload")
    assert merged.tokenizer.chat_template == CHATML
    assert merged.base_digest in completed.stdout
    card = read_card(tmp_path / "whole")
    assert card is not None
    assert merged.base_digest in card.made[0]
    with pytest.raises(DataError, match="new or empty"):
        merge(find_saved_model(run), None, tmp_path / "whole")
    with pytest.raises(DataError, match="complete model already"):
        merge(find_saved_model(tmp_path / "whole"), None, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]


def test_a_merged_model_may_be_stored_in_bfloat16(run, tmp_path):
    completed = run_command(
        "worker", "merge", str(run), "--out", str(tmp_path / "whole"), "--dtype", "bfloat16"
    )
    assert completed.returncode == 0, completed.stderr
    saved_tensors = safetensors.torch.load_file(tmp_path / "whole" / "model.safetensors")
    assert {tensor.dtype for tensor in saved_tensors.values()} == {torch.bfloat16}
    whole = load(find_saved_model(tmp_path / "whole"), None).model
    exact = merge_weights(load(find_saved_model(run), None)).state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16).float()), name
    refusal = run_command(
        "worker", "merge", str(run), "--out", str(tmp_path / "x"), "--dtype", "int8"
    )
    assert "--dtype: expected one of float32, bfloat16" in refusal.stderr


def test_base_is_rounded_as_in_the_run(run, tmp_path):
    """Without card and run the precision is unknown, so the logits differ."""
    adapter_only = tmp_path / "adapter"
    shutil.copytree(run / "adapter", adapter_only)
    actual = probe(load(find_saved_model(adapter_only), None).model, 300)
    assert torch.equal(actual, probe(load(find_saved_model(run), None).model, 300))
    (adapter_only / "README.md").unlink()
    assert not torch.equal(actual, probe(load(find_saved_model(adapter_only), None).model, 300))


def test_difference_of_logits_is_reported():
    logits = torch.tensor([1.0, -3.0])
    assert check_outputs(logits, logits + 2e-5) < 3e-5
    with pytest.raises(SamestepError, match="no file was written"):
        check_outputs(logits, logits + 1e-4)
    with pytest.raises(SamestepError, match="no file was written"):
        check_outputs(logits, logits * float("nan"))


def test_another_base_or_adapter_is_refused(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run.parent / "model", other)
    tensors = safetensors.numpy.load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(1)
    safetensors.numpy.save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="another digest"):
        load(find_saved_model(run), str(other))
    adapter_copy = tmp_path / "adapter"
    shutil.copytree(run / "adapter", adapter_copy)
    weights = safetensors.numpy.load_file(adapter_copy / "adapter_model.safetensors")
    del weights[min(weights)]
    safetensors.numpy.save_file(weights, adapter_copy / "adapter_model.safetensors")
    with pytest.raises(DataError, match="adapter belongs to this base"):
        load(find_saved_model(adapter_copy), None)


@pytest.mark.parametrize(
    ("make_directory", "message"),
    [
        (lambda d: d / "nothing", "found none"),
        (lambda d: d, "expected a run"),
        (lambda d: (d / "run.json").write_text("{}") and d, "expected a finished run"),
        (lambda d: (d / "adapter_config.json").write_text("{}") and d, "LoRA adapter"),
    ],
)
def test_directories_without_a_result_are_refused(tmp_path, make_directory, message):
    with pytest.raises(DataError, match=message):
        find_saved_model(make_directory(tmp_path))


def test_answer_is_repeatable(run):
    def answer(*more: str) -> str:
        completed = run_command(
            "worker", "generate", str(run), "What is 3?", "--max-tokens", "12", *more
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    options = ("--temperature", "1.0", "--top-p", "0.9", "--seed")
    assert answer() == answer()
    assert answer(*options, "1") == answer(*options, "1")
    assert answer(*options, "1") != answer(*options, "2")


def test_greedy_decoding_equals_transformers(run):
    from worker.results.generate import generate, prompt_tokens

    loaded = load(find_saved_model(run), None)
    ids = prompt_tokens(loaded.tokenizer, "What is 3?", "Add.")
    assert loaded.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    actual = "".join(generate(loaded.model, loaded.tokenizer, ids, Sampling(0, 1, 0, 12)))
    expected_ids = loaded.model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
    )[0, len(ids) :]
    assert actual == loaded.tokenizer.decode(expected_ids, skip_special_tokens=True)
    assert end_tokens(loaded.model, loaded.tokenizer) == {2}
    with pytest.raises(DataError, match="positions"):
        generate(loaded.model, loaded.tokenizer, ids, Sampling(0, 1, 0, 128))


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.1, 0.6, 0.3]).log()
    full_sampling = Sampling(1.0, 1.0, 0, 1)
    draws = [choose_token(logits, full_sampling, (n + 0.5) / 1000) for n in range(1000)]
    assert [draws.count(token) for token in range(3)] == [100, 600, 300]
    limit = Sampling(1.0, 0.85, 0, 1)
    assert {choose_token(logits, limit, n / 100) for n in range(100)} == {1, 2}
    assert choose_token(logits, Sampling(0, 1, 0, 1), 0.99) == 1
    assert choose_token(logits, full_sampling, 0.99999997) == 0


def test_gguf_is_read_by_transformers_as_the_same_model(run, tmp_path):
    pytest.importorskip("gguf")
    completed = run_command(
        "worker", "export", str(run), "--gguf", "f32", "--out", str(tmp_path / "g")
    )
    assert completed.returncode == 0, completed.stderr
    assert "21 tensors" in completed.stdout
    adapted = load(find_saved_model(run), None)
    repeat = load(find_saved_model(tmp_path / "g" / "chat-f32.gguf"), None)
    assert (probe(adapted.model, 300) - probe(repeat.model, 300)).abs().max() < 1e-5
    prompt = "What is 3 plus 4? <|im_end|>"
    assert repeat.tokenizer(prompt)["input_ids"] == adapted.tokenizer(prompt)["input_ids"]
    assert read_card(tmp_path / "g")


def test_gguf_base_keeps_the_storage_form_of_the_file(run, tmp_path):
    """Every frozen matrix has the file's values, bit for bit."""
    pytest.importorskip("gguf")
    loaded = load(find_saved_model(run.parent / "model"), None)
    write_gguf(loaded.model, loaded.tokenizer, tmp_path / "m.gguf", "q8_0", "m")
    source = str(tmp_path / "m.gguf")
    model = load_causal_lm(ModelSpec(source=source, base_dtype="q8_0"), 0).model
    model.requires_grad_(requires_grad=False)
    names = frozen_base(model)
    initial_values = {name: model.get_parameter(name).detach().clone() for name in names}
    quantize_frozen_base(model, "q8_0", torch.device("cpu"))
    for name, values in initial_values.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, QuantizedLinear)
        assert torch.equal(layer.weight, values)
    assert len(initial_values) == 15  # seven in each layer, and the head


def test_wide_gguf_base_is_mapped_from_disk(run, tmp_path, capfd):
    """Each matrix to be quantized is mapped from an unnamed file while it is wide."""
    pytest.importorskip("gguf")
    loaded = load(find_saved_model(run.parent / "model"), None)
    write_gguf(loaded.model, loaded.tokenizer, tmp_path / "m.gguf", "f16", "m")
    (tmp_path / "model.safetensors").write_bytes(b"weights of another model")
    spec = ModelSpec(source=str(tmp_path / "m.gguf"), base_dtype="int4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_weights, "_SMALL_BYTES", 0)
        wide_model = load_causal_lm(spec, 0)
    adapted = load_causal_lm(spec, 0)
    assert wide_model.weights_digest == adapted.weights_digest
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [
        [int(address, 16) for address in m[0].split("-")] for m in maps if m[-1] == "(deleted)"
    ]
    wide_model.model.requires_grad_(requires_grad=False)
    for parameter in frozen_base(wide_model.model).values():
        assert any(lo <= parameter.data_ptr() < hi for lo, hi in files)
    assert "GGUF" not in capfd.readouterr().err


def test_quantized_gguf_equals_the_gguf_library(run, tmp_path):
    pytest.importorskip("gguf")
    loaded = load(find_saved_model(run.parent / "model"), None)
    sizes = []
    for storage in get_args(Storage):
        path = tmp_path / storage
        assert write_gguf(loaded.model, loaded.tokenizer, path, storage, "m").tensors == 21
        sizes.append(path.stat().st_size)
    assert sizes[3] < sizes[2] == sizes[1] < sizes[0]


def test_models_unknown_to_llama_cpp_are_refused(run, tmp_path):
    pytest.importorskip("gguf")
    loaded = load(find_saved_model(run.parent / "model"), None)
    loaded.model.config.model_type = "gpt_bigcode"
    with pytest.raises(DataError, match="gpt_bigcode"):
        write_gguf(loaded.model, loaded.tokenizer, tmp_path / "a", "f32", "m")
    loaded.model.config.model_type = "llama"
    tokenizers = pytest.importorskip("tokenizers")
    digits = tokenizers.pre_tokenizers.Digits()
    loaded.tokenizer.backend_tokenizer.pre_tokenizer = digits
    with pytest.raises(DataError, match="splits text"):
        write_gguf(loaded.model, loaded.tokenizer, tmp_path / "b", "f32", "m")
    (tmp_path / "x").touch()
    with pytest.raises(DataError, match="new or empty"):
        export_gguf(find_saved_model(run), None, "f32", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "DIR", "x", "--top-p", "0"), "--top-p"),
        (("generate", "DIR", "x", "--top-p", "0.5"), "--temperature"),
        (("export", "DIR", "--gguf", "q2", "--out", "o"), "--gguf"),
        (("generate", "DIR", "x", "--system", "a", "--max-tokens", "9999"), "positions"),
    ],
)
def test_mistakes_are_one_line(run, arguments, message):
    completed = run_command(
        "worker", *(str(run) if argument == "DIR" else argument for argument in arguments)
    )
    assert completed.returncode == 2
    assert len(completed.stderr.splitlines()) == 1
    assert message in completed.stderr
