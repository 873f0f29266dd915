"""The task embed: loss and ranks against references, data, and sentence-transformers files."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from backends.base.interface import Batch
from backends.eager.eager import EagerBackend, EagerProgram
from protocol.base.errors import DataError, RunSpecError
from protocol.datasets.data_check import check_data
from protocol.spec.run_spec import parse_run_spec
from tests.commands import run_command
from tests.small_decoder import save_small_decoder
from tests.small_sequences import save_encoder_decoders
from tests.worker.tasks.test_classify import export
from tests.worker.tasks.test_sequences import write_rows
from worker.logic.events import StepId
from worker.shell.coupled_step import CoupledStep
from worker.tasks.language.embed import ranks
from worker.tasks.registry import build

CITIES = ("oslo", "rome", "bonn", "kyiv", "bern", "lima")
ROWS: list[dict[str, Any]] = [
    {
        "anchor": f"{'find' if number > 8 else 'where is'} {city}",
        "positive": f"{city} is {n} miles from here{' and back' if 5 < number < 9 else ''}",
        "negative": f"{city} is a word",
    }
    for number, (n, city) in enumerate([*enumerate(CITIES)] * 2)
]
"""Three anchors recur with other passages, and three passages with other anchors."""


PLAIN = [{"anchor": city, "positive": f"{city} is a word"} for city in CITIES[:3]]


def task_of(tiny, tmp_path, rows=ROWS, *, columns=None, lora=None, **embed):
    train = write_rows(tmp_path / "pairs.jsonl", rows)
    spec = parse_run_spec({
        "task": "embed", "seed": 7, "steps": 1, "model": {"source": tiny}, "lora": lora,
        "data": {"train": str(train), "holdout": 0, "max_tokens": 16, "columns": columns or {}},
        "batch": {"samples": 12, "microbatch": 4}, "embed": embed,
    })  # fmt: skip
    task: Any = build(spec)
    return task


def pool(states, mask, pooling):
    if pooling == "cls":
        return states[0]
    return states[int(mask.sum()) - 1] if pooling == "last" else states[mask.bool()].mean(dim=0)


def reference_losses(
    task, rows, *, pooling="mean", temperature=0.05, symmetric=False, normalized=True
):
    """Return the loss of each pair, computed one text and one score at a time."""
    module = task.trainable.module.eval()
    batch = task.batch(range(len(rows)))
    arrays = {name: torch.tensor(values) for name, values in batch.arrays.items()}

    def encode_text(ids, mask):
        states = module(input_ids=ids[None], attention_mask=mask[None]).last_hidden_state[0]
        vector = pool(states, mask, pooling)
        return normalize(vector, dim=0) if normalized else vector

    pairs = range(len(rows))
    anchors = [encode_text(arrays["anchor_ids"][i], arrays["anchor_mask"][i]) for i in pairs]
    passages = [
        [
            encode_text(*each)
            for each in zip(arrays["passage_ids"][i], arrays["passage_mask"][i], strict=True)
        ]
        for i in pairs
    ]
    texts = [[row["positive"], *([row["negative"]] if "negative" in row else [])] for row in rows]

    def is_match(i, j):
        matches = rows[i]["anchor"] == rows[j]["anchor"], texts[i][0] == texts[j][0]
        return i != j and any(matches)

    losses = []
    for i in pairs:
        scores = {
            (j, k): anchors[i] @ passages[j][k] / temperature
            for k in range(len(texts[0]))
            for j in pairs
            if not (k == 0 and is_match(i, j)) and not (k and texts[j][k] == texts[i][0])
        }
        own_scores = torch.stack(
            [scores[i, 0], *(s for index, s in scores.items() if index != (i, 0))]
        )
        loss = cross_entropy(own_scores[None], torch.tensor([0]))
        if symmetric:
            other_scores = [
                anchors[j] @ passages[i][0] / temperature for j in pairs if not is_match(i, j)
            ]
            column = [j for j in pairs if not is_match(i, j)].index(i)
            loss = (
                loss + cross_entropy(torch.stack(other_scores)[None], torch.tensor([column]))
            ) / 2
        losses.append(loss)
    return torch.stack(losses)


def step_of(task, microbatch):
    program = EagerBackend("cpu").compile(task.trainable, task.batch(range(microbatch)))
    assert isinstance(program, EagerProgram)
    program.load(task.initial_parameters())
    parts = [range(lo, lo + microbatch) for lo in range(0, len(ROWS), microbatch)]
    batches = [task.batch(part) for part in parts]
    task.trainable.module.eval()
    rows = np.concatenate([*program.embed([(batch, n) for n, batch in enumerate(batches)])])
    return CoupledStep(program, StepId(0, 1), rows.reshape(-1), [microbatch] * len(parts), 0)


@pytest.mark.parametrize(
    "embed_options",
    [
        {},
        {"pooling": "cls", "symmetric": True},
        {"pooling": "last", "normalize": False, "temperature": 1.0},
        {"learn_temperature": True, "temperature": 0.1},
    ],
    ids=str,
)
def test_loss_equals_the_reference_and_excludes_matches(tiny, tmp_path, embed_options):
    # No dropout: the reference computes one text at a time.
    rows = (
        ROWS
        if embed_options
        else [{k: v for k, v in row.items() if k != "negative"} for row in ROWS]
    )
    task = task_of(tiny, tmp_path, rows, **embed_options)
    module = task.trainable.module
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    step_loss = step_of(task, 4)._step_loss
    embed_options = {
        name: value for name, value in embed_options.items() if name != "learn_temperature"
    }
    expected = reference_losses(
        task, rows, normalized=embed_options.pop("normalize", True), **embed_options
    )
    assert np.allclose(step_loss.losses, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert sorted(step_loss.parameter_gradients) == (
        ["log_scale"] if "temperature" in embed_options and len(embed_options) == 1 else []
    )


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_a_decoder_learns_from_its_last_token(tmp_path, lora):
    model = save_small_decoder(tmp_path / "decoder")
    task = task_of(str(model), tmp_path, lora=lora, pooling="last", learn_temperature=True)
    names = {tensor.name for block in task.manifest.blocks for tensor in block.tensors}
    assert "log_scale" in names
    assert all("lora_" in name for name in names - {"log_scale"}) == (lora is not None)
    step_loss = step_of(task, 4)._step_loss
    assert np.isfinite(step_loss.losses).all()
    assert np.abs(step_loss.embedding_gradients["anchor"]).max() > 0
    assert sorted(step_loss.parameter_gradients) == ["log_scale"]


@pytest.mark.parametrize(
    ("rows", "batch", "message"),
    [
        ([*PLAIN, {"anchor": "a"}], 4, "expected a column 'positive'"),
        ([*PLAIN, {"anchor": "a", "positive": "b", "score": 0.0}], 4, "got score 0.0"),
        (PLAIN, 1, "at least 2 pairs in a step, or rows with a hard negative"),
        (
            [*PLAIN, {"anchor": "a", "positive": "b", "negative": "c"}],
            4,
            "line 4: expected as many negatives as in the first row",
        ),
        (
            [{"anchor": "a", "positive": "b", "negative": ["c", "d"]}, *PLAIN],
            4,
            "line 1, which has 2, got none; give every row the same number",
        ),
    ],
)
def test_mistake_is_reported_before_a_worker_joins(tmp_path, rows, batch, message):
    spec = parse_run_spec({
        "task": "embed", "steps": 1, "model": {"source": "none"},
        "data": {"train": str(write_rows(tmp_path / "a.jsonl", rows)), "holdout": 0},
        "batch": {"samples": batch, "microbatch": 1},
    })  # fmt: skip
    with pytest.raises(DataError) as error:
        check_data(spec)
    assert message in str(error.value)


def test_an_encoder_decoder_is_refused_by_its_type(tmp_path):
    model = save_encoder_decoders(tmp_path)["t5"]
    with pytest.raises(DataError, match="got an encoder-decoder of type 't5'; take another model"):
        task_of(str(model), tmp_path)


def test_rank_is_that_of_the_first_matching_passage():
    rng = np.random.default_rng(3)
    anchors = torch.tensor(rng.standard_normal((30, 3)).astype(np.float32))
    passages = torch.tensor(rng.standard_normal((30, 2, 3)).astype(np.float32))
    numbers = torch.arange(30, 90).reshape(30, 2)
    numbers[5, 0], passages[5, 0] = numbers[4, 0], passages[4, 0].clone()
    anchor_numbers = torch.arange(30)
    anchor_numbers[7] = 6
    fields = {
        "anchor": anchors, "passages": passages, "anchor_number": anchor_numbers,
        "passage_numbers": numbers,
    }  # fmt: skip
    texts = {int(n): p for n, p in zip(numbers.flatten(), passages.flatten(0, 1), strict=True)}
    for i, rank in enumerate(ranks(fields)):
        answers = {int(numbers[j, 0]) for j in range(30) if anchor_numbers[j] == anchor_numbers[i]}
        scores = {n: float(anchors[i] @ p) for n, p in texts.items()}
        best = max(scores[n] for n in answers)
        assert rank == 1 + sum(s > best for n, s in scores.items() if n not in answers)


def test_evaluation_ranks_all_evaluation_passages(tiny, tmp_path):
    task = task_of(tiny, tmp_path)
    module = task.trainable.module.eval()
    batch: Batch = task.batch(range(12))
    arrays = {name: torch.tensor(values) for name, values in batch.arrays.items()}
    with torch.no_grad():
        sums = task.trainable.evaluate(module, arrays)
        expected = reference_losses(task, ROWS).sum().item()
    assert sums["loss_sum"] == pytest.approx(expected, rel=1e-4)
    assert sums["pairs"] == 12
    assert 0 <= sums["within_1"] <= sums["within_5"] <= sums["within_10"] <= 12
    assert sums["within_1"] <= sums["reciprocal"]


def test_repeated_texts_share_one_index(tiny, tmp_path):
    task = task_of(tiny, tmp_path, [*ROWS, ROWS[0]], columns={"negative": "absent"})
    notes = task.manifest.notes
    assert notes["duplicates_removed"] == 1
    assert notes["hard_negatives_per_pair"] == 0
    assert notes["distinct_texts"] == len({t for r in ROWS for t in (r["anchor"], r["positive"])})


def test_texts_with_the_same_tokens_are_one_text(tiny, tmp_path):
    """Texts that differ only beyond max_tokens are indistinguishable, so neither is a negative."""
    beyond = "rome " * 40
    rows = [{"anchor": city, "positive": f"{city} is a word"} for city in CITIES[:4]]
    rows[1]["positive"], rows[2]["positive"] = beyond + "oslo", beyond + "bonn"
    task = task_of(tiny, tmp_path, rows)
    assert task.manifest.notes["distinct_texts"] == 7
    numbers = task.batch(range(4)).arrays["passage_numbers"][:, 0].tolist()
    assert numbers[1] == numbers[2]
    assert len({*numbers}) == 3


def test_a_text_without_tokens_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "worker.data.embedding_data.encode_truncated",
        lambda _, texts, __: ((np.arange(2 * (text != "bern is a word")), False) for text in texts),
    )
    with pytest.raises(
        DataError, match=r"line 5: expected text, got 'bern is a word', .* no token"
    ):
        task_of(tiny, tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"negative": ["a word", "another"]},
            "as in the first row, .* line 1, which has 1, got 2",
        ),
        ({"negative": ROWS[3]["positive"]}, "expected negatives that differ from the positive"),
        ({"positive": " "}, "positive"),
    ],
)
def test_rows_that_are_neither_pairs_nor_triplets_are_named(tiny, tmp_path, change, text):
    rows = [*ROWS[:3], {**ROWS[3], **change}]
    with pytest.raises(DataError, match=text) as error_info:
        task_of(tiny, tmp_path, rows)
    assert "line 4" in str(error_info.value)


def test_a_run_with_replicas_is_refused(tiny):
    with pytest.raises(RunSpecError, match="task embed does not support replicas"):
        parse_run_spec({
            "task": "embed", "steps": 1, "model": {"source": tiny}, "data": {"train": "x"},
            "replicas": {"count": 2, "inner_steps": 2},
        })  # fmt: skip


def test_the_result_has_the_files_of_sentence_transformers(tiny, tmp_path):
    import transformers

    task = task_of(tiny, tmp_path, pooling="last", learn_temperature=True)
    result_directory = export_of(task, tmp_path)
    kinds = [each["type"].rpartition(".")[2] for each in json_of(result_directory / "modules.json")]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    pooling = json_of(result_directory / "1_Pooling" / "config.json")
    assert pooling["word_embedding_dimension"] == 8
    assert [key for key, value in pooling.items() if value is True and "mode" in key] == [
        "pooling_mode_lasttoken"
    ]
    model = transformers.AutoModel.from_pretrained(result_directory)
    parameters = dict(model.named_parameters())
    for block, values in zip(task.manifest.blocks, task.initial_parameters(), strict=True):
        for tensor, elements in block.slices():
            if tensor.name != "log_scale":
                is_same = parameters[tensor.name].detach().numpy().reshape(-1) == values[elements]
                assert is_same.all(), tensor.name


def export_of(task, tmp_path):
    (tmp_path / "out").mkdir()
    return export(task, task.initial_parameters(), tmp_path / "out")


def json_of(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_merged_for_sentence_transformers(tiny, tmp_path, dtype):
    import transformers

    task = task_of(tiny, tmp_path, lora={"r": 2}, learn_temperature=True)
    rng = np.random.default_rng(0)
    trained = [v + 0.1 * rng.standard_normal(v.shape, "f4") for v in task.initial_parameters()]
    (tmp_path / "out").mkdir()
    adapter, merged = export(task, trained, tmp_path / "out"), tmp_path / "merged"
    process = run_command("worker", "merge", str(adapter), "--out", str(merged), "--dtype", dtype)
    assert process.returncode == 0, process.stderr
    assert "last states of 24 tokens" in process.stdout
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert (merged / name).read_bytes() == (adapter / name).read_bytes()
    batch = task.batch(range(4)).arrays
    ids, mask = torch.tensor(batch["anchor_ids"]), torch.tensor(batch["anchor_mask"])
    module = task.trainable.module.eval()
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for block, values in zip(task.manifest.blocks, trained, strict=True):
            for tensor, elements in block.slices():
                parameters[tensor.name].copy_(
                    torch.from_numpy(values[elements].reshape(tensor.shape))
                )
        expected = module(input_ids=ids, attention_mask=mask).last_hidden_state
        model = transformers.AutoModel.from_pretrained(merged, dtype=torch.float32).eval()
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.allclose(states, expected, atol=1e-5 if dtype == "float32" else 0.1)


def test_embedding_model_cannot_generate_text(tiny, tmp_path):
    result_directory = export_of(task_of(tiny, tmp_path), tmp_path)
    for command in (
        ("generate", str(result_directory), "x"),
        ("export", str(result_directory), "--gguf", "f32"),
    ):
        completed = run_command(
            "worker", *command, *(["--out", str(tmp_path / "g")] * (len(command) > 3))
        )
        assert completed.returncode == 2
        assert "got one that embeds texts; load it with sentence-transformers" in completed.stderr


def test_worker_data_shows_anchors_and_passages(tiny, tmp_path):
    train = write_rows(tmp_path / "pairs.jsonl", ROWS)
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({
        "task": "embed", "steps": 1, "model": {"source": tiny},
        "data": {"train": str(train), "max_tokens": 16}, "batch": {"samples": 4, "microbatch": 2},
    }))  # fmt: skip
    process = run_command("worker", "data", str(run), "--samples", "1")
    assert process.returncode == 0, process.stderr
    for label in ("anchor:", "positive:", "negative:", "held-out passages", "distinct texts"):
        assert label in process.stdout
