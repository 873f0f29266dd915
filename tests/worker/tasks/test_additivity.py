"""An additive loss is accepted; any other loss is refused, with its reason."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import samestep
from backends.base.interface import Batch, Trainable
from protocol.base.errors import DataError
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import parse_run_spec
from worker.models.blocks import cut_into_blocks
from worker.scripts.script_task import ScriptTask
from worker.tasks.base.evaluation_modes import keep_evaluation_modes
from worker.tasks.checks.additivity import sum_trial_of

SPEC = parse_run_spec({
    "task": "samestep.script:FitTask", "steps": 1, "batch": {"samples": 8, "microbatch": 2},
    "optimizer": {"name": "sgd", "lr": 0.1},
})  # fmt: skip
DRAWS = torch.Generator().manual_seed(3)
X = torch.randn(48, 6, generator=DRAWS)
Y = X[:, :1] - X[:, 1:2].tanh()
CLASSES = (X[:, 0] > 1).long()  # one in six
TOKENS = torch.randint(0, 11, (48, 5), generator=DRAWS)
IGNORED = TOKENS.masked_fill(torch.arange(48)[:, None] < 6, -100)


def net(*extra_layers, outputs=1):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra_layers, nn.Linear(8, outputs))


def squares(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()


def task_of(module, loss, *tensors, **overrides):
    tensors = tensors or (X, Y)
    torch.manual_seed(0)
    return samestep.Task(module=module(), train=TensorDataset(*tensors), loss=loss, **overrides)


# Typical training losses.


def diffusion(module, batch):
    x = batch[0]
    t = torch.randint(0, 1000, (len(x),))
    signal_share = (torch.cos(t / 1000 * 1.5) ** 2)[:, None].to(x)
    noise = torch.randn_like(x)
    return (
        (module(signal_share.sqrt() * x + (1 - signal_share).sqrt() * noise) - noise) ** 2
    ).sum()


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inwards, self.outwards = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mean, log_variance = self.inwards(x).chunk(2, 1)
        latent = torch.distributions.Normal(mean, (log_variance / 2).exp()).rsample()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return ((self.outwards(latent) - x) ** 2).sum() + divergence


def masked_loss(module, batch):
    hidden = torch.rand(batch[0].shape) < 0.15
    return (((module(batch[0].masked_fill(hidden, 0.0)) - batch[0]) ** 2) * hidden).sum()


def shuffled_mask_loss(module, batch):
    order = torch.rand(batch[0].shape).argsort(1)
    visible_mask = torch.zeros_like(batch[0]).scatter(1, order[:, :3], 1.0)
    return (((module(batch[0] * visible_mask) - batch[0]) ** 2) * (1 - visible_mask)).sum()


def equation_residual(module, batch):
    x = batch[0].requires_grad_()
    u = module(x)
    slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    return ((slope.sum(1, keepdim=True) + u - batch[1]) ** 2).sum()


def gradient_penalty(module, batch):
    real, noise_image = batch[0], torch.randn_like(batch[0])
    mixed = (real + torch.rand(len(real), 1) * (noise_image - real)).detach().requires_grad_(True)
    slope = torch.autograd.grad(module(mixed).sum(), mixed, create_graph=True)[0]
    return (module(noise_image) - module(real)).sum() + 10 * ((slope.norm(dim=1) - 1) ** 2).sum()


def loss_by_sample(module, batch):
    total = 0.0
    for x, y in zip(*batch, strict=True):
        total = total + ((module(x + 0.1 * torch.randn(6)) - y) ** 2).sum()
    return total


def numpy_noise_loss(module, batch):
    noise = torch.from_numpy(np.random.standard_normal(batch[0].shape)).to(batch[0])  # noqa: NPY002
    return squares(module, [batch[0] + noise, batch[1]])


def python_noise_loss(module, batch):
    return squares(module, [batch[0] * (1 + random.random()), batch[1]])


def rejection_sampling_loss(module, batch):
    noise = torch.randn(())
    while abs(noise) > 0.1:
        noise = torch.randn(())
    return squares(module, [batch[0] + noise, batch[1]])


def time_first_loss(module, batch):
    x = batch[0].T[:, :, None].expand(-1, -1, 6)
    return squares(module, [(x + torch.randn_like(x)).mean(0), batch[1]])


def per_sample_gradients(module, batch):
    weights = {name: each.detach() for name, each in module.named_parameters()}

    def output(x):
        return torch.func.functional_call(module, weights, x[None]).sum()

    slopes = torch.func.vmap(torch.func.grad(output))(batch[0])
    return squares(module, batch) + (slopes * module[0].weight.sum(0)).sum()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.layer(self.table(tokens)))


def next_tokens(module, batch):
    logits = module(batch[0])[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, batch[1][:, 1:].flatten(), reduction="sum")


def nothing_if_ignored(module, batch):
    label_count = (batch[1][:, 1:] != -100).sum()
    return next_tokens(module, batch) if label_count else torch.zeros(())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(6, 8, 2, dropout=0.3), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.layers(x[None].expand(3, -1, -1))[0][-1])


class DetectorHead(nn.Linear):
    """A module that returns a loss in training and boxes in evaluation, as detectors do."""

    def forward(self, x, y):  # type: ignore[override]
        out = super().forward(x)
        return ((out - y) ** 2).sum() if self.training else [{"boxes": out}]


class CheckpointedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net(nn.Dropout(0.2))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 1).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(1, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class LargeLogits(nn.Module):
    """A model with logits of thousands, whose loss is a small difference of large numbers."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(4000.0 * torch.eye(11))

    def forward(self, tokens):
        return self.rows[tokens.roll(-1, 1)].float()


