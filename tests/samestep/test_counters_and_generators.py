"""Counters and generators that change with each call are refused by name; caches are accepted."""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from protocol.base.errors import DataError
from protocol.spec.run_spec import parse_run_spec
from worker.scripts.script_task import ScriptTask

X = torch.linspace(-1, 1, 24).reshape(8, 3)
DATA = TensorDataset(X, X.sum(1))
SPEC = parse_run_spec({
    "task": "samestep.script:FitTask", "steps": 1, "batch": {"samples": 4, "microbatch": 2},
    "optimizer": {"name": "sgd", "lr": 0.1},
})  # fmt: skip
CALL_COUNT = 0
CALLS = {"n": 0}


def squared_error(module, batch):
    return ((module(batch[0])[:, 0] - batch[1]) ** 2).sum()


class CallingModel(nn.Module):
    """A model whose forward calls `function(self)`, which changes state but not the output."""

    shared = 0

    def __init__(self, function, **state):
        super().__init__()
        self.line, self.function = nn.Linear(3, 1), function
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x):
        self.function(self)
        return self.line(x)


def build_task(**changes):
    return samestep.Task(
        **{"module": nn.Linear(3, 1), "train": DATA, "loss": squared_error, **changes}
    )


def calling_task(function, **state):
    return build_task(module=CallingModel(function, **state))


def increment(self):
    self.n += 1


def increment_list_item(self):
    self.h[0] += 1


def spectral_norm_model():
    line = nn.Linear(3, 3)
    with torch.no_grad():
        line.weight.copy_(torch.tensor([1.0, 0.7, 0.7]).diag())  # norm 1: only _u changes
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(line), nn.Linear(3, 1))


def increment_class_attribute(_):
    CallingModel.shared += 1


def increment_global(_):
    global CALL_COUNT  # noqa: PLW0603 -- the state that the check must find
    CALL_COUNT += 1


def increment_global_dict(_):
    CALLS["n"] += 1


def pop_from_list(self):
    self.bag.pop()


def counting_loss(module, batch):
    vars(counting_loss)["calls"] += 1
    return squared_error(module, batch)


vars(counting_loss)["calls"] = 0


def loss_with_closure():
    calls = [0]

    def loss(module, batch):
        calls[0] += 1
        return squared_error(module, batch)

    return loss


def loss_with_iterator(counter, module, batch):
    next(counter)
    return squared_error(module, batch)


def count_forever():
    number = 0
    while True:
        yield number
        number += 1


class CountingData:
    """A data set with a counter that changes samples only after many reads."""

    def __init__(self):
        self.n = 0

    def __len__(self):
        return 8

    def __getitem__(self, number):
        self.n += 1
        return X[number] + max(0, self.n - 1000), X[number].sum()


