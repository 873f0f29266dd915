"""State that a script keeps between calls is refused by its name; a cache is not."""

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
COUNTED = 0
HELD = {"n": 0}


def squares(module, batch):
    return ((module(batch[0])[:, 0] - batch[1]) ** 2).sum()


class Calls(nn.Module):
    """Calls a function in every forward, whose result does not show yet."""

    shared = 0

    def __init__(self, does, **state):
        super().__init__()
        self.line, self.does = nn.Linear(3, 1), does
        for name, each in state.items():
            setattr(self, name, each)

    def forward(self, x):
        self.does(self)
        return self.line(x)


def task(**other):
    return samestep.Task(**{"module": nn.Linear(3, 1), "train": DATA, "loss": squares, **other})


def model(act, **state):
    return task(module=Calls(act, **state))


def counts(self):
    self.n += 1


def counts_in_a_list(self):
    self.h[0] += 1


def normed():
    line = nn.Linear(3, 3)
    with torch.no_grad():
        line.weight.copy_(torch.tensor([1.0, 0.7, 0.7]).diag())  # a norm that does not show yet
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(line), nn.Linear(3, 1))


def counts_in_its_class(_):
    Calls.shared += 1


def counts_in_a_global(_):
    global COUNTED  # noqa: PLW0603 -- what is to be found
    COUNTED += 1


def counts_in_a_global_dict(_):
    HELD["n"] += 1


def takes_from_a_bag(self):
    self.bag.pop()


def counts_on_itself(module, batch):
    vars(counts_on_itself)["calls"] += 1
    return squares(module, batch)


vars(counts_on_itself)["calls"] = 0


def counts_in_a_closure():
    calls = [0]

    def loss(module, batch):
        calls[0] += 1
        return squares(module, batch)

    return loss


def passes_on(counter, module, batch):
    next(counter)
    return squares(module, batch)


def endless():
    number = 0
    while True:
        yield number
        number += 1


class Counting:
    """A data set with a counter that takes effect late."""

    def __init__(self):
        self.n = 0

    def __len__(self):
        return 8

    def __getitem__(self, number):
        self.n += 1
        return X[number] + max(0, self.n - 1000), X[number].sum()


def weight_that_draws():
    generator = np.random.default_rng(0)

    def weight(batch):
        generator.random()
        return len(batch[0])

    return weight


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: model(counts, n=0), r"got module\.n, which goes from \d+ to \d+ on"),
        (lambda: model(counts, n=0.5), r"got module\.n,"),
        (lambda: model(counts_in_a_list, h=[0]), r"got module\.h\[0\],"),
        (lambda: model(lambda m: m.buffer.add_(1), buffer=torch.zeros(2)), r"got module\.buffer,"),
        (lambda: model(lambda m: np.add(m.big, 1, out=m.big), big=np.zeros((999, 99))),
         r"got module\.big, which goes from ndarray of \(999, 99\)"),
        (lambda: model(lambda m: m.r.random(), r=random.Random(0)), r"module\.r,.*from Random at"),
        (lambda: model(lambda m: m.r.random(), r=np.random.default_rng(0)), r"got module\.r,"),
        (lambda: model(lambda m: m.r.rand(), r=np.random.RandomState(0)), r"got module\.r,"),
        (lambda: model(lambda m: torch.rand(1, generator=m.r), r=torch.Generator()), r"module\.r,"),
        (lambda: model(lambda m: m.next(), next=itertools.count().__next__), r"module\.next,"),
        (lambda: model(lambda m: next(m.i), i=itertools.cycle([1, 2, 3])), r"module\.i "),
        (lambda: model(lambda m: next(m.i), i=iter(range(99))), r"module\.i "),
        (lambda: model(lambda m: next(m.i), i=endless()), r"module\.i\.number,"),
        (lambda: model(lambda m: counts(m.o), o=SimpleNamespace(n=0)), r"module\.o\.n,"),
        (lambda: model(lambda m: m.q.rotate(), q=deque([1, 2, 3])), r"module\.q\[0\],"),
        (lambda: model(takes_from_a_bag, bag=[X] * 9), r"len\(module\.bag\),.*from \d to \d "),
        (lambda: task(module=normed()),
         r"got module\.0\.parametrizations\.weight\.0\._u, .*: take a layer without running state"),
        (lambda: model(counts_in_its_class), r"got Calls\.shared,"),
        (lambda: model(counts_in_a_global), r"got the global COUNTED,"),
        (lambda: model(counts_in_a_global_dict), r"got the global HELD\['n'\],"),
        (lambda: task(loss=counts_on_itself), r"got (loss|the global counts_on_itself)\.calls,"),
        (lambda: task(loss=counts_in_a_closure()), r"got loss\.calls\[0\],"),
        (lambda: task(loss=functools.partial(passes_on, itertools.count())), r"got loss\[0\],"),
        (lambda: task(train=Counting()), r"got train\.n,"),
        (lambda: task(weight=weight_that_draws()), r"got weight\.generator,"),
    ],
    ids=map(str, itertools.count()),
)  # fmt: skip
def test_counter_or_generator_is_refused_by_its_name(build, message):
    with pytest.raises(DataError, match=message) as error:
        ScriptTask(build(), SPEC, {})
    assert "\n" not in str(error.value)


@functools.lru_cache
def decoded(number):
    return X[number], X[number].sum()


class Remembering:
    """A data set that keeps decoded samples, and the last few."""

    def __init__(self):
        self.decoded, self.names, self.last = {}, [], None

    def __len__(self):
        return 8

    def __getitem__(self, number):
        self.names.append(f"sample {number}")
        while len(self.decoded) >= 2:
            self.decoded.pop(next(iter(self.decoded)))
        self.last = self.decoded.setdefault(number, decoded(number))
        return self.last


class Remembers(nn.Module):
    """Makes a mask in its first call, and keeps its last input."""

    def __init__(self):
        super().__init__()
        self.line, self.drop = nn.Linear(3, 1), nn.Dropout(0.5)
        self.mask, self.length, self.losses = torch.ones(0, 3), 0, []

    def forward(self, x):
        if self.length < len(x):
            self.length, self.mask = len(x), torch.ones(len(x), 3)
        self.losses.append(float(x.sum()))
        self.seen = self.drop(self.line(x * self.mask[: len(x)]))
        return self.seen


class Seeded:
    """A generator of its own that is seeded for each microbatch."""

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
        lambda: task(train=Remembering()),
        lambda: task(module=Remembers()),
        lambda: task(module=nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))),
        lambda: task(collate=Seeded()),
        bert,
        llama,
    ],
    ids=map(str, itertools.count()),
)
def test_caches_and_seeded_generators_pass(build):
    assert ScriptTask(build(), SPEC, {}).manifest.train_samples == 8
