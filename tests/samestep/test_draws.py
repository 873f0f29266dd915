"""Random draws while samples are read depend on the samples and the seed, not on earlier reads."""

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


class NoisyData:
    """A data set that adds `noise(number)` to each sample.

    Args:
        noise: Takes a sample's number.
        bits: A bit generator that `noise` draws from, as an attribute of the data set.
    """

    def __init__(self, noise: Any, bits: np.random.BitGenerator | None = None) -> None:
        self.noise, self.bits = noise, bits

    def __len__(self):
        return len(X)

    def __getitem__(self, number):
        return X[number] + self.noise(number), X[number]


def data_with_torch_noise():
    generator = torch.Generator()
    return NoisyData(lambda _: torch.rand(1, generator=generator))


def data_with_numpy_noise():
    generator = np.random.default_rng(0)
    return NoisyData(lambda _: float(generator.random()))


def data_with_random_state_noise():
    generator = np.random.RandomState(0)
    return NoisyData(lambda _: float(generator.rand()))


def data_with_bit_generator_noise():
    bits = np.random.PCG64(0)
    return NoisyData(lambda _: float(np.random.Generator(bits).random()), bits)


def data_with_python_noise():
    generator = random.Random(0)
    return NoisyData(lambda _: torch.tensor(generator.random(), dtype=torch.float32))


def data_with_global_noise():
    return NoisyData(lambda _: torch.rand(1) + draw_from_global_numpy() + random.random())


def draw_from_global_numpy():
    return float(np.random.rand())  # noqa: NPY002 -- what data sets use


def make_task(data, **overrides):
    return samestep.Task(module=nn.Linear(1, 1), train=data, loss=squares, **overrides)


DATA_FACTORIES = [
    data_with_torch_noise,
    data_with_numpy_noise,
    data_with_random_state_noise,
    data_with_bit_generator_noise,
    data_with_python_noise,
    data_with_global_noise,
]


@pytest.mark.parametrize("make_data", DATA_FACTORIES)
def test_batch_depends_only_on_samples_and_seed(make_data):
    def digest(script_task, samples, seed):
        return digest_arrays(dict(script_task.drawn_batch(samples, seed).arrays))

    fresh, used = (ScriptTask(make_task(make_data()), SPEC, {}) for _ in range(2))
    for number in range(5):
        used.drawn_batch([number, 3], 99 + number)
    assert digest(fresh, [2, 3], 7) == digest(used, [2, 3], 7)
    assert digest(fresh, [2, 3], 7) == digest(fresh, [2, 3], 7)
    assert digest(fresh, [2, 3], 7) != digest(fresh, [2, 3], 8)
    noise = fresh.drawn_batch([2, 3], 7).arrays["0"] - X[2:4].numpy()
    assert noise[0] != noise[1]


def test_two_generators_of_a_data_set_get_different_streams():
    first, second = np.random.default_rng(0), np.random.default_rng(0)
    data = NoisyData(lambda _: first.random() - second.random())
    batch = ScriptTask(make_task(data), SPEC, {}).drawn_batch([0, 1], 5)
    assert np.abs(batch.arrays["0"] - X[:2].numpy()).min() > 1e-4


def test_collator_with_a_generator_is_accepted():
    generator = np.random.default_rng(0)

    def collate(items):
        x, y = default_collate(items)
        return [x + torch.from_numpy(generator.normal(size=x.shape)).float(), y]

    script_task = ScriptTask(make_task(NoisyData(lambda _: 0.0), collate=collate), SPEC, {})
    assert script_task.manifest.train_samples == len(X)


class CachingData(NoisyData):
    """A data set that draws noise at the first read of a sample and caches the sum.

    Samples before `first_noisy` have no noise.
    """

    def __init__(self, first_noisy: int = 0) -> None:
        super().__init__(None)
        self.cache: dict[int, Any] = {}
        self.first_noisy = first_noisy

    def __getitem__(self, number):
        if number < self.first_noisy:
            return X[number], X[number]
        if number not in self.cache:
            self.cache[number] = X[number] + torch.rand(1)
        return self.cache[number], X[number]


@pytest.mark.parametrize(("first_noisy", "samples"), [(0, "0, 1"), (5, "5")])
def test_cached_draws_are_refused(first_noisy, samples):
    with pytest.raises(
        DataError, match=f"keeps its draws from the first read of samples {samples}"
    ):
        ScriptTask(make_task(CachingData(first_noisy)), SPEC, {})


def test_unrepeatable_draws_are_refused():
    data = NoisyData(lambda number: float(number > 4 and np.random.default_rng().random()))
    with pytest.raises(DataError, match="the same batch from samples 5 at each read"):
        ScriptTask(make_task(data), SPEC, {})


def test_build_draws_from_seeded_generators(tmp_path):
    def build():
        noise = draw_from_global_numpy() + random.random()
        return make_task([(x + noise, x) for x in X])

    digests = [
        samestep.fit(build, steps=1, batch=8, device="cpu", directory=tmp_path / str(n)).digest
        for n in range(2)
    ]
    assert digests[0] == digests[1]
