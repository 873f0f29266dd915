"""Test of `samestep.hf.sft.SFTTrainer` against TRL's `SFTTrainer`.

Needs TRL (`pip install 'samestep[trl]'`). Run this file with `pytest -m slow`.
"""

from __future__ import annotations

import pytest
import torch

from protocol.exact.samples import SampleOrder
from protocol.spec.sections.tasks import BatchSpec
from tests.samestep.test_hf_trainer import CONFIG, TEXTS, EpochSampler, losses

SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1,
    "learning_rate": 1e-2, "logging_steps": 1, "seed": 5, "use_cpu": True, "report_to": "none",
    "save_strategy": "no", "disable_tqdm": True, "max_length": 8, "bf16": False,
    "gradient_checkpointing": False,
}  # fmt: skip


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<unk>": 1} | {str(n): n for n in range(2, 32)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="<pad>"
    )


def train(trainer_class, directory):
    import trl
    from datasets import Dataset
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    trainer = trainer_class(
        model=LlamaForCausalLM(CONFIG),
        args=trl.SFTConfig(output_dir=str(directory), **SETTINGS),
        train_dataset=Dataset.from_dict({"input_ids": TEXTS}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer


@pytest.mark.slow
def test_losses_equal_the_stock_trainer_on_the_same_order(tmp_path):
    trl = pytest.importorskip("trl", reason="pip install 'samestep[trl]'")
    from samestep.hf.sft import SFTTrainer

    class StockTrainer(trl.SFTTrainer):  # type: ignore[name-defined, misc]
        def _get_train_sampler(self, *_):
            return EpochSampler(SampleOrder(5, len(TEXTS), BatchSpec(samples=4, microbatch=2)))

    stock = train(StockTrainer, tmp_path / "stock")
    samestep_trainer = train(SFTTrainer, tmp_path / "ours")
    assert losses(samestep_trainer) == pytest.approx(losses(stock), rel=1e-5)
