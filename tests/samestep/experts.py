"""A mixture of experts, one per sample, and a layer that no sample reaches."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

EXPERT_FRACTIONS = torch.tensor([0.8, 0.14, 0.04, 0.02])
"""Fractions of samples per expert."""


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in EXPERT_FRACTIONS)
        self.unused = nn.Linear(6, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = hidden.clone()
        for number, expert in enumerate(self.experts):
            rows = (expert_ids == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(hidden[rows])))
        y: torch.Tensor = self.last(out)
        return y


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 3, generator=generator)
    expert_ids = torch.multinomial(EXPERT_FRACTIONS, 48, replacement=True, generator=generator)
    return x, expert_ids, x.sin().sum(1, keepdim=True)


def loss(module, batch):
    return ((module(batch[0], batch[1]) - batch[2]) ** 2).sum()


def task() -> samestep.Task:
    return samestep.Task(module=Experts(), train=TensorDataset(*data()), loss=loss)
