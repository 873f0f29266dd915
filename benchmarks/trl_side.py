"""The reference for `benchmarks.sft`: TRL's SFTTrainer on the files that the benchmark wrote.

An interpreter with trl runs this script, which imports nothing of samestep.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer


class SequentialTrainer(trl.SFTTrainer):  # type: ignore[misc]
    """A trainer that takes samples in the order of the file."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)


def main(directory: Path) -> None:
    """Train, and write the held-out losses to trl.json."""
    settings = json.loads((directory / "settings.json").read_text())
    train, held_out = (
        datasets.Dataset.from_list(
            [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        )
        for name in ("train", "held_out")
    )
    torch.set_num_threads(1)
    trainer = SequentialTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            directory / "model", attn_implementation="eager"
        ),
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
        train_dataset=train,
        eval_dataset=held_out,
        args=trl.SFTConfig(
            output_dir=str(directory / "trl"),
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["microbatch"],
            gradient_accumulation_steps=settings["microbatches"],
            per_device_eval_batch_size=len(held_out),
            learning_rate=settings["rate"],
            lr_scheduler_type="constant",
            optim="adamw_torch",
            weight_decay=0.0,
            max_grad_norm=settings["clip_norm"],
            max_length=settings["max_tokens"],
            assistant_only_loss=True,
            packing=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=settings["steps"],
        ),
    )
    initial_loss = trainer.evaluate()["eval_loss"]
    trainer.train()
    result = {
        "before": initial_loss,
        "loss": trainer.evaluate()["eval_loss"],
        "version": trl.__version__,
        "torch": torch.__version__,
    }
    (directory / "trl.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
