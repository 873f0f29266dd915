"""`fit` and a Trainer have the same digest on both stand-in devices and on one."""

from __future__ import annotations

import pytest

from tests.processes import run_to_end
from tests.samestep.scripts import HEAD
from tests.samestep.test_scripts import digests, write_script

pytestmark = pytest.mark.slow

FIT = (
    HEAD
    + """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.Linear(8, 1))
r = samestep.fit(lambda: task(net), steps=8, batch=16, microbatch=2)
print("loss", 0, "digest", r.digest)
"""
)
TRAINER = """
import sys
import torch
from transformers import LlamaForCausalLM, TrainerCallback, TrainingArguments
import samestep.hf
from tests.samestep.test_hf_trainer import CONFIG, ITEMS, SETTINGS, collate

class RecordStarts(TrainerCallback):
    def on_train_begin(self, *_, **__):
        with open("starts", "a") as file:
            file.write("start\\n")

torch.manual_seed(0)
trainer = samestep.hf.Trainer(
    model=LlamaForCausalLM(CONFIG),
    args=TrainingArguments(output_dir="out", **{**SETTINGS, "use_cpu": False}),
    train_dataset=ITEMS, data_collator=collate, callbacks=[RecordStarts()],
)
trainer.train()
print("loss", 0, "digest", trainer.fitted.digest)
"""


@pytest.mark.parametrize("text", [FIT, TRAINER], ids=["fit", "trainer"])
def test_two_cards_give_the_digest_of_one_card(tmp_path, environment, text):
    outputs = {}
    for devices in ("accelerator0", "accelerator0-1"):
        folder = tmp_path / devices
        folder.mkdir()
        script = write_script(folder, text)
        completed = run_to_end(
            "tests.plain_script", str(script), cwd=folder,
            environment={**environment, "SAMESTEP_BACKEND": devices},
        )  # fmt: skip
        assert completed.returncode == 0, completed.stdout + completed.stderr
        outputs[devices] = completed.stdout
        if text is TRAINER:
            assert (folder / "starts").read_text() == "start\n"
            assert [path.name for path in (folder / "out").iterdir()] == ["run-1"]
    one_device_output, two_device_output = outputs.values()
    assert len(digests(one_device_output)) == 1
    assert digests(two_device_output) == digests(one_device_output)
    assert "ready on Stand-in Accelerator" in one_device_output
    assert "ready on 2 x Stand-in Accelerator" in two_device_output
