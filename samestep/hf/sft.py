"""`samestep.hf.sft.SFTTrainer`: TRL's, trained by samestep; its data and its loss are TRL's own."""

from __future__ import annotations

from transformers import TrainingArguments
from trl import SFTConfig
from trl import SFTTrainer as PlainSFTTrainer

from samestep.hf.training import SamestepMixin, fields_of


class SFTTrainer(SamestepMixin, PlainSFTTrainer):  # type: ignore[misc]  # it ships no types
    """`trl.SFTTrainer`, whose own arguments say how it makes its data and its loss."""

    honoured_by_the_class = fields_of(SFTConfig, TrainingArguments)
    # TRL's own offload activations, and count tokens and save model cards.
    loop_of_the_class = frozenset(PlainSFTTrainer.__mro__)
