"""GGUF files: every setting that changes logits is in the file, or refused by its name.

What is read back is read by transformers, with what it passes over. llama.cpp itself was asked
by hand (its logits of 100 tokens are these, to the float16 of its cache).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from protocol.base.errors import DataError
from protocol.spec.run_spec import ModelSpec
from tests.small_chat import save_chat_tokenizer
from worker.after import gguf_file
from worker.after.gguf_file import write_gguf
from worker.models.pretrained import load_causal_lm, load_classifier

gguf = pytest.importorskip("gguf")

SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 310,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10_000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    return save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def model_of(family: str, **settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def logits(model: Any) -> torch.Tensor:
    """Of texts as long as the model has positions: beyond any window."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(5, 69)[None] % 300).logits
    return found


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}),
        ("mistral", {"sliding_window": 64, "head_dim": 16, "rms_norm_eps": 1e-2}),
        ("qwen2", {"rope_parameters": YARN, "sliding_window": 8, "use_sliding_window": False}),
        ("qwen3", {"head_dim": 16}),
        pytest.param("llama", {"rope_parameters": YARN}, marks=pytest.mark.slow),
        pytest.param("mistral", {"sliding_window": None}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"head_dim": 8, "rope_parameters": LLAMA_3}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_changes_logits_is_in_the_file(tmp_path, tokenizer, family, settings):
    model = model_of(family, **settings)
    write_gguf(model, tokenizer, tmp_path / "m.gguf", "f32", "mistral")
    again = load_causal_lm(ModelSpec(source=str(tmp_path / "m.gguf")), 0).model.eval()
    assert (logits(again) - logits(model)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("mistral", {"sliding_window": 8}, "sliding_window 8, .*max_position_embeddings to 8"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
         "sliding_window 8"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
         "sliding_window 8"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"head_dim": 16}, "head_dim 16"),
        ("qwen3", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.0}}, "attention_factor 1.0"),
        ("llama", {"rope_parameters": {**YARN, "beta_fast": 16}}, "beta_fast 16"),
        ("llama", {"rope_parameters": {**LLAMA_3, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor 0.5"),
        ("gemma", {"head_dim": 8}, "type llama, mistral, qwen2, qwen3 .*'gemma'"),
        ("phi3", {"pad_token_id": 0}, "'phi3'"),
        ("stablelm", {}, "'stablelm'"),
        ("granite", {}, "'granite'"),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path, tokenizer, family, settings, told
):
    with pytest.raises(DataError, match=told):
        write_gguf(model_of(family, **settings), tokenizer, tmp_path / "m.gguf", "f32", "m")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("add", "told"),
    [
        (lambda writer: writer.add_sliding_window(8), "attention.sliding_window 8"),
        (lambda writer: writer.add_logit_scale(0.5), "logit_scale 0.5"),
        (lambda writer: writer.add_attn_logit_softcapping(50.0), "attn_logit_softcapping 50.0"),
        (lambda writer: (writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
                         writer.add_rope_scaling_factor(2.0)), "scaled as longrope"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", torch.tensor(
            [1.0, 3.0, 2.0, 7.0]).numpy()), "tensor rope_freqs.weight"),
    ],
)  # fmt: skip
def test_a_file_that_transformers_would_read_as_another_model_is_refused(
    tmp_path, tokenizer, monkeypatch, add, told
):
    describe = gguf_file._describe

    def more(writer: Any, *rest: Any) -> None:
        describe(writer, *rest)
        add(writer)

    monkeypatch.setattr(gguf_file, "_describe", more)
    monkeypatch.setattr(gguf_file, "_compare", lambda *_: None)
    write_gguf(model_of("llama"), tokenizer, tmp_path / "m.gguf", "f32", "m")
    with pytest.raises(DataError, match=told):
        load_causal_lm(ModelSpec(source=str(tmp_path / "m.gguf")), 0)


def test_a_classifier_of_a_gguf_file_has_the_labels(tmp_path, tokenizer):
    write_gguf(model_of("llama"), tokenizer, tmp_path / "m.gguf", "f32", "m")
    loaded = load_classifier(ModelSpec(source=str(tmp_path / "m.gguf")), ["a", "b", "c"], 0, 0)
    assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}


def changed_tokenizer(directory: Path, change: Any) -> Any:
    found = save_chat_tokenizer(directory)
    change(found)
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: setattr(t.backend_tokenizer, "normalizer", tokenizers.normalizers.Lowercase()),
         "normalizer Lowercase"),
        (lambda t: setattr(t.backend_tokenizer.model, "end_of_word_suffix", "</w>"),
         "end_of_word_suffix '</w>'"),
        (lambda t: setattr(t.backend_tokenizer.model, "ignore_merges", True), "ignore_merges True"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_does_more_is_refused(tmp_path, change, told):
    changed = changed_tokenizer(tmp_path, change)
    with pytest.raises(DataError, match=told):
        write_gguf(model_of("llama"), changed, tmp_path / "m.gguf", "f32", "m")


def test_a_tokenizer_larger_than_the_table_loses_the_marks_beyond(tmp_path):
    """It makes the same of text; a vocabulary beyond the table is refused."""
    larger = changed_tokenizer(tmp_path, lambda t: t.add_tokens(["<a>", "<b>"]))
    model = model_of("llama", vocab_size=len(larger) - 1)
    written = write_gguf(model, larger, tmp_path / "m.gguf", "f32", "m")
    assert written.left_out == 1
    tokens = gguf.GGUFReader(tmp_path / "m.gguf").get_field("tokenizer.ggml.tokens").contents()
    assert tokens[-1] == "<a>"
    model = model_of("llama", vocab_size=280)
    with pytest.raises(DataError, match="expected tokens below 280"):
        write_gguf(model, larger, tmp_path / "n.gguf", "f32", "m")
