"""Parameters that a step does not reach stay unchanged, as in torch, for any number of workers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from protocol.exact.samples import SampleOrder
from protocol.spec.sections.tasks import BatchSpec
from tests.samestep import experts
from tests.samestep.scripts import RunningScript, close

STEPS = 12
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 0.02, "weight_decay": 0.3, "clip_norm": 0.5},
    "momentum": {"name": "momentum", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
}


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train_with_torch(
    module: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None
) -> set[str]:
    """Train on the samples of the run; return names of parameters that some step did not reach."""
    inputs = experts.data()
    order = SampleOrder(0, len(inputs[0]), BatchSpec(samples=8, microbatch=4))
    unreached = set()
    for step in range(STEPS):
        numbers = [n for samples in order.microbatches(step) for n in samples]
        optimizer.zero_grad()
        (experts.loss(module, [tensor[numbers] for tensor in inputs]) / 8).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        unreached |= {name for name, p in module.named_parameters() if p.grad is None}
        optimizer.step()
    return unreached


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_of_experts_and_unused_layers_equal_plain_torch(name):
    spec = OPTIMIZERS[name]
    result = samestep.fit(
        experts.task, steps=STEPS, batch=8, microbatch=4, device="cpu", optimizer=spec
    )
    torch.manual_seed(0)
    initial_module = experts.Experts()
    module = experts.Experts()
    module.load_state_dict(initial_module.state_dict())
    undecayed = [p for n, p in module.named_parameters() if "bias" in n]
    decayed = [p for n, p in module.named_parameters() if "bias" not in n]
    groups: list[Any] = [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.999), weight_decay=0.3)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1)
    unreached = train_with_torch(module, optimizer, spec.get("clip_norm"))
    assert {"unused.weight", "experts.2.weight", "experts.3.bias"} <= unreached
    weights, expected = result.module.state_dict(), module.state_dict()
    for tensor, values in expected.items():
        np.testing.assert_allclose(weights[tensor], values, rtol=2e-6, atol=2e-7, err_msg=tensor)
    before = initial_module.state_dict()
    assert torch.equal(weights["unused.weight"], before["unused.weight"])
    assert not torch.equal(weights["experts.0.weight"], before["experts.0.weight"])


def digests(output: str) -> list[str]:
    return re.findall(r"^digest (\w{64})$", output, re.MULTILINE)


@pytest.mark.slow  # simulated clusters have such steps in faster tests
@pytest.mark.parametrize("topology", ["star", "sharded"])
def test_one_digest_for_one_worker_and_for_two_with_one_killed(tmp_path, topology):
    fit = f"""
from tests.samestep import experts
import samestep
r = samestep.fit(experts.task, steps=6, batch=8, microbatch=2, workers=WORKERS,
    optimizer={OPTIMIZERS["adamw"]!r}, settings={{"exchange": {{"topology": "{topology}"}}}})
print("digest", r.digest)
"""
    path = tmp_path / "train.py"
    path.write_text(fit.replace("WORKERS", "1"))
    expected = digests(RunningScript(path).wait_for_success())
    assert len(expected) == 1
    path.write_text(fit.replace("WORKERS", "2"))
    two = RunningScript(path)
    hold, second = two.start_paused_worker("second", 3)
    hold.wait_until_paused()
    second.kill()
    assert digests(two.wait_for_success()) == expected
    hold.close()
    second.wait()
    close(second)
