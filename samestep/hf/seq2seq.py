"""`samestep.hf.Seq2SeqTrainer`: `transformers.Seq2SeqTrainer`, trained by samestep."""

from __future__ import annotations

from typing import Any, ClassVar

import transformers
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.trainer_utils import TrainOutput

from samestep.hf.training import SamestepMixin, fields_of


class Seq2SeqTrainer(SamestepMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer`, trained by samestep; metrics can use generated text."""

    honored_by_class: ClassVar[frozenset[str]] = fields_of(
        Seq2SeqTrainingArguments, TrainingArguments
    ) - {"sortish_sampler"}
    # Its `evaluate` sets the generation options, as `train` does here.
    replaced_loop_classes: ClassVar[frozenset[type]] = frozenset({transformers.Seq2SeqTrainer})

    def train(  # type: ignore[override]  # theirs names arguments that are refused here
        self, resume_from_checkpoint: Any = None, **generation_options: Any
    ) -> TrainOutput:
        """See `SamestepMixin.train`."""
        arguments: Any = self.args
        self._gen_kwargs = {
            "max_length": arguments.generation_max_length,
            "num_beams": arguments.generation_num_beams,
        }
        return super().train(resume_from_checkpoint, **generation_options)
