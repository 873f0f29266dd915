"""A notebook as Jupyter runs it: progress appears in the cell, and an interrupt drains.

Needs a kernel: `pip install nbclient ipykernel`, and `pytest -m slow` of this file.
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
given = dict(steps=40, batch=8, device="cpu", optimizer="sgd")

def squares(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()

def build(loss=squares):
    return samestep.Task(module=nn.Linear(1, 1), train=TensorDataset(x, 2 * x), loss=loss)
"""
WHOLE = "whole = samestep.fit(build, **given)"
INTERRUPTED = """
def waits(module, batch):
    with open("calls", "ab") as file:  # a loss that keeps a counter is refused
        file.write(b".")
        calls = file.tell()
    if calls == 60:
        open("gate", "rb").read(1)  # a pipe: until the test has seen that the run drains
    return squares(module, batch)

part = samestep.fit(lambda: build(waits), directory="part", **given)
print("outcome", part.outcome, part.steps)
"""
GOES_ON = """
rest = samestep.fit(build, directory="part", resume=True, **given)
print("outcome", rest.outcome, rest.steps, rest.digest == whole.digest)
"""


@pytest.mark.slow
def test_progress_is_in_the_cell_and_an_interrupt_drains(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)

    class Interrupting(nbclient.NotebookClient):  # type: ignore[name-defined, misc]
        """Interrupts the third cell during training, and lets it continue once the interrupt was
        received."""

        def process_message(self, message, cell, cell_index):
            stream_text = message.get("content", {}).get("text", "")
            if cell_index == 2 and "training starts" in stream_text:
                self.interrupting = asyncio.ensure_future(self.km.interrupt_kernel())
            if cell_index == 2 and "drain" in stream_text:
                os.write(gate, b"!")
            return super().process_message(message, cell, cell_index)

    cells = [nbformat.v4.new_code_cell(text) for text in (SETUP, WHOLE, INTERRUPTED, GOES_ON)]
    book = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    Interrupting(book, timeout=300, kernel_name="python3", resources=resources).execute()
    os.close(gate)

    cell_texts = ["".join(each.get("text", "") for each in cell.outputs) for cell in book.cells]
    assert "\x1b" not in "".join(cell_texts)
    assert "training starts" in cell_texts[1]
    assert re.search(r"^step \d+/40  loss", cell_texts[1], re.MULTILINE)
    assert "outcome drained" in cell_texts[2]
    assert "outcome finished 40 True" in cell_texts[3]
