"""The two scripts at the start of docs/from-pytorch.md have equal losses and weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep
from protocol.exact.samples import SampleOrder
from protocol.spec.sections.tasks import BatchSpec
from tests.processes import ROOT

PAGE = ROOT / "docs" / "from-pytorch.md"


class SamestepOrderLoader:
    """A replacement of `DataLoader` that has samestep's order of samples."""

    def __init__(self, data: Any, *, batch_size: int, shuffle: bool) -> None:
        assert shuffle
        self._data, self._epoch = data, 0
        self._order = SampleOrder(0, len(data), BatchSpec(samples=batch_size, microbatch=4))

    def __iter__(self) -> Any:
        first = self._epoch * self._order.steps_per_epoch
        self._epoch += 1
        for step in range(first, first + self._order.steps_per_epoch):
            rows = [n for part in self._order.microbatches(step) for n in part]
            yield self._data[rows]


def test_loop_and_its_translation_have_equal_losses_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 3, generator=generator)
    names: dict[str, Any] = {
        "torch": torch, "nn": nn, "functional": functional, "samestep": samestep,
        "DataLoader": SamestepOrderLoader, "data": TensorDataset(x, (x.sum(1) > 0).long()),
    }  # fmt: skip
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    namespaces = []
    for code in blocks:
        torch.manual_seed(0)
        namespace = dict(names)
        exec(code, namespace)
        namespaces.append(namespace)
    loop, translated = namespaces
    assert translated["result"].history[-1]["loss"] == pytest.approx(loop["loss"].item(), rel=1e-5)
    models = translated["model"], loop["model"]
    for actual, expected in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
