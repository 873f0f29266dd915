"""Random draws while samples are read: the same for every reader, whatever was read before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import samestep
from protocol.base.errors import DataError
from protocol.exact.digest import digest_arrays
from tests.samestep.specs import SPEC
from worker.scripts.script_task import ScriptTask

X = torch.linspace(-1, 1, 12)[:, None]


def squares(module, batch):
    return (module(batch[0]) ** 2).sum()


class Noisy:
    """A data set whose samples get noise from `noise`."""

    def __init__(self, noise: Any, state: object = None) -> None:
        self.noise, self.held = noise, state

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        return X[number] + self.noise(number), X[number]


def of_torch():
    generator = torch.Generator()
    return Noisy(lambda _: torch.rand(1, generator=generator))


def of_numpy():
    generator = np.random.default_rng(0)
    return Noisy(lambda _: float(generator.random()))


def of_older_numpy():
    generator = np.random.RandomState(0)
    return Noisy(lambda _: float(generator.rand()))


def of_a_bit_generator():
    bits = np.random.PCG64(0)
    return Noisy(lambda _: float(np.random.Generator(bits).random()), bits)


def of_python():
    generator = random.Random(0)
    return Noisy(lambda _: torch.tensor(generator.random(), dtype=torch.float32))


def of_the_global_ones():
    return Noisy(lambda _: torch.rand(1) + of_numpy_globally() + random.random())


def of_numpy_globally():
    return float(np.random.rand())  # noqa: NPY002 -- what data sets use


def task(data, **overrides):
    return samestep.Task(module=nn.Linear(1, 1), train=data, loss=squares, **overrides)


KINDS = [of_torch, of_numpy, of_older_numpy, of_a_bit_generator, of_python, of_the_global_ones]


@pytest.mark.parametrize("make_data", KINDS)
def test_batch_depends_only_on_samples_and_seed(make_data):
    def digest(of, samples, seed):
        return digest_arrays(dict(of.drawn_batch(samples, seed).arrays))

    one, other = (ScriptTask(task(make_data()), SPEC, {}) for _ in range(2))
    for number in range(5):
        other.drawn_batch([number, 3], 99 + number)
    assert digest(one, [2, 3], 7) == digest(other, [2, 3], 7)
    assert digest(one, [2, 3], 7) == digest(one, [2, 3], 7)
    assert digest(one, [2, 3], 7) != digest(one, [2, 3], 8)
    values = one.drawn_batch([2, 3], 7).arrays["0"] - X[2:4].numpy()
    assert values[0] != values[1]


def test_two_generators_of_a_data_set_have_streams_of_their_own():
    one, other = np.random.default_rng(0), np.random.default_rng(0)
    data = Noisy(lambda _: one.random() - other.random())
    batch = ScriptTask(task(data), SPEC, {}).drawn_batch([0, 1], 5)
    assert np.abs(batch.arrays["0"] - X[:2].numpy()).min() > 1e-4


def test_a_collator_with_a_generator_trains():
    generator = np.random.default_rng(0)

    def collate(items):
        x, y = default_collate(items)
        return [x + torch.from_numpy(generator.normal(size=x.shape)).float(), y]

    script_task = ScriptTask(task(Noisy(lambda _: 0.0), collate=collate), SPEC, {})
    assert script_task.manifest.train_samples == len(X)


class Cached(Noisy):
    """Draws once for each sample, when it is first read."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(None)
        self.known: dict[int, Any] = {}
        self.first = first

    def __getitem__(self, number):
        if number < self.first:
            return X[number], X[number]
        if number not in self.known:
            self.known[number] = X[number] + torch.rand(1)
        return self.known[number], X[number]


@pytest.mark.parametrize(("first", "samples"), [(0, "0, 1"), (5, "5")])
def test_cached_draws_are_refused(first, samples):
    with pytest.raises(
        DataError, match=f"keeps its draws from the first read of samples {samples}"
    ):
        ScriptTask(task(Cached(first)), SPEC, {})


def test_unrepeatable_draws_are_refused():
    data = Noisy(lambda number: float(number > 4 and np.random.default_rng().random()))
    with pytest.raises(DataError, match="the same batch from samples 5 at each read"):
        ScriptTask(task(data), SPEC, {})


def test_build_draws_from_seeded_generators(tmp_path):
    def build():
        noise = of_numpy_globally() + random.random()
        return task([(x + noise, x) for x in X])

    digests = [
        samestep.fit(build, steps=1, batch=8, device="cpu", directory=tmp_path / str(n)).digest
        for n in range(2)
    ]
    assert digests[0] == digests[1]