ADDITIVE_TASKS = {
    "diffusion": lambda: task_of(lambda: net(outputs=6), diffusion),
    "variational autoencoder": lambda: task_of(Autoencoder, lambda m, b: m(b[0])),
    "masks": lambda: task_of(lambda: net(outputs=6), masked_loss),
    "shuffled masks": lambda: task_of(lambda: net(outputs=6), shuffled_mask_loss),
    "differential equation": lambda: task_of(net, equation_residual),
    "critic": lambda: task_of(net, gradient_penalty),
    "noise sample by sample": lambda: task_of(net, loss_by_sample),
    "numpy's noise": lambda: task_of(net, numpy_noise_loss),
    "python's noise": lambda: task_of(net, python_noise_loss),
    "rejection sampling": lambda: task_of(net, rejection_sampling_loss),
    "time first": lambda: task_of(net, time_first_loss),
    "gradients by vmap": lambda: task_of(net, per_sample_gradients),
    "groups": lambda: task_of(lambda: net(nn.GroupNorm(2, 8)), squares),
    "dropout": lambda: task_of(
        lambda: net(nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.RReLU()), squares
    ),
    "attention": lambda: task_of(Attention, next_tokens, TOKENS, TOKENS),
    "first samples ignored": lambda: task_of(Attention, next_tokens, TOKENS, IGNORED),
    "no loss of the first samples": lambda: task_of(Attention, nothing_if_ignored, TOKENS, IGNORED),
    "recurrent": lambda: task_of(Recurrent, squares),
    "another call in evaluation": lambda: task_of(lambda: DetectorHead(6, 1), lambda m, b: m(*b)),
    "checkpoints": lambda: task_of(CheckpointedNet, squares),
    "lora": lambda: task_of(Lora, squares),
    "large logits": lambda: task_of(LargeLogits, next_tokens, TOKENS, TOKENS),
}


def body_in_evaluation_mode():
    module = nn.ModuleDict({"body": TrainingTerm(contrast), "head": nn.Linear(6, 1)})
    module["body"].eval()
    return module


ADDITIVE_TASKS["a body in evaluation mode"] = lambda: task_of(
    body_in_evaluation_mode, lambda m, b: squares(m["head"], b) + m["body"](b[0])
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADDITIVE_TASKS)
def test_a_sum_over_samples_is_accepted(name):
    assert ScriptTask(ADDITIVE_TASKS[name](), SPEC, {}).manifest.train_samples == 48


