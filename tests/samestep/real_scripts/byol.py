"""BYOL (Grill et al. 2020, arXiv:2006.07733): two views per image, a moving-average target."""

import copy
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import samestep

FIT: dict[str, Any] = {
    "steps": 10,
    "batch": 32,
    "microbatch": 8,
    "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
}


def projector() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))


class Byol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = projector()
        self.predictor = nn.Linear(16, 16)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for target, online in zip(
                self.target.parameters(), self.online.parameters(), strict=True
            ):
                target.lerp_(online, 0.05)
            targets = self.target(second), self.target(first)
        predictions = self.predictor(self.online(first)), self.predictor(self.online(second))
        similarities = [
            functional.cosine_similarity(prediction, target).mean()
            for prediction, target in zip(predictions, targets, strict=True)
        ]
        return 4 - 2 * torch.stack(similarities).sum()


class Views(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Two augmentations of each image, drawn at each read."""

    def __init__(self) -> None:
        self.images = torch.tensor(load_digits().images[:192], dtype=torch.float32) / 8 - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.draw_view(index), self.draw_view(index)

    def draw_view(self, index: int) -> torch.Tensor:
        across, down = torch.randint(-1, 2, (2,)).tolist()
        image = torch.roll(self.images[index], (down, across), (0, 1))
        return (image + 0.1 * torch.randn_like(image)).flatten()


def build():
    return samestep.Task(
        module=Byol(), train=Views(), loss=lambda module, batch: module(*batch), unit="microbatch"
    )


if __name__ == "__main__":
    result = samestep.fit(build, **FIT)
    print(f"loss {result.history[-1]['loss']:.4f} digest {result.digest}")
