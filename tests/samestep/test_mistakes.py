"""Mistakes in a script: one line each, which says what to write instead, before anything starts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import samestep

X = torch.linspace(-1, 1, 8)[:, None]
DATA = TensorDataset(X, 2 * X)


class Endless(IterableDataset[list[torch.Tensor]]):
    def __iter__(self):
        return itertools.cycle([[X[0], X[0]]])


def squares(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()


def task(**other):
    return lambda: samestep.Task(
        **{"module": nn.Linear(1, 1), "train": DATA, "loss": squares, **other}
    )


def loss_of(value):
    return task(loss=lambda module, batch: value(module(batch[0]) - batch[1]))


def contrastive(module, batch):
    y = module(batch[0])
    return -torch.log_softmax(y @ y.T, 1).diagonal().sum()


def stateful():
    generator = torch.Generator()

    def collate(items):
        x = torch.stack([item[0] for item in items])
        return [x + torch.rand(x.shape, generator=generator), x]

    return collate


def unfinished():
    raise KeyError("weights")


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.requires_grad_(False)


BATCH_NORM = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
ACROSS = nn.Sequential(
    nn.Linear(1, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 1)
)
SGD = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)


@pytest.mark.parametrize(
    ("build", "arguments", "told"),
    [
        (loss_of(lambda e: (e**2).mean()), {}, r'a mean .* write reduction="sum" or \.sum\(\)'),
        (loss_of(lambda e: e**2), {}, r"one sum, got shape \(2, 1\): add \.sum\(\)"),
        (loss_of(lambda e: e.sum().item()), {}, r"got float: leave out \.item\(\)"),
        (loss_of(lambda e: e.detach().sum()), {}, r"no trainable tensor: leave out detach\(\)"),
        (task(loss=contrastive), {}, "a loss across samples"),
        (task(loss=None), {}, "got none: write loss=lambda module, batch"),
        (task(module=BATCH_NORM), {}, "running statistics.*use LayerNorm or GroupNorm"),
        (task(module=ACROSS), {}, "one sample alone raised.*is there a layer across the batch"),
        (task(module=nn.Linear(1, 1, device="meta")), {}, r"on the CPU.*leave out \.to"),
        (task(module=nn.Linear(1, 1).bfloat16()), {}, r"float32.*write module\.float\(\)"),
        (task(module=Frozen()), {}, "no trainable tensor: leave some"),
        (task(module=nn.DataParallel(nn.Linear(1, 1))), {}, r"give module\.module"),
        (task(train=Endless()), {}, "a length.*read it into a list"),
        (task(train=DataLoader(DATA)), {}, "got a DataLoader: give its dataset"),
        (task(train=(X, X)), {}, r"write torch\.utils\.data\.TensorDataset\(x, y\)"),
        (task(train=[]), {}, "expected samples as train, got an empty list"),
        (task(collate=stateful()), {}, "another batch for the same samples.*parameter seed"),
        (task(collate=lambda _: {"text": "a"}), {}, "'text' of type str: leave it out"),
        (lambda: nn.Linear(1, 1), {}, r"got Linear: write return samestep\.Task"),
        (task()(), {}, r"got UserTask: write def build\(\)"),
        (unfinished, {}, "build raised KeyError: 'weights'"),
        (task(), {"optimizer": SGD}, r'write optimizer={"name": "sgd", "lr": 0.5}'),
        (task(), {"options": {"model": nn.Linear(1, 1)}}, "make models and tensors inside build"),
        (task(), {"epochs": 1}, "expected either steps= or epochs="),
        (task(), {"batch": 64}, "at least a microbatch.*lower batch= or microbatch="),
        (task(), {"microbatch": 64}, "microbatch <= samples, got 64 > 4"),
        (task(), {"settings": {"seed": 1}}, "'seed': fit has that as an argument"),
        (task(), {"settings": {"checkpont": {}}}, "did you mean 'checkpoint'"),
        (lambda: samestep.fit(task(), steps=1), {}, "one inside of another: call them in turn"),
    ],
)  # fmt: skip
def test_is_told_in_one_line_what_to_write(build, arguments, told):
    given = {"steps": 1, "batch": 4, "microbatch": 2, **arguments}
    if "batch" in arguments:
        del given["microbatch"]
        given["batch"] = 128
    with pytest.raises(samestep.SamestepError, match=told) as raised:
        samestep.fit(build, **given)
    assert "\n" not in str(raised.value)


def test_a_model_across_devices_or_a_broken_sample_names_its_place():
    broken = [X[0], X[1, :0]]
    with pytest.raises(samestep.SamestepError, match="samples 0, 1 make no batch"):
        samestep.fit(task(train=broken), steps=1, batch=4, microbatch=1)
