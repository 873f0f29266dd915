"""GGUF files: every setting that changes logits is in the file, or refused by its name.

transformers reads the files back, except for settings that it ignores; families that it cannot read
are read by a reader that follows llama.cpp's source. llama.cpp itself was run
manually (its logits for 100 tokens of a Llama are equal, up to the float16 of its cache).
"""

from __future__ import annotations

import copy
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from protocol.base.errors import DataError
from protocol.spec.sections.model import ModelSpec
from tests.small_chat import save_chat_tokenizer
from worker.models.pretrained import load_causal_lm, load_classifier
from worker.results import gguf_file
from worker.results.gguf_file import write_gguf

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


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}


def model_of(family: str, **settings: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **SIZES}
    config = transformers.AutoConfig.for_model(family, **copy.deepcopy({**usual, **settings}))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def logits(model: Any) -> torch.Tensor:
    """Compute logits of texts as long as the model's positions: beyond any window."""
    with torch.no_grad():
        values: torch.Tensor = model(input_ids=torch.arange(5, 69)[None] % 300).logits
    return values


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("llama", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}),
        ("mistral", {"sliding_window": 64, "head_dim": 16, "rms_norm_eps": 1e-2}),
        ("gemma2", {**WINDOWS, "attn_logit_softcapping": 5.0}),
        ("gemma3_text", {**WINDOWS, "num_hidden_layers": 7, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
        ("phi3", {"rms_norm_eps": 1e-2}),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 8}),
        ("qwen3_moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
        ("qwen2", {"rope_parameters": YARN, "sliding_window": 8, "use_sliding_window": False}),
        ("qwen3", {"head_dim": 16}),
        pytest.param("llama", {"rope_parameters": YARN}, marks=pytest.mark.slow),
        pytest.param("mistral", {"sliding_window": None}, marks=pytest.mark.slow),
        pytest.param("gemma2", {**WINDOWS, "final_logit_softcapping": 2.0, "head_dim": 16,
                                "query_pre_attn_scalar": 16}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", {**WINDOWS, "tie_word_embeddings": False, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            marks=pytest.mark.slow),
        pytest.param("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 8,
                                   "tie_word_embeddings": True}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_settings_that_change_logits_are_in_the_file(tmp_path, tokenizer, family, settings):
    model = model_of(family, **settings)
    write_gguf(model, tokenizer, tmp_path / "m.gguf", "f32", "mistral")
    repeat = load_causal_lm(ModelSpec(source=str(tmp_path / "m.gguf")), 0).model.eval()
    assert (logits(repeat) - logits(model)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"head_dim": 16}, "head_dim 16"),
        ("qwen3", {"attention_bias": True}, "attention_bias True"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.0}}, "attention_factor 1.0"),
        ("llama", {"rope_parameters": {**YARN, "beta_fast": 16}}, "beta_fast 16"),
        ("llama", {"rope_parameters": {**LLAMA_3, "partial_rotary_factor": 0.5}},
         "partial_rotary_factor 0.5"),
        ("gemma", {"head_dim": 8, "hidden_act": "relu"}, "hidden_act 'relu'"),
        ("gemma", {"head_dim": 8, "tie_word_embeddings": False}, "whose head is tied to its emb"),
        ("gemma2", {**WINDOWS, "query_pre_attn_scalar": 4}, "query_pre_attn_scalar 4"),
        ("gemma2", {**WINDOWS, "layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gemma3_text", {**WINDOWS, "final_logit_softcapping": 5.0}, "final_logit_softcapping 5.0"),
        ("gemma3_text", {**WINDOWS, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4}}}, "rope_theta 10000"),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                      "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("qwen3", {"head_dim": 8, "rope_parameters": LLAMA_3}, "default, linear, yarn .*'llama3'"),
        ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False}, "norm_topk_prob False"),
        ("qwen2_moe", {**EXPERTS, "mlp_only_layers": [0]}, "mlp_only_layers"),
        ("smollm3", {"no_rope_layers": [0, 1]}, "no_rope_layers"),
        ("olmo2", {"attention_bias": True}, "attention_bias True"),
        ("stablelm", {}, "type llama, mistral, .*'stablelm'"),
    ],
)  # fmt: skip
def test_models_that_llama_cpp_computes_differently_are_refused(
    tmp_path, tokenizer, family, settings, message
):
    with pytest.raises(DataError, match=message):
        write_gguf(model_of(family, **settings), tokenizer, tmp_path / "m.gguf", "f32", "m")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ],
)  # fmt: skip
def test_context_ends_with_a_window_that_llama_cpp_ignores(tmp_path, tokenizer, family, settings):
    """Within the window, every token attends to all earlier ones, as without a window."""
    model = model_of(family, **settings)
    result = write_gguf(model, tokenizer, tmp_path / "m.gguf", "f32", "m")
    repeat: Any = load_causal_lm(ModelSpec(source=str(tmp_path / "m.gguf")), 0).model.eval()
    assert result.window == repeat.config.max_position_embeddings == 16
    assert not getattr(repeat.config, "sliding_window", None)
    ids = torch.arange(5, 21)[None]
    with torch.no_grad():
        assert (repeat(input_ids=ids).logits - model(input_ids=ids).logits).abs().max() < 1e-4


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
"""Names in src/llama-arch.cpp of transformers modules."""


