"""A loss that couples all samples of a step: the results do not depend on the microbatches."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from backends.base.interface import Batch, BlockGradient, CoupledLoss, Trainable
from backends.eager.eager import EagerBackend, EagerProgram
from protocol.base.errors import DataError, SamestepError
from protocol.exact.embedding_rows import are_finite, join_fields, split_fields
from protocol.exact.reduction.tree import Subtree
from protocol.spec.manifest import EmbeddingField, EmbeddingLayout
from worker.logic.events import StepId
from worker.models.blocks import cut_into_blocks
from worker.shell.coupled_step import CoupledStep

SAMPLES = 32
LAYOUT = EmbeddingLayout(
    fields=(
        EmbeddingField(name="query", dtype="float32", shape=(4,)),
        EmbeddingField(name="passage", dtype="float32", shape=(4,)),
        EmbeddingField(name="label", dtype="int64"),
    )
)
STEP_ID = StepId(3, 1)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 4))
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return normalize(self.encoder(x), dim=-1)


def embed(module, arrays):
    query, passage = module(arrays["x"]), module(arrays["y"])
    return {"query": query, "passage": passage, "label": arrays["label"]}


def losses(module, fields):
    fields["query"] *= 1.0  # allowed: the loss owns these rows
    scores = fields["query"] @ fields["passage"].T * module.log_scale.exp()
    is_same_label = fields["label"][:, None] == fields["label"][None]
    scores = scores.masked_fill(
        is_same_label & ~torch.eye(len(scores), dtype=torch.bool), -torch.inf
    )
    return cross_entropy(scores, torch.arange(len(scores)), reduction="none")


def make_trainable(loss=losses):
    module = Towers()
    blocks = cut_into_blocks(module)
    return Trainable(blocks, module, coupled=CoupledLoss(embed, loss, LAYOUT))


def make_batch(lo=0, hi=SAMPLES):
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((2, SAMPLES, 6)).astype(np.float32)
    label = (np.arange(SAMPLES) // 2).astype(np.int64)
    return Batch({"x": x[lo:hi], "y": y[lo:hi], "label": label[lo:hi]}, float(hi - lo))


def disable_dropout(module):
    module.encoder[2].p = 0.0


def compile_program(task, batch) -> EagerProgram:
    program = EagerBackend("cpu").compile(task, batch)
    assert isinstance(program, EagerProgram)
    return program


def compute_step(microbatch_samples):
    """Compute a step in microbatches of this size: embeddings, then gradients.

    Returns:
        The task, the step's loss, and the gradient of each block.
    """
    task = make_trainable()
    program = compile_program(task, make_batch(0, microbatch_samples))
    disable_dropout(task.module)
    starts = range(0, SAMPLES, microbatch_samples)
    batches = [make_batch(lo, lo + microbatch_samples) for lo in starts]
    leaves = [(batch, leaf) for leaf, batch in enumerate(batches)]
    rows = np.concatenate([*program.embed(leaves)])
    step = CoupledStep(program, STEP_ID, rows.reshape(-1), [microbatch_samples] * len(batches), 0)
    root = Subtree(0, len(batches))
    items = program.gradients(step.leaves(root, leaves))
    sums = {item.block: item.values for item in items if isinstance(item, BlockGradient)}
    assert step.unlike_microbatches(root, program.take_embeddings()) == ()
    loss = step.loss(root, float(SAMPLES))
    program.close()
    return task, loss, sums


@pytest.mark.parametrize("microbatch_samples", [1, 4, 32])
def test_loss_and_gradients_equal_those_of_torch_over_the_whole_step(microbatch_samples):
    task, loss, sums = compute_step(microbatch_samples)
    module = Towers()
    disable_dropout(module)
    arrays = {name: torch.tensor(values) for name, values in make_batch().arrays.items()}
    expected = losses(module, embed(module, arrays)).sum()
    expected.backward()
    assert loss.loss_sum == pytest.approx(expected.item(), rel=1e-6)
    parameters = dict(module.named_parameters())
    for number, block in enumerate(task.blocks):
        for tensor, part in block.slices():
            gradient = parameters[tensor.name].grad
            assert gradient is not None
            flat = gradient.numpy().reshape(-1)
            assert np.allclose(sums[number][part], flat, rtol=1e-5, atol=1e-6), tensor.name


def test_gradient_phase_repeats_the_draws_of_the_embedding_phase():
    task = make_trainable()
    program = compile_program(task, make_batch(0, 8))
    batches = [make_batch(lo, lo + 8) for lo in range(0, SAMPLES, 8)]
    rows = [*program.embed([(batch, 7 + leaf) for leaf, batch in enumerate(batches)])]
    (rows_of_other_seed,) = program.embed([(batches[0], 99)])
    assert rows[0].tobytes() != rows_of_other_seed.tobytes(), "the seed decides dropout"
    step = CoupledStep(program, STEP_ID, np.concatenate(rows).reshape(-1), [8] * 4, 0)
    for leaf in (2, 0):
        part = Subtree(leaf, leaf + 1)
        list(program.gradients(step.leaves(part, [(batches[leaf], 7 + leaf)])))
        assert step.unlike_microbatches(part, program.take_embeddings()) == ()
    list(program.gradients(step.leaves(Subtree(3, 4), [(batches[3], 99)])))
    assert step.unlike_microbatches(Subtree(3, 4), program.take_embeddings()) == (3,)
    program.close()


def test_stateful_loss_is_detected():
    calls: list[int] = []

    def multiply_by_calls(module, fields):
        calls.append(1)
        return losses(module, fields) * len(calls)

    for loss, is_stateful in ((losses, False), (multiply_by_calls, True)):
        program = compile_program(make_trainable(loss), make_batch(0, 8))
        rows = next(program.embed([(make_batch(), 1)])).reshape(-1)
        step = CoupledStep(program, STEP_ID, rows, [8] * 4, 0)
        with pytest.raises(DataError, match="second time") if is_stateful else nullcontext():
            step.check()
        program.close()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, f: losses(m, f).mean(), r"one loss for each of the 32 samples.*shape \(\)"),
        (lambda *_: 1.0, "got float"),
        (lambda m, f: losses(m, f).detach(), "depend on the embeddings"),
        (lambda _, f: f["absent"], "batch_loss raised KeyError"),
    ],
)
def test_loss_must_return_a_differentiable_value_for_each_sample(loss, message):
    program = compile_program(make_trainable(loss), make_batch(0, 8))
    (rows,) = program.embed([(make_batch(), 1)])
    with pytest.raises(DataError, match=message):
        program.step_loss(rows, 1)
    program.close()


def test_embeddings_that_mix_samples_are_refused():
    def mixed(module, arrays):
        fields = embed(module, arrays)
        return fields | {"query": fields["query"] - fields["query"].mean(dim=0)}

    task = make_trainable()
    task = Trainable(task.blocks, task.module, coupled=CoupledLoss(mixed, losses, LAYOUT))
    with pytest.raises(SamestepError, match=r"add|sum"):
        compile_program(task, make_batch(0, 8))


def test_splitting_joined_rows_restores_the_fields():
    fields = {
        "query": np.arange(8, dtype=np.float32).reshape(2, 4),
        "passage": -np.ones((2, 4), np.float32),
        "label": np.array([2**40, -1]),
    }
    rows = join_fields(LAYOUT, fields)
    assert rows.shape == (2, LAYOUT.sample_bytes)
    assert {n: v.tolist() for n, v in split_fields(LAYOUT, rows).items()} == {
        name: values.tolist() for name, values in fields.items()
    }
    assert are_finite(LAYOUT, rows.reshape(-1))
    fields["passage"][1, 2] = np.inf
    assert not are_finite(LAYOUT, join_fields(LAYOUT, fields).reshape(-1))
    for name, bad_field in (("label", fields["query"]), ("query", fields["query"][:1])):
        with pytest.raises(DataError, match="embed: expected"):
            join_fields(LAYOUT, {**fields, name: bad_field})