# Losses that depend on how a step is divided.


class TrainingTerm(nn.Module):
    """A module that adds a term across the batch, in training only."""

    def __init__(self, across):
        super().__init__()
        self.inner, self.across = net(outputs=4), across

    def forward(self, x):
        y = self.inner(x)
        return (y**2).sum() + (self.across(y) if self.training else 0.0)


def contrast(y):
    y = functional.normalize(y, dim=1)
    return -torch.log_softmax(y @ y.roll(1, 1).T / 0.1, 1).diagonal().sum()


def batch_norm(y):
    return (
        functional.batch_norm(y, None, None, training=True).abs().sum() if len(y) > 1 else y.sum()
    )


class Experts(nn.Module):
    """A router that starts with zeros, and a loss that balances its experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 3, bias=False)
        nn.init.zeros_(self.router.weight)
        self.experts = nn.ModuleList(nn.Linear(6, 1) for _ in range(3))

    def forward(self, x):
        shares = self.router(x).softmax(1)
        y = torch.stack([expert(x) for expert in self.experts], 1)[..., 0]
        one_hot_experts = functional.one_hot(shares.argmax(1), 3).to(shares)
        return (shares * y).sum(1, keepdim=True), 3 * (
            one_hot_experts.mean(0) * shares.mean(0)
        ).sum()


def with_balance(module, batch):
    y, balance = module(batch[0])
    return ((y - batch[1]) ** 2).sum() + len(y) * balance


def partial_likelihood(module, batch):
    x, time, observed = batch
    risk = module(x)[:, 0]
    at_risk = (time[None] >= time[:, None]).to(risk)
    return -(observed * (risk - (at_risk * risk.exp()).sum(1).log())).sum()


def satisfied_hinge(module, batch):
    return (9 - 10 * batch[0][:, :1].sign() - module(batch[0])).clamp_min(0).mean()


def penalty_on(names, weight):
    def loss(module, batch):
        penalty = sum((p**2).sum() for n, p in module.named_parameters() if names in n)
        return squares(module, batch) + weight * penalty

    return loss


def class_weighted_mean(module, batch):
    mean = functional.cross_entropy(
        module(batch[0]), batch[1], torch.tensor([0.2, 0.8]).to(batch[0])
    )
    return mean * len(batch[0])


def penalty_on_closure():
    module = net()
    nn.init.zeros_(module[2].bias)
    loss = lambda m, b: squares(m, b) + (module[2].bias ** 2).sum()  # noqa: E731
    return samestep.Task(module=module, train=TensorDataset(X, Y), loss=loss)


class GradientOnlyTerm(torch.autograd.Function):
    """A function that adds a term's gradient without its value, as some routers do."""

    @staticmethod
    def forward(context, y, term):
        context.save_for_backward(term)
        return y.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient, torch.ones_like(context.saved_tensors[0])


def gradient_only_penalty(module, batch):
    y = GradientOnlyTerm.apply(module(batch[0]), (module[0].bias ** 2).sum())
    return ((y - batch[1]) ** 2).sum()


