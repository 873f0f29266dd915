"""`samestep.hf.sft.SFTTrainer`: TRL's SFTTrainer, trained by samestep; its data and loss stay."""

from __future__ import annotations

from transformers import TrainingArguments
from trl import SFTConfig
from trl import SFTTrainer as PlainSFTTrainer

from samestep.hf.training import SamestepMixin, fields_of


class SFTTrainer(SamestepMixin, PlainSFTTrainer):  # type: ignore[misc]  # it ships no types
    """`trl.SFTTrainer`, trained by samestep; `SFTConfig` configures data and loss as usual."""

    honored_by_class = fields_of(SFTConfig, TrainingArguments)
    # TRL's changes offload activations, count tokens and save model cards.
    replaced_loop_classes = frozenset(PlainSFTTrainer.__mro__)
