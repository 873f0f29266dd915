"""A ResNet with BatchNorm on scikit-learn's handwritten digits, from a plain PyTorch script."""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep

STEPS = 60
FIT = {
    "steps": STEPS,
    "batch": 64,
    "microbatch": 16,  # BatchNorm's statistics are those of 16 images
    "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS),
}


class Block(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )

    def forward(self, x):
        inner = functional.relu(self.norm1(self.first(x)))
        return functional.relu(self.norm2(self.second(inner)) + self.shortcut(x))


def resnet():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(8, 8, 1),
        Block(8, 16, 2),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def loss(module, batch):
    images, labels = batch
    return functional.cross_entropy(module(images), labels, label_smoothing=0.1)


def correct(module, batch):
    images, labels = batch
    return (module(images).argmax(1) == labels).sum()


def build():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    return samestep.Task(
        module=resnet(),
        train=TensorDataset(images[:1500], labels[:1500]),
        held_out=TensorDataset(images[1500:], labels[1500:]),
        loss=loss,
        metrics={"accuracy": correct},
        unit="microbatch",
    )


if __name__ == "__main__":
    result = samestep.fit(build, **FIT)
    print(f"accuracy {result.metrics['accuracy']:.3f}, digest {result.digest}")
