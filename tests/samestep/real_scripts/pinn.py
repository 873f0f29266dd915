"""A physics-informed network: u'' = -pi^2 sin(pi x) on [-1, 1], u(-1) = u(1) = 0."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

FIT: dict[str, Any] = {
    "epochs": 3,
    "batch": 32,
    "microbatch": 8,
    "optimizer": partial(torch.optim.Adam, lr=5e-3),
    "scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    "scheduler_interval": "epoch",
}


def loss(module, batch):
    x = batch[0].requires_grad_()
    u = module(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    residual = curvature + math.pi**2 * torch.sin(math.pi * x)
    edges = module(torch.tensor([[-1.0], [1.0]]))
    return (residual**2).sum() + 10 * len(x) * (edges**2).sum()


def build():
    x = torch.linspace(-1, 1, 128)[:, None]
    module = nn.Sequential(
        nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
    )
    return samestep.Task(module=module, train=TensorDataset(x), loss=loss)


if __name__ == "__main__":
    result = samestep.fit(build, **FIT)
    print(f"loss {result.history[-1]['loss']:.4f} digest {result.digest}")
