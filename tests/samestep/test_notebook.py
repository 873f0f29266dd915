"""A notebook as Jupyter runs it: progress appears in the cell, and an interrupt drains the run.

Needs a kernel (`pip install nbclient ipykernel`). Run this file with `pytest -m slow`.
"""

from __future__ import annotations

import asyncio
import os
import re

import pytest

SETUP = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
import samestep

x = torch.linspace(-1, 1, 32)[:, None]
fit_options = dict(steps=40, batch=8, device="cpu", optimizer="sgd")

def squared_error(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()

def build(loss=squared_error):
    return samestep.Task(module=nn.Linear(1, 1), train=TensorDataset(x, 2 * x), loss=loss)
"""
FULL_RUN = "full_run = samestep.fit(build, **fit_options)"
INTERRUPTED_RUN = """
def waiting_loss(module, batch):
    with open("calls", "ab") as file:  # a loss that keeps a counter is refused
        file.write(b".")
        calls = file.tell()
    if calls == 60:
        open("gate", "rb").read(1)  # a pipe: blocks until the test has seen the run drain
    return squared_error(module, batch)

drained_run = samestep.fit(lambda: build(waiting_loss), directory="drained_run", **fit_options)
print("outcome", drained_run.outcome, drained_run.steps)
"""
RESUMED_RUN = """
resumed_run = samestep.fit(build, directory="drained_run", resume=True, **fit_options)
print("outcome", resumed_run.outcome, resumed_run.steps, resumed_run.digest == full_run.digest)
"""


@pytest.mark.slow
def test_progress_is_in_the_cell_and_an_interrupt_drains_the_run(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)

    class InterruptingClient(nbclient.NotebookClient):  # type: ignore[name-defined, misc]
        """A client that interrupts the third cell during training, and opens its gate once the run
        drains."""

        def process_message(self, message, cell, cell_index):
            stream_text = message.get("content", {}).get("text", "")
            if cell_index == 2 and "training starts" in stream_text:
                self.interrupt_task = asyncio.ensure_future(self.km.interrupt_kernel())
            if cell_index == 2 and "drain" in stream_text:
                os.write(gate, b"!")
            return super().process_message(message, cell, cell_index)

    cells = [
        nbformat.v4.new_code_cell(text) for text in (SETUP, FULL_RUN, INTERRUPTED_RUN, RESUMED_RUN)
    ]
    book = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    InterruptingClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
    os.close(gate)

    cell_texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in book.cells]
    assert "\x1b" not in "".join(cell_texts)
    assert "training starts" in cell_texts[1]
    assert re.search(r"^step \d+/40  loss", cell_texts[1], re.MULTILINE)
    assert "outcome drained" in cell_texts[2]
    assert "outcome finished 40 True" in cell_texts[3]
