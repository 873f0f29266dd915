"""Five scripts as users write them: torch's values, and one digest for any number of workers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from tests.processes import ROOT
from tests.samestep.plain_loop import train_with_torch
from tests.samestep.scripts import RunningScript, close

RESNET = ROOT / "docs" / "examples" / "resnet.py"
SCRIPTS = [RESNET, *sorted((Path(__file__).parent / "real_scripts").glob("*.py"))]


WAITING_IMPORT = """import samestep
import dataclasses
import pathlib
import time

START_S = time.time()
HOLD = pathlib.Path("hold")


def wait_in_loss(build):
    def build_waiting():
        task = build()

        def loss(module, batch):
            while HOLD.exists() and HOLD.stat().st_mtime > START_S:
                time.sleep(0.02)
            return task.loss(module, batch)

        return dataclasses.replace(task, loss=loss)

    return build_waiting
"""
"""Replaces `import samestep` in a script: its loss waits while the file `hold` exists.

A process that starts after the file was created does not wait.
"""


def load_script(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_has_the_losses_and_weights_of_torch(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = load_script(path)
    arguments = {**module.FIT}
    if path == RESNET:  # rounding grows from step to step
        arguments["steps"] = 10
    result = samestep.fit(module.build, device="cpu", **arguments)
    expected, losses = train_with_torch(module.build, arguments)
    assert [row["loss"] for row in result.history] == pytest.approx(losses, rel=1e-5)
    weights, expected_weights = result.module.state_dict(), expected.state_dict()
    assert weights.keys() == expected_weights.keys()
    for name, values in expected_weights.items():
        torch.testing.assert_close(weights[name], values, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.release)])
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_has_one_digest_for_any_number_of_workers(path, workers, tmp_path):
    script = tmp_path / "train.py"
    text = (
        path.read_text()
        .replace("STEPS = 60", "STEPS = 10")
        .replace("import samestep\n", WAITING_IMPORT)
    )
    script.write_text(text.replace("samestep.fit(build,", "samestep.fit(wait_in_loss(build),"))
    expected = digest(RunningScript(script).wait_for_success())
    running_script = RunningScript(script, {"SAMESTEP_EXPECT_WORKERS": str(workers)})
    other_workers = [running_script.start_script_worker(f"worker-{n}") for n in range(workers - 2)]
    hold, killed_worker = running_script.start_paused_worker("killed", 3)
    hold.wait_until_paused()
    (tmp_path / "hold").touch()
    other_workers.append(running_script.start_script_worker("late"))
    running_script.wait_for("worker late ready")
    killed_worker.kill()
    (tmp_path / "hold").unlink()
    assert digest(running_script.wait_for_success()) == expected, f"{workers} workers"
    hold.close()
    killed_worker.wait()
    for worker in other_workers:
        worker.wait(300)
    close(killed_worker, *other_workers)


def digest(text: str) -> str:
    (hex_digest,) = re.findall(
        r"digest (\w{64})$", text.replace("weights digest:", ""), re.MULTILINE
    )
    return str(hex_digest)


@pytest.mark.slow
def test_resnet_of_the_docs_runs_from_the_command_line_and_learns(tmp_path):
    completed = subprocess.run(
        [sys.executable, str(RESNET)], cwd=tmp_path, capture_output=True, text=True, check=True,
        timeout=600,
    )  # fmt: skip
    (accuracy,) = re.findall(r"^accuracy (\S+), digest \w{64}$", completed.stdout, re.MULTILINE)
    assert float(accuracy) > 0.9