def random_weight():
    generator = np.random.default_rng(0)

    def weight(batch):
        generator.random()
        return len(batch[0])

    return weight


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: calling_task(increment, n=0), r"got module\.n, which goes from \d+ to \d+ on"),
        (lambda: calling_task(increment, n=0.5), r"got module\.n,"),
        (lambda: calling_task(increment_list_item, h=[0]), r"got module\.h\[0\],"),
        (lambda: calling_task(lambda m: m.buffer.add_(1), buffer=torch.zeros(2)),
         r"got module\.buffer,"),
        (lambda: calling_task(lambda m: np.add(m.big, 1, out=m.big), big=np.zeros((999, 99))),
         r"got module\.big, which goes from ndarray of \(999, 99\)"),
        (lambda: calling_task(lambda m: m.r.random(), r=random.Random(0)),
         r"module\.r,.*from Random at"),
        (lambda: calling_task(lambda m: m.r.random(), r=np.random.default_rng(0)),
         r"got module\.r,"),
        (lambda: calling_task(lambda m: m.r.rand(), r=np.random.RandomState(0)), r"got module\.r,"),
        (lambda: calling_task(lambda m: torch.rand(1, generator=m.r), r=torch.Generator()),
         r"module\.r,"),
        (lambda: calling_task(lambda m: m.next(), next=itertools.count().__next__),
         r"module\.next,"),
        (lambda: calling_task(lambda m: next(m.i), i=itertools.cycle([1, 2, 3])), r"module\.i "),
        (lambda: calling_task(lambda m: next(m.i), i=iter(range(99))), r"module\.i "),
        (lambda: calling_task(lambda m: next(m.i), i=count_forever()), r"module\.i\.number,"),
        (lambda: calling_task(lambda m: increment(m.o), o=SimpleNamespace(n=0)), r"module\.o\.n,"),
        (lambda: calling_task(lambda m: m.q.rotate(), q=deque([1, 2, 3])), r"module\.q\[0\],"),
        (lambda: calling_task(pop_from_list, bag=[X] * 9), r"len\(module\.bag\),.*from \d to \d "),
        (lambda: build_task(module=spectral_norm_model()),
         r"got module\.0\.parametrizations\.weight\.0\._u, .*: take a layer without running state"),
        (lambda: calling_task(increment_class_attribute), r"got CallingModel\.shared,"),
        (lambda: calling_task(increment_global), r"got the global CALL_COUNT,"),
        (lambda: calling_task(increment_global_dict), r"got the global CALLS\['n'\],"),
        (lambda: build_task(loss=counting_loss), r"got (loss|the global counting_loss)\.calls,"),
        (lambda: build_task(loss=loss_with_closure()), r"got loss\.calls\[0\],"),
        (lambda: build_task(loss=functools.partial(loss_with_iterator, itertools.count())),
         r"got loss\[0\],"),
        (lambda: build_task(train=CountingData()), r"got train\.n,"),
        (lambda: build_task(weight=random_weight()), r"got weight\.generator,"),
    ],
    ids=map(str, itertools.count()),
)  # fmt: skip
def test_counter_or_generator_is_refused_by_name(build, message):
    with pytest.raises(DataError, match=message) as error:
        ScriptTask(build(), SPEC, {})
    assert "\n" not in str(error.value)


@functools.lru_cache
def decode(number):
    return X[number], X[number].sum()


class CachingData:
    """A data set that caches the last two decoded samples, and lists all reads."""

    def __init__(self):
        self.decoded, self.names, self.last = {}, [], None

    def __len__(self):
        return 8

    def __getitem__(self, number):
        self.names.append(f"sample {number}")
        while len(self.decoded) >= 2:
            self.decoded.pop(next(iter(self.decoded)))
        self.last = self.decoded.setdefault(number, decode(number))
        return self.last


class CachingModel(nn.Module):
    """A model that caches a mask, lists the sums of its inputs, and stores its last output."""

    def __init__(self):
        super().__init__()
        self.line, self.drop = nn.Linear(3, 1), nn.Dropout(0.5)
        self.mask, self.length, self.input_sums = torch.ones(0, 3), 0, []

    def forward(self, x):
        if self.length < len(x):
            self.length, self.mask = len(x), torch.ones(len(x), 3)
        self.input_sums.append(float(x.sum()))
        self.seen = self.drop(self.line(x * self.mask[: len(x)]))
        return self.seen


class SeededCollate:
    """A collate function with a generator that is seeded for each microbatch."""

    def __init__(self):
        self.generator = torch.Generator()

    def __call__(self, items, seed):
        self.generator.manual_seed(seed)
        x, y = torch.utils.data.default_collate(items)
        return [x + torch.rand(x.shape, generator=self.generator), y]


def bert():
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8,
    )  # fmt: skip
    items = [{"input_ids": torch.arange(4) + n, "labels": torch.tensor(n % 2)} for n in range(8)]
    return samestep.Task(
        module=transformers.BertForSequenceClassification(config),
        train=items,
        loss=lambda m, b: m(**b).loss * len(b["labels"]),
    )


def llama():
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8,
    )  # fmt: skip
    items = [{"input_ids": torch.arange(4) + n, "labels": torch.arange(4) + n} for n in range(8)]
    return samestep.Task(
        module=transformers.LlamaForCausalLM(config),
        train=items,
        loss=lambda m, b: m(**b).loss * len(b["labels"]),
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_task(train=CachingData()),
        lambda: build_task(module=CachingModel()),
        lambda: build_task(module=nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))),
        lambda: build_task(collate=SeededCollate()),
        bert,
        llama,
    ],
    ids=map(str, itertools.count()),
)
def test_caches_and_generators_seeded_for_each_microbatch_are_accepted(build):
    assert ScriptTask(build(), SPEC, {}).manifest.train_samples == 8
