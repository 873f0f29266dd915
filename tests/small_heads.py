"""Small models with a head over a vocabulary, microbatches for their losses, and the largest tensor
that a loss makes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backends.base.interface import Batch
from worker.distillation.distillation_loss import DistillationLoss
from worker.tasks.base.transformer import labeled_loss
from worker.tasks.language import distil
from worker.tasks.language.causal_lm import token_loss
from worker.tasks.language.seq2seq import target_loss

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MARKS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def model_of(config: Any) -> Any:
    """A decoder with drawn weights."""
    torch.manual_seed(3)
    kind: Any = transformers.AutoModelForCausalLM
    return kind.from_config(config)


def llama(vocabulary: int = VOCABULARY, **sizes: Any) -> Any:
    return model_of(transformers.LlamaConfig(**{**SIZES, **sizes, "vocab_size": vocabulary}))


def gemma() -> Any:
    """Whose logits are capped behind the head."""
    return model_of(transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.2))


def cohere() -> Any:
    """Whose logits are scaled behind the head."""
    return model_of(transformers.CohereConfig(**SIZES, logit_scale=0.3, pad_token_id=0))


def bert(vocabulary: int = VOCABULARY) -> Any:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5(vocabulary: int = VOCABULARY, *, tied: bool = True) -> Any:
    torch.manual_seed(3)
    config: Any = transformers.T5Config(
        vocab_size=vocabulary, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=0.0, **MARKS,
    )  # fmt: skip
    config.tie_word_embeddings = config.scale_decoder_outputs = tied
    return transformers.T5ForConditionalGeneration(config)


def bart(vocabulary: int = VOCABULARY) -> Any:
    """Whose logits have a constant added behind the head."""
    torch.manual_seed(3)
    config: Any = transformers.BartConfig(
        vocab_size=vocabulary, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0, bos_token_id=0,
        forced_eos_token_id=None, **MARKS,
    )  # fmt: skip
    model: Any = transformers.BartForConditionalGeneration(config)
    model.final_logits_bias.uniform_(-1.0, 1.0)
    return model


def texts(vocabulary: int = VOCABULARY) -> Batch:
    """48 tokens, of which a fifth is not predicted."""
    ids = np.random.default_rng(1).integers(0, vocabulary, (2, 24))
    labels = np.where(ids % 5 == 0, -100, np.roll(ids, -1, axis=1))
    return Batch({"input_ids": ids, "labels": labels}, 2.0)


def pairs() -> Batch:
    """One chosen and one rejected answer."""
    return Batch({name: array[None] for name, array in texts().arrays.items()}, 2.0)


def masked(vocabulary: int = VOCABULARY) -> Batch:
    """The second text is padded."""
    given = texts(vocabulary)
    attention = np.ones((2, 24), np.int64)
    attention[1, 20:] = 0
    return Batch({**given.arrays, "attention_mask": attention}, 2.0)


def captured(vocabulary: int = VOCABULARY) -> Batch:
    """With the four likeliest tokens of a teacher."""
    draws = np.random.default_rng(2)
    ids = draws.permuted(np.tile(np.arange(vocabulary - 6), (2, 24, 1)), axis=-1)[..., :4]
    teacher = draws.uniform(0.0, 0.25, (2, 24, 4)).astype(np.float32)
    tail = 1 - teacher.sum(-1)
    of_teacher = {"teacher_ids": ids, "teacher": teacher, "teacher_tail": tail}
    return Batch({**texts(vocabulary - 6).arrays, **of_teacher}, 2.0)


def distillation(vocabulary: int = VOCABULARY) -> DistillationLoss:
    """The teacher knows six tokens less than the student."""
    return DistillationLoss(0.7, 2.0, vocabulary - 6, has_tail=True, is_drawn=False)


OF_TOKENS = partial(token_loss, options={})
MASKED = partial(labeled_loss, options={})
TARGETS = partial(target_loss, start=0, padding=0, options={"use_cache": False})


def distilled(vocabulary: int = VOCABULARY) -> Any:
    """The loss of task distil."""
    return partial(distil._total, loss=distillation(vocabulary), options={})


class LargestTensor(TorchDispatchMode):
    """Watches forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return results
