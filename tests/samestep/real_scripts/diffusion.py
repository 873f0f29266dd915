"""A diffusion model of handwritten digits: the loss draws noise and noise levels."""

from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import samestep

LEVELS = 50
FIT: dict[str, Any] = {
    "steps": 12,
    "batch": 32,
    "microbatch": 8,
    "optimizer": partial(torch.optim.AdamW, lr=2e-3, betas=(0.9, 0.99)),
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 4)
    ),
}


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Embedding(LEVELS, 64)
        self.inner = nn.Linear(64, 64)
        self.norm = nn.GroupNorm(8, 64)
        self.outer = nn.Sequential(nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 64))
        self.register_buffer("signal_fractions", torch.linspace(0.999, 0.9, LEVELS).cumprod(0))

    def forward(self, noisy: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(noisy) + self.level(level)))


def loss(module, batch):
    (images,) = batch
    level = torch.randint(LEVELS, (len(images),))
    noise = torch.randn_like(images)
    signal_fraction = module.signal_fractions[level][:, None]
    noisy = signal_fraction.sqrt() * images + (1 - signal_fraction).sqrt() * noise
    return ((module(noisy, level) - noise) ** 2).mean(1).sum()


def build():
    images = torch.tensor(load_digits().data[:256], dtype=torch.float32) / 8 - 1
    return samestep.Task(module=Denoiser(), train=TensorDataset(images), loss=loss)


if __name__ == "__main__":
    result = samestep.fit(build, **FIT)
    print(f"loss {result.history[-1]['loss']:.4f} digest {result.digest}")
