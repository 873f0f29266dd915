import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

x = torch.linspace(-3, 3, 256)[:, None]


def build():
    return samestep.Task(
        module=nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)),
        train=TensorDataset(x, x.sin()),
        loss=lambda module, batch: ((module(batch[0]) - batch[1]) ** 2).sum(),
    )


result = samestep.fit(build, steps=40, batch=64, optimizer={"name": "adamw", "lr": 1e-2})
print(f"loss {result.history[-1]['loss']:.4f}, digest {result.digest}")