class ZeroBiases(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        nn.init.zeros_(self.inner[0].bias)

    def forward(self, x):
        return self.inner(x)


TIMES = torch.rand(48, generator=DRAWS)
OBSERVED = (torch.arange(48) % 6 == 5).float()
SORTED = CLASSES.argsort()

REFUSED_TASKS = {
    "contrast in training": (lambda: task_of(lambda: TrainingTerm(contrast), lambda m, b: m(b[0])),
        "adds up over samples.*in training mode: a loss across samples"),
    "statistics in training": (
        lambda: task_of(lambda: TrainingTerm(batch_norm), lambda m, b: m(b[0])),
        "in training mode: .*layers across the batch"),
    "layer without statistics": (
        lambda: task_of(lambda: net(nn.BatchNorm1d(8, track_running_stats=False)), squares),
        r"sample \d+ alone raised.*is there a layer across the batch"),
    "balanced experts": (lambda: task_of(Experts, with_balance), "balancing"),
    "constant for each microbatch": (
        lambda: task_of(Experts, lambda m, b: squares(lambda x: m(x)[0], b) + m(b[0])[1] * 1e-4),
        "balancing"),
    "partial likelihood": (
        lambda: task_of(net, partial_likelihood, X, TIMES, OBSERVED), "a loss across samples"),
    "satisfied hinges": (
        lambda: task_of(net, satisfied_hinge, X[(-X[:, 0]).argsort()]), r"got a mean .* \.sum\(\)"),
    "penalty on LoRA's B": (lambda: task_of(Lora, penalty_on("b", 1e-3)),
        r"counts once for each microbatch.*belongs in the optimizer's weight_decay"),
    "penalty on biases": (
        lambda: task_of(ZeroBiases, penalty_on("0.bias", 1e-5)), "once for each microbatch"),
    "penalty through a closure": (penalty_on_closure, "belongs in the optimizer's weight_decay"),
    "penalty in backward alone": (
        lambda: task_of(net, gradient_only_penalty), "gradients that add up.*'0.bias'"),
    "mean weighted by class": (
        lambda: task_of(lambda: net(outputs=2), class_weighted_mean, X[SORTED], CLASSES[SORTED]),
        "a mean weighted by class"),
    "spread over the batch": (
        lambda: task_of(net, lambda m, b: squares(m, b) - m(b[0]).std(0, unbiased=False).sum()),
        "a loss across samples"),
    "mean of drawn noise": (
        lambda: task_of(lambda: net(outputs=6), lambda m, b: diffusion(m, b) / b[0].numel()),
        'reduction="sum"'),
    "penalty with masks": (
        lambda: task_of(
            lambda: net(outputs=6), lambda m, b: masked_loss(m, b) + 1e-4 * m[0].bias.norm()),
        "once for each microbatch"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED_TASKS)
def test_losses_that_depend_on_the_division_of_a_step_are_refused(name):
    build, message = REFUSED_TASKS[name]
    with pytest.raises(DataError, match=message) as error:
        ScriptTask(build(), SPEC, {})
    assert "\n" not in str(error.value)


class PackageTask:
    """A task of a package, with a penalty on a tensor that starts at zero."""

    def __init__(self, penalty):
        module = Lora()
        self.manifest = Manifest(
            blocks=cut_into_blocks(module), train_samples=48, evaluation_parts=0,
            metrics=(), digests={},
        )  # fmt: skip
        self.trainable = Trainable(
            blocks=self.manifest.blocks, module=module,
            loss=lambda m, a: squares(m, [a["x"], a["y"]]) + penalty * (m.b**2).sum(),
        )  # fmt: skip

    def initial_parameters(self):
        return [np.zeros(block.elements, np.float32) for block in self.manifest.blocks]

    def evaluation_batch(self, part):
        return self.batch([part])

    def batch(self, samples):
        rows = list(samples)
        return Batch({"x": X[rows].numpy(), "y": Y[rows].numpy()}, float(len(rows)))


def test_task_of_a_package_is_tried_like_a_script():
    trial = sum_trial_of(PackageTask(0.0))
    assert trial is not None
    values = [np.ones(block.elements, np.float32) for block in PackageTask(0.0).manifest.blocks]
    trial.check_after_steps(2, values)
    with pytest.raises(DataError, match="counts once for each microbatch"):
        sum_trial_of(PackageTask(1e-3))


def test_part_in_evaluation_mode_stays_in_it_during_trials():
    task = PackageTask(0.0)
    module = body_in_evaluation_mode()
    task.manifest = Manifest(
        blocks=cut_into_blocks(module), train_samples=48, evaluation_parts=0, metrics=(),
        digests={},
    )  # fmt: skip
    loss = lambda m, a: squares(m["head"], [a["x"], a["y"]]) + m["body"](a["x"])  # noqa: E731
    task.trainable = keep_evaluation_modes(Trainable(task.manifest.blocks, module, loss))
    assert sum_trial_of(task) is not None