def read_as_llama_cpp(path: Path, config: Any) -> Any:
    """Read a file into a model as llama.cpp reads it; every tensor is read once."""
    import transformers

    file_tensors = {t.name: torch.tensor(np.array(t.data)) for t in gguf.GGUFReader(path).tensors}
    names = dict(NAMES)
    if config.model_type == "olmo2":
        names["post_attention_layernorm"] = "post_attention_norm"
        names["post_feedforward_layernorm"] = "post_ffw_norm"
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    used_names = set()
    for name, parameter in model.named_parameters():
        match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)", name)
        assert match is not None
        block, part = match.groups()
        prefix = f"blk.{block}." if block else ""
        if part.startswith("mlp.experts."):
            parts = {"mlp.experts.gate_up_proj": ["ffn_gate_exps", "ffn_up_exps"],
                     "mlp.experts.down_proj": ["ffn_down_exps"]}[part]  # fmt: skip
            stored_names = [f"{prefix}{each}.weight" for each in parts]
        else:
            module, _, kind = part.rpartition(".")
            stored_names = [f"{prefix}{names[module]}.{kind}"]
        value = torch.cat(
            [file_tensors[each] for each in stored_names], 1 if len(stored_names) > 1 else 0
        )
        used_names |= {*stored_names}
        if rotates_pairs(config) and stored_names[0].split(".")[-2] in ("attn_q", "attn_k"):
            pairs = value.unflatten(0, (-1, config.hidden_size // config.num_attention_heads))
            value = torch.cat([pairs[:, ::2], pairs[:, 1::2]], 1).flatten(0, 1)
        if config.model_type == "gemma" and value.ndim == 1:
            value = value - 1
        with torch.no_grad():
            parameter.copy_(value)
    assert used_names == file_tensors.keys()
    return model


def rotates_pairs(config: Any) -> bool:
    """Return whether llama_model_rope_type of src/llama-model.cpp is NORM, which rotates adjacent
    pairs."""
    return config.model_type in ("mixtral", "granite", "smollm3")


@pytest.mark.parametrize(
    ("family", "settings", "keys"),
    [
        ("gemma", {"head_dim": 8}, {"attention.key_length": 8}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2},
         {"expert_count": 4, "expert_used_count": 2}),
        ("granite", {"attention_multiplier": 0.5, "embedding_multiplier": 3.0, "mlp_bias": True,
                     "residual_multiplier": 0.25, "logits_scaling": 2.0},
         {"attention.scale": 0.5, "embedding_scale": 3.0, "residual_scale": 0.25,
          "logit_scale": 2.0}),
        ("olmo2", {"tie_word_embeddings": False}, {"attention.layer_norm_rms_epsilon": 1e-5}),
        ("smollm3", {"num_hidden_layers": 4}, {"rope.freq_base": 2e6}),
    ],
)  # fmt: skip
def test_family_unknown_to_transformers_is_read_like_llama_cpp(
    tmp_path, tokenizer, family, settings, keys
):
    model = model_of(family, **settings)
    write_gguf(model, tokenizer, tmp_path / "m.gguf", "f32", "m")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    name = reader.get_field("general.architecture").contents()
    assert name == {"mixtral": "llama"}.get(family, family)
    for key, value in keys.items():
        assert reader.get_field(f"{name}.{key}").contents() == pytest.approx(value)
    repeat = read_as_llama_cpp(tmp_path / "m.gguf", model.config)
    assert (logits(repeat) - logits(model)).abs().max() < 1e-5


def test_experts_of_llama_s_architecture_are_refused_as_a_base(tmp_path, tokenizer):
    """transformers would read a dense Llama."""
    model = model_of("mixtral", num_local_experts=4)
    write_gguf(model, tokenizer, tmp_path / "m.gguf", "f32", "m")
    with pytest.raises(DataError, match="expert_count 4"):
        load_causal_lm(ModelSpec(source=str(tmp_path / "m.gguf")), 0)


def sentencepiece(directory: Path, *, space_before: bool) -> Any:
    """Write a SentencePiece model as tokenizer.json, which lists every pair that makes a token."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, normalizers

    vocabulary_words = [
        "the",
        "them",
        "then",
        "there",
        "here",
        "hen",
        "that",
        "chat",
        "cat",
        "hat",
        "an",
    ]
    space = "\u2581"
    tokens = ["<pad>", "</s>", "<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    parts = {
        word[:n]
        for word in [*vocabulary_words, *(space + word for word in vocabulary_words)]
        for n in range(2, 6)
    }
    tokens += sorted(parts, key=lambda each: (len(each), each))
    tokens += sorted({*"".join(vocabulary_words), space})
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = [
        (token[:offset], token[offset:])
        for token in vocab
        if not token.startswith("<")
        for offset in range(1, len(token))
        if token[:offset] in vocab and token[offset:] in vocab
    ]
    bpe = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "\u2581")
    before = [normalizers.Prepend("\u2581")] * space_before
    bpe.normalizer = normalizers.Sequence([*before, spaces]) if before else spaces
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    new_tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **marks)
    new_tokenizer.save_pretrained(directory)
    return new_tokenizer


def llama_cpp_tokens(reader: Any, text: str) -> list[int]:
    """Tokenize as llm_tokenizer_spm of src/llama-vocab.cpp.

    The best-scored pair of neighbors is merged, the leftmost among equals.
    """
    fields = {name: f.contents() for name, f in reader.fields.items() if "ggml" in name}
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    number = {token: n for n, token in enumerate(tokens)}
    before = " " * fields["tokenizer.ggml.add_space_prefix"]
    symbols = [*(before + text).replace(" ", "\u2581")]
    while True:
        pairs = [(scores[number[a + b]], -position)
                 for position, (a, b) in enumerate(pairwise(symbols))
                 if a + b in number]  # fmt: skip
        if not pairs:
            break
        position = -max(pairs)[1]
        symbols[position : position + 2] = ["".join(symbols[position : position + 2])]
    return [
        each
        for symbol in symbols
        for each in ([number[symbol]] if symbol in number
                     else [number[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]  # fmt: skip


@pytest.mark.parametrize("space_before", [False, True])
def test_sentencepiece_makes_the_same_tokens_in_llama_cpp(tmp_path, space_before):
    new_tokenizer = sentencepiece(tmp_path, space_before=space_before)
    model = model_of("gemma", head_dim=8, vocab_size=len(new_tokenizer))
    write_gguf(model, new_tokenizer, tmp_path / "m.gguf", "f32", "m")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(generator.choice(["the", "hat", " ", "  ", "an", "e", "ch", "é", "n"])
                       for _ in range(12))  # fmt: skip
        assert llama_cpp_tokens(reader, text) == new_tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: setattr(t.backend_tokenizer, "pre_tokenizer",
                           tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")),
         "Replace and Metaspace 'first'"),
        (lambda t: setattr(t.backend_tokenizer, "normalizer", None), "one that keeps spaces"),
        (lambda t: t.add_special_tokens({"additional_special_tokens": [
            tokenizers.AddedToken("<|end|>", rstrip=True, special=True)]}), r"'<\|end\|>'"),
    ],
)  # fmt: skip
def test_sentencepiece_tokenizer_unsupported_by_llama_cpp_is_refused(tmp_path, change, message):
    new_tokenizer = sentencepiece(tmp_path, space_before=False)
    change(new_tokenizer)
    model = model_of("gemma", head_dim=8, vocab_size=len(new_tokenizer))
    with pytest.raises(DataError, match=message):
        write_gguf(model, new_tokenizer, tmp_path / "m.gguf", "f32", "m")


@pytest.mark.parametrize(
    ("add", "message"),
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
    tmp_path, tokenizer, monkeypatch, add, message
):
    describe = gguf_file._describe

    def describe_more(writer: Any, *rest: Any) -> None:
        describe(writer, *rest)
        add(writer)

    monkeypatch.setattr(gguf_file, "_describe", describe_more)
    monkeypatch.setattr(gguf_file, "_verify_file", lambda *_: None)
    write_gguf(model_of("llama"), tokenizer, tmp_path / "m.gguf", "f32", "m")
    with pytest.raises(DataError, match=message):
        load_causal_lm(ModelSpec(source=str(tmp_path / "m.gguf")), 0)


def test_a_classifier_of_a_gguf_file_has_the_labels(tmp_path, tokenizer):
    write_gguf(model_of("llama"), tokenizer, tmp_path / "m.gguf", "f32", "m")
    loaded = load_classifier(ModelSpec(source=str(tmp_path / "m.gguf")), ["a", "b", "c"], 0, 0)
    assert loaded.config.id2label == {0: "a", 1: "b", 2: "c"}


def changed_tokenizer(directory: Path, change: Any) -> Any:
    new_tokenizer = save_chat_tokenizer(directory)
    change(new_tokenizer)
    return new_tokenizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: setattr(t.backend_tokenizer, "normalizer", tokenizers.normalizers.Lowercase()),
         "normalizer Lowercase"),
        (lambda t: setattr(t.backend_tokenizer.model, "end_of_word_suffix", "</w>"),
         "end_of_word_suffix '</w>'"),
        (lambda t: setattr(t.backend_tokenizer.model, "ignore_merges", True), "ignore_merges True"),
    ],
)  # fmt: skip
def test_tokenizer_with_additional_steps_is_refused(tmp_path, change, message):
    new_tokenizer = changed_tokenizer(tmp_path, change)
    with pytest.raises(DataError, match=message):
        write_gguf(model_of("llama"), new_tokenizer, tmp_path / "m.gguf", "f32", "m")


def test_tokens_beyond_the_table_are_dropped(tmp_path):
    """The tokenization is equal; a vocabulary beyond the table is refused."""
    larger = changed_tokenizer(tmp_path, lambda t: t.add_tokens(["<a>", "<b>"]))
    model = model_of("llama", vocab_size=len(larger) - 1)
    result = write_gguf(model, larger, tmp_path / "m.gguf", "f32", "m")
    assert result.tokens_without_row == 1
    tokens = gguf.GGUFReader(tmp_path / "m.gguf").get_field("tokenizer.ggml.tokens").contents()
    assert tokens[-1] == "<a>"
    model = model_of("llama", vocab_size=280)
    with pytest.raises(DataError, match="expected tokens below 280"):
        write_gguf(model, larger, tmp_path / "n.gguf", "f32", "m")
