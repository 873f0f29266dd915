"""Results of families other than Llama, and of adapters of embeddings and heads."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.base.errors import DataError
from protocol.spec.files.run_spec_file import load_run_spec
from tests.commands import run_command
from tests.finished_run import write_finished_run
from tests.small_chat import save_chat_tokenizer, write_jsonl
from worker.models.pretrained import max_sample_tokens
from worker.results.generate import Sampling, generate
from worker.results.load import load, probe
from worker.results.merge import merge
from worker.results.saved_model import find_saved_model
from worker.tasks.registry import build

SIZES = {
    "vocab_size": 2000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 2, "num_key_value_heads": 2,
}  # fmt: skip
STATE_SPACE_SIZES = {**SIZES, "state_size": 8}
BART = {
    **SIZES, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "decoder_start_token_id": 2,
}  # fmt: skip
OPT = {**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 32}
T5 = {
    "vocab_size": 2000, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip


def spec_of(directory: Path, task: str, family: str, sizes: dict[str, Any], **changes: Any) -> Path:
    """Write a small model of a family, its tokenizer and its data; return the run spec that trains
    it."""
    import tokenizers
    import transformers

    tokenizer = save_chat_tokenizer(directory / "model", None)
    end = tokenizers.processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 2)]
    )
    if task == "classify":
        tokenizer.backend_tokenizer.post_processor = end
        tokenizer.save_pretrained(directory / "model")
    default_config = transformers.AutoConfig.for_model(family)
    config = transformers.AutoConfig.for_model(
        family,
        **{
            k: v for k, v in sizes.items() if hasattr(default_config, k) or k.startswith("decoder_")
        },
    )
    kind: Any = transformers.AutoModelForCausalLM
    if task == "classify":
        kind = transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    kind.from_config(config).save_pretrained(directory / "model")
    rows = [{"text": f"{n} and {n % 7} is {n + n % 7}.", "label": "ab"[n % 2]} for n in range(20)]
    data = {
        "train": str(write_jsonl(directory / "rows.jsonl", rows)),
        "holdout": 0.2,
        "max_tokens": 32,
    }
    spec = {
        "name": family, "task": task, "seed": 7, "model": {"source": str(directory / "model")},
        "lora": {"r": 4}, "data": data, "batch": {"samples": 4, "microbatch": 2},
        "optimizer": {"name": "adamw", "lr": 5e-3}, "steps": 2, **changes,
    }  # fmt: skip
    path = directory / "run.yaml"
    path.write_text(json.dumps(spec))
    return path


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("mamba", ["in_proj"]),
        ("openai-gpt", None),
        pytest.param("rwkv", ["key"], marks=pytest.mark.slow),
        pytest.param("gpt2", None, marks=pytest.mark.slow),
        pytest.param("mamba2", ["in_proj"], marks=pytest.mark.slow),
        pytest.param("falcon_mamba", ["in_proj"], marks=pytest.mark.slow),
        pytest.param("bamba", None, marks=pytest.mark.slow),
        pytest.param("recurrent_gemma", None, marks=pytest.mark.slow),
        pytest.param("mistral", None, marks=pytest.mark.slow),
    ],
)
def test_generation_with_carried_state_equals_that_from_the_whole_text(tmp_path, family, targets):
    """Includes Bamba and RecurrentGemma, whose state is wrong when passed on manually."""
    family_settings: dict[str, dict[str, Any]]
    family_settings = {"mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2}, "mistral": {
        "sliding_window": 8}, "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8,
        "mamba_d_head": 8, "mamba_n_groups": 2}, "recurrent_gemma": {"num_hidden_layers": 3,
        "lru_width": 32, "num_key_value_heads": 1}}  # fmt: skip
    family_settings |= {
        name: {"n_embd": 32, "n_layer": 1, "n_head": 4} for name in ("openai-gpt", "gpt2")
    }
    sizes = STATE_SPACE_SIZES | family_settings.get(family, {})
    spec = spec_of(tmp_path, "causal-lm", family, sizes, lora={"r": 4, "targets": targets})
    loaded = load(find_saved_model(write_finished_run(spec, tmp_path / "run", "r")), None)
    ids = [5, 9, 30, 41]
    actual = "".join(generate(loaded.model, loaded.tokenizer, ids, Sampling(0, 1, 0, 10)))
    text = torch.tensor([ids])
    options = {} if family == "openai-gpt" else {"use_cache": False}
    with torch.no_grad():
        while len(text[0]) < 14 and text[0, -1] != 2:
            likeliest = loaded.model(input_ids=text, **options).logits[:, -1:].argmax(2)
            text = torch.cat([text, likeliest], 1)
    assert actual == loaded.tokenizer.decode(text[0, 4:], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("family", "sizes", "targets"),
    [
        ("bart", BART, None),
        ("t5", T5, ["q", "embed_tokens"]),
        ("roberta", {**SIZES, "pad_token_id": 1}, ["query", "dense", "word_embeddings"]),
        pytest.param("mbart", BART, None, marks=pytest.mark.slow),
        pytest.param("mt5", T5, None, marks=pytest.mark.slow),
        pytest.param("bert", SIZES, ["position_embeddings"], marks=pytest.mark.slow),
    ],
)
def test_merged_classifier_equals_base_and_adapter(tmp_path, family, sizes, targets):
    """Encoder-decoders, and models whose positions start after their padding token."""
    spec = spec_of(tmp_path, "classify", family, sizes, lora={"r": 4, "targets": targets})
    run = write_finished_run(spec, tmp_path / "run", "r")
    assert merge(find_saved_model(run), None, tmp_path / "whole").difference < 1e-5
    answers = [
        json.loads(run_command("worker", "classify", str(directory), "3 and 4", "--json").stdout)
        for directory in (run, tmp_path / "whole")
    ]
    assert answers[0]["label"] == answers[1]["label"]
    assert answers[0]["probability"] == pytest.approx(answers[1]["probability"], abs=1e-5)


@pytest.mark.parametrize(
    ("family", "tied", "targets"),
    [
        ("gpt2", True, ["wte", "c_attn"]),
        ("llama", True, ["embed_tokens", "lm_head"]),
        ("llama", False, ["lm_head", "q_proj"]),
        pytest.param("gemma3_text", True, ["embed_tokens"], marks=pytest.mark.slow),
        pytest.param("qwen2", True, ["lm_head"], marks=pytest.mark.slow),
    ],
)
def test_adapter_of_embeddings_and_head_equals_peft(tmp_path, family, tied, targets):
    """Logits are equal as trained, as loaded by PEFT and by `load`, and after a merge."""
    import peft
    import transformers
    from safetensors.torch import load_file

    small = {"n_embd": 32, "n_layer": 1, "n_head": 4, "head_dim": 8, "tie_word_embeddings": tied}
    lora = {"r": 4, "targets": targets}
    spec = spec_of(tmp_path, "causal-lm", family, SIZES | small, lora=lora)
    run = write_finished_run(spec, tmp_path / "run", "r")
    actual = load(find_saved_model(run), None)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied layers
        peft_model = peft.PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    merge(find_saved_model(run), None, tmp_path / "whole")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    task = build(load_run_spec(spec))
    assert task.trainable.module is not None
    trained = task.trainable.module.eval()
    saved_tensors = load_file(run / "adapter" / "adapter_model.safetensors")
    parameters = dict(trained.named_parameters())
    with torch.no_grad():
        for name, saved_name in task.manifest.export.names.items():
            parameters[name].copy_(saved_tensors[saved_name])
    expected = probe(trained, 2000)
    assert (probe(base, 2000) - probe(actual.model, 2000)).abs().max() < 1e-6
    for model in (actual.model, peft_model, merged):
        assert (probe(model, 2000) - expected).abs().max() < 1e-5
    assert (
        "".join(generate(actual.model, actual.tokenizer, [5, 9], Sampling(0, 1, 0, 3))) is not None
    )


def test_earlier_adapter_of_embeddings_is_read(tmp_path):
    """Names in earlier adapters of embeddings ended in `.default`."""
    from safetensors.torch import load_file, save_file

    lora = {"r": 4, "targets": ["embed_tokens"]}
    spec = spec_of(tmp_path, "causal-lm", "llama", SIZES, lora=lora)
    run = write_finished_run(spec, tmp_path / "run", "r")
    current_logits = probe(load(find_saved_model(run), None).model, 2000)
    path = run / "adapter" / "adapter_model.safetensors"
    save_file({f"{name}.default": value for name, value in load_file(path).items()}, path)
    assert torch.equal(probe(load(find_saved_model(run), None).model, 2000), current_logits)
    repeat = json.loads(spec.read_text())
    repeat["model"]["adapter"] = str(run / "adapter")
    spec.write_text(json.dumps(repeat))
    assert any(values.any() for values in build(load_run_spec(spec)).initial_parameters())


@pytest.mark.parametrize(
    ("task", "model", "target", "message"),
    [
        ("causal-lm", ("opt", OPT), "embed_positions", "leave it out"),
        ("classify", ("t5", T5), "shared", "name embed_tokens"),
    ],
)
def test_adapters_of_unsupported_tables_are_refused(tmp_path, task, model, target, message):
    spec = spec_of(tmp_path, task, *model, lora={"r": 4, "targets": [target]})
    with pytest.raises(DataError, match=f"{target}.*{message}"):
        build(load_run_spec(spec))


@pytest.mark.parametrize(
    ("family", "padding", "limit"),
    [
        ("roberta", 1, 62),
        ("bert", 1, 64),
        pytest.param("xlm-roberta", 3, 60, marks=pytest.mark.slow),
        pytest.param("mpnet", 1, 62, marks=pytest.mark.slow),
        pytest.param("camembert", 1, 62, marks=pytest.mark.slow),
        pytest.param("longformer", 1, 62, marks=pytest.mark.slow),
    ],
)
def test_position_ids_after_the_padding_id_shorten_the_context(tmp_path, family, padding, limit):
    sizes = SIZES | {"pad_token_id": padding}
    spec = spec_of(tmp_path, "classify", family, sizes)
    document = json.loads(spec.read_text())
    document["data"]["max_tokens"] = limit + 1
    spec.write_text(json.dumps(document))
    with pytest.raises(DataError, match=rf"at most {limit}, .*got {limit + 1}; .*={limit}$"):
        build(load_run_spec(spec))
    document["data"]["max_tokens"] = limit
    spec.write_text(json.dumps(document))
    module = build(load_run_spec(spec)).trainable.module
    assert module is not None
    assert max_sample_tokens(module.eval()) == limit
    text = torch.full((1, limit), 7)
    module(input_ids=text, attention_mask=torch.ones_like(text))


def test_a_prompt_with_tokens_beyond_the_table_is_refused(tmp_path):
    spec = spec_of(tmp_path, "causal-lm", "llama", SIZES | {"vocab_size": 290})
    loaded = load(find_saved_model(tmp_path / "model"), None)
    assert spec.exists()
    with pytest.raises(DataError, match=r"expected tokens below 290, .*got 291"):
        generate(loaded.model, loaded.tokenizer, [5, 291], Sampling(0, 1, 0, 3))
