"""Random numbers in a model follow from the microbatch's seed, or are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from backends.base.interface import Batch
from backends.wgpu.capture.capture import capture_step
from backends.wgpu.capture.draws import Draws
from backends.wgpu.device.packing import seed_words
from backends.wgpu.graph import threefry
from protocol.base.errors import SamestepError
from tests.backends.wgpu.on_device import Function, on_device
from tests.backends.wgpu.small_models import gradients, trainable

SHAPE = (64, 32, 8)
"""Samples, channels and elements of the tensors that draws fill."""


def host_uniform(site: int, count: int) -> np.ndarray[Any, Any]:
    """Return the uniform numbers of seed 0 as the host computes them."""
    key = seed_words(0, 1)[0]
    bits = threefry.words((int(key[0]), int(key[1])), site, count) >> 8
    return bits.astype(np.float32) / np.float32(2**24)


def test_uniform_numbers_equal_those_of_the_host(device):
    (actual,) = on_device(device, lambda x: torch.rand(3, 5) + x, (torch.zeros(3, 5),))
    assert actual.numpy().tobytes() == host_uniform(0, 15).reshape(3, 5).tobytes()


def dropout_in_place(x: torch.Tensor) -> torch.Tensor:
    """Apply dropout in place, and return the original tensor."""
    functional.dropout(x, 0.2, inplace=True)
    return x


# Function, mean and standard deviation, for a tensor of ones.
DISTRIBUTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float]] = {
    "rand": (lambda x: torch.rand(x.shape), 0.5, 12**-0.5),
    "rand_like": (torch.rand_like, 0.5, 12**-0.5),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
    "randn": (lambda x: torch.randn(*x.shape), 0.0, 1.0),
    "normal_": (lambda x: x.clone().normal_(2, 0.5), 2.0, 0.5),
    "normal": (lambda x: torch.normal(x, 3.0), 1.0, 3.0),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.25), 0.25, 0.433),
    "bernoulli_": (lambda x: x.new_empty(x.shape).bernoulli_(0.9), 0.9, 0.3),
    "randint": (lambda x: torch.randint(2, 6, x.shape).float(), 3.5, 1.118),
    "dropout": (lambda x: functional.dropout(x, 0.2), 1.0, 0.5),
    "dropout in place": (lambda x: dropout_in_place(x * 1), 1.0, 0.5),
    "dropout1d": (lambda x: functional.dropout1d(x, 0.2), 1.0, 0.5),
    "dropout2d": (lambda x: functional.dropout2d(x[..., None], 0.2)[..., 0], 1.0, 0.5),
    "alpha_dropout": (lambda x: functional.alpha_dropout(x - 1, 0.5, training=True), 0.0, 0.78),
    "feature_alpha_dropout": (
        lambda x: functional.feature_alpha_dropout(x - 1, 0.5, training=True), 0.0, 0.78,
    ),
    "rrelu": (lambda x: functional.rrelu(-x, 0.2, 0.4, training=True), -0.3, 0.2 * 12**-0.5),
}  # fmt: skip


def test_distributions_have_expected_mean_and_deviation(device):
    """Means within five standard errors of 64 x 32 draws: some functions draw once per channel."""

    def sample_all(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(sample(x) for sample, _, _ in DISTRIBUTIONS.values())

    samples = on_device(device, sample_all, (torch.ones(SHAPE),))
    for (name, (_, mean, deviation)), actual in zip(DISTRIBUTIONS.items(), samples, strict=True):
        allowed = 5 * deviation / (64 * 32) ** 0.5
        assert abs(float(actual.mean()) - mean) < allowed, name
        assert float(actual.std()) == pytest.approx(deviation, rel=0.1), name
    by_channel = samples[list(DISTRIBUTIONS).index("dropout1d")]
    assert torch.equal(by_channel, by_channel[..., :1].expand(SHAPE))


class Composites(nn.Module):
    """Composite modules and functions of torch that draw random numbers internally."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.gumbel = nn.Linear(8, 8)
        self.recurrent = nn.RNN(8, 8, 2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [
            (self.encoder(x) * x).sum(),
            (functional.gumbel_softmax(self.gumbel(x)) * x).sum(),
            (self.recurrent(x[:, :2])[0] * x[:, :2]).sum(),
        ]


def sum_loss(module: nn.Module, arrays: Any) -> torch.Tensor:
    return torch.stack(module(arrays["x"])).sum()


def test_draws_of_a_microbatch_follow_from_its_seed(device):
    from backends.wgpu.device.matmul_tuning import MatmulTuner
    from backends.wgpu.lowering.lowering import KernelOptions
    from backends.wgpu.program import CompiledProgram

    module = Composites()
    job = trainable(module, sum_loss)
    x = np.random.default_rng(0).standard_normal((4, 8, 8)).astype(np.float32)
    batch = Batch({"x": x}, 4.0)
    kernel_options = KernelOptions(cooperative=False, matmul=MatmulTuner(device).shader)
    program = CompiledProgram(device, job, kernel_options, adds_on_device=True)
    first, other, repeat = (gradients(program, batch, seed) for seed in (1, 2, 1))
    program.close()
    for number, block in enumerate(job.blocks):
        assert first[number].tobytes() == repeat[number].tobytes()
        for tensor, elements in block.slices():
            if tensor.name.endswith("weight"):
                assert (first[number][elements] != other[number][elements]).any(), tensor.name


@pytest.mark.parametrize("layer_class", [nn.LSTM, nn.GRU, nn.RNN])
def test_rewritten_recurrent_layers_equal_torch_and_have_dropout(layer_class):
    class IdentityDropout(Draws):
        """Counts calls of dropout, and leaves all values unchanged."""

        def dropout(self, x, p=0.5, *_):
            self.sites += p == 0.5
            return x

    torch.manual_seed(0)
    module = layer_class(8, 4, 3, dropout=0.5, batch_first=True, bidirectional=True)
    x = torch.ones(2, 5, 8)
    draws = IdentityDropout(torch.zeros(2, dtype=torch.int32))

    class ReplaceDraws(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return (draws.replacement(func) or func)(*args, **(kwargs or {}))

    expected_output, *expected_states = module.eval()(x)
    module.train()
    with ReplaceDraws():
        output, *states = module(x)
    torch.testing.assert_close(output, expected_output)
    for state, expected_state in zip(states, expected_states, strict=True):
        torch.testing.assert_close(state, expected_state)
    assert draws.sites == 2, "dropout between three layers"


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "randperm": (lambda x: x[torch.randperm(4)], "got a draw 'randperm'"),
    "multinomial": (lambda x: x[torch.multinomial(x.abs(), 1)[:, 0]], "got a draw 'multinomial'"),
    "poisson": (lambda x: x * torch.poisson(x.detach()), "got a draw 'poisson'"),
    "numpy": (lambda x: x * float(np.random.uniform()), "got a draw from numpy.random"),  # noqa: NPY002
    "python": (lambda x: x * random.random(), "got a draw from Python's random"),
    "generator": (
        lambda x: x * torch.rand(4, generator=torch.Generator()), "without generator=",
    ),
    "checkpoint": (
        lambda x: torch.utils.checkpoint.checkpoint(functional.dropout, x * x, use_reentrant=False),
        "model.gradient_checkpointing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_draws_that_ignore_the_seed_are_refused(name):
    function, reason = REFUSED[name]

    def loss(module: nn.Module, arrays: Any) -> torch.Tensor:
        return (function(module(arrays["x"])) ** 2).sum()

    with pytest.raises(SamestepError, match=reason):
        capture_step(nn.Linear(4, 4), loss, ["weight"], {"x": torch.ones(4, 4)})


def test_a_capture_without_draws_has_one_seed():
    capture = capture_step(
        Function(lambda x: functional.relu(x).sum()), lambda m, a: m(a["x"]), [],
        {"x": torch.ones(2)},
    )  # fmt: skip
    assert capture.seeds == 1
