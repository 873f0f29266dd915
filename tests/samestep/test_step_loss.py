"""`samestep.Task(embed=, batch_loss=)`: a script's loss over all samples of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

import samestep
from protocol.base.errors import SamestepError
from worker.scripts.coupling import coupled_loss

torch.manual_seed(3)
X, Y = torch.randn(2, 24, 5)
LABELS = torch.arange(24) // 2
FIT_OPTIONS: dict[str, Any] = {
    "batch": 24, "microbatch": 4, "device": "cpu", "optimizer": {"name": "sgd", "lr": 0.1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.log_scale = nn.Parameter(torch.tensor(1.0))


def embed(module, batch):
    x, y, label = batch
    return {
        "label": label,
        "x": normalize(module.encoder(x), dim=1),
        "y": normalize(module.encoder(y), dim=1),
    }


def batch_loss(module, embeddings):
    scores = embeddings["x"] @ embeddings["y"].T * module.log_scale.exp()
    is_same_label = embeddings["label"][:, None] == embeddings["label"][None]
    is_same_label = is_same_label & ~torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    target = torch.arange(len(scores), device=scores.device)
    return cross_entropy(scores.masked_fill(is_same_label, -torch.inf), target, reduction="none")


def make_task(**overrides):
    data = TensorDataset(X, Y, LABELS)
    return samestep.Task(
        **{"module": Towers(), "train": data, "embed": embed, "batch_loss": batch_loss, **overrides}
    )


def test_script_trains_like_torch_over_the_whole_batch():
    result = samestep.fit(
        lambda: make_task(held_out=TensorDataset(X[:8], Y[:8], LABELS[:8])), steps=3, **FIT_OPTIONS
    )
    module = Towers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = batch_loss(module, embed(module, (X, Y, LABELS))).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [row["loss"] for row in result.history] == pytest.approx(losses, rel=1e-5)
    trained = dict(result.module.named_parameters())
    for name, parameter in module.named_parameters():
        assert torch.allclose(trained[name], parameter, rtol=1e-5, atol=1e-6), name
    with torch.no_grad():  # evaluation treats each microbatch as a step
        parts = [slice(0, 4), slice(4, 8)]
        held_out = [batch_loss(module, embed(module, (X[p], Y[p], LABELS[p]))).sum() for p in parts]
    assert result.metrics["loss"] == pytest.approx(float(sum(held_out)) / 8, rel=1e-4)


@pytest.mark.slow  # faster tests check buffers, and this loss, separately
def test_batch_norm_counts_microbatches_of_the_gradient_phase_only():
    def build():
        module = Towers()
        module.encoder.insert(1, nn.BatchNorm1d(8))
        return make_task(module=module, unit="microbatch")

    result = samestep.fit(build, steps=2, **FIT_OPTIONS)
    norm = dict(result.module.named_buffers())
    # Twice in a microbatch, for x and for y, and not in the embedding phase.
    assert float(norm["encoder.1.num_batches_tracked"]) == 4
    repeat = samestep.fit(build, steps=2, **FIT_OPTIONS)
    for name, values in norm.items():
        assert torch.equal(values, dict(repeat.module.named_buffers())[name]), name


def embed_relative_to_mean(module, batch):
    embeddings = embed(module, batch)
    return embeddings | {name: embeddings[name] - embeddings[name].mean(dim=0) for name in "xy"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_loss": None}, "expected both embed and batch_loss, got only one"),
        ({"loss": batch_loss}, "expected no loss with embed"),
        ({"weight": lambda _: 1.0}, "expected no weight with embed"),
        ({"batch_loss": lambda m, f: batch_loss(m, f).mean()}, "reduction='none'"),
        ({"embed": lambda m, b: embed(m, b)["x"]}, "expected a dict of tensors"),
        ({"embed": lambda m, b: embed(m, b) | {"label": b[2][:1]}}, r"tensors of \[1, 2\] rows"),
        ({"embed": lambda _, b: {"label": b[2]}}, "expected a field of float32"),
        ({"embed": embed_relative_to_mean}, "depend only on its own sample"),
    ],
)
def test_invalid_step_loss_is_refused_in_terms_of_the_script(changes, message):
    with pytest.raises(SamestepError, match=message):
        samestep.fit(lambda: make_task(**changes), steps=1, **FIT_OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_loss_is_tried_on_as_many_rows_as_a_step_has(dtype):
    """The rows are float32, whatever type embed returns, and the loss may change them in place."""
    shapes = []

    def hardest_loss(module, embeddings):
        shapes.append((len(embeddings["x"]), embeddings["x"].dtype))
        embeddings["x"] *= module.log_scale
        return -(embeddings["x"] @ embeddings["y"].T).topk(20).values.sum(dim=1)

    def embed_in_dtype(module, batch):
        return {name: x.to(dtype) for name, x in embed(module, batch).items() if name != "label"}

    user_task = make_task(embed=embed_in_dtype, batch_loss=hardest_loss)
    arrays: Any = [X[:2], Y[:2], LABELS[:2]]
    coupled = coupled_loss(user_task, embed_in_dtype, arrays, [64, 20])
    assert shapes == [(64, torch.float32), (20, torch.float32)]
    assert {field.dtype for field in coupled.layout.fields} == {"float32"}
    with pytest.raises(RuntimeError, match="out of range"):
        coupled_loss(user_task, embed_in_dtype, arrays, [64, 19])


@pytest.mark.slow  # tests/backends/eager/test_coupled_loss.py has a faster test of the check
def test_stateful_step_loss_is_refused():
    counts = []

    def multiply_by_calls(module, embeddings):
        counts.append(1)
        return batch_loss(module, embeddings) * len(counts)

    with pytest.raises(SamestepError, match="batch_loss to give the same"):
        samestep.fit(lambda: make_task(batch_loss=multiply_by_calls), steps=2, **FIT_OPTIONS)
