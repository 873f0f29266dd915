"""Small models with a head over a vocabulary, microbatches for their losses, and a mode that
records the size of the largest tensor."""

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
SPECIAL_TOKENS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}


def model_of(config: Any) -> Any:
    """Return a decoder with random weights."""
    torch.manual_seed(3)
    auto_model: Any = transformers.AutoModelForCausalLM
    return auto_model.from_config(config)


def llama(vocabulary: int = VOCABULARY, **sizes: Any) -> Any:
    return model_of(transformers.LlamaConfig(**{**SIZES, **sizes, "vocab_size": vocabulary}))


def gemma() -> Any:
    """Return a decoder that caps the logits after the head."""
    return model_of(transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.2))


def cohere() -> Any:
    """Return a decoder that scales the logits after the head."""
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
        dropout_rate=0.0, **SPECIAL_TOKENS,
    )  # fmt: skip
    config.tie_word_embeddings = config.scale_decoder_outputs = tied
    return transformers.T5ForConditionalGeneration(config)


def bart(vocabulary: int = VOCABULARY) -> Any:
    """Return an encoder-decoder that adds a constant to the logits after the head."""
    torch.manual_seed(3)
    config: Any = transformers.BartConfig(
        vocab_size=vocabulary, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, max_position_embeddings=64, dropout=0.0, bos_token_id=0,
        forced_eos_token_id=None, **SPECIAL_TOKENS,
    )  # fmt: skip
    model: Any = transformers.BartForConditionalGeneration(config)
    model.final_logits_bias.uniform_(-1.0, 1.0)
    return model


def texts(vocabulary: int = VOCABULARY) -> Batch:
    """Return two texts of 24 tokens, a fifth of which have no label."""
    ids = np.random.default_rng(1).integers(0, vocabulary, (2, 24))
    labels = np.where(ids % 5 == 0, -100, np.roll(ids, -1, axis=1))
    return Batch({"input_ids": ids, "labels": labels}, 2.0)


def pairs() -> Batch:
    """Return a preference pair: one chosen and one rejected answer."""
    return Batch({name: array[None] for name, array in texts().arrays.items()}, 2.0)


def padded_texts(vocabulary: int = VOCABULARY) -> Batch:
    """Return two texts, the second of which is padded."""
    batch = texts(vocabulary)
    attention = np.ones((2, 24), np.int64)
    attention[1, 20:] = 0
    return Batch({**batch.arrays, "attention_mask": attention}, 2.0)


def texts_with_teacher(vocabulary: int = VOCABULARY) -> Batch:
    """Return texts with a teacher's four most likely tokens at each position."""
    rng = np.random.default_rng(2)
    ids = rng.permuted(np.tile(np.arange(vocabulary - 6), (2, 24, 1)), axis=-1)[..., :4]
    teacher = rng.uniform(0.0, 0.25, (2, 24, 4)).astype(np.float32)
    tail = 1 - teacher.sum(-1)
    teacher_arrays = {"teacher_ids": ids, "teacher": teacher, "teacher_tail": tail}
    return Batch({**texts(vocabulary - 6).arrays, **teacher_arrays}, 2.0)


def distillation_loss(vocabulary: int = VOCABULARY) -> DistillationLoss:
    """Return the loss of a student whose teacher has six tokens fewer."""
    return DistillationLoss(0.7, 2.0, vocabulary - 6, has_tail=True, is_sampled=False)


TOKEN_LOSS = partial(token_loss, options={})
LABELED_LOSS = partial(labeled_loss, options={})
TARGET_LOSS = partial(target_loss, start=0, padding=0, options={"use_cache": False})


def distil_loss(vocabulary: int = VOCABULARY) -> Any:
    """Return the loss of task distil."""
    return partial(distil._loss_of, loss=distillation_loss(vocabulary), options={})


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that torch returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return results
