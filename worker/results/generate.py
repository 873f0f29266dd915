"""`worker generate`: text from a language model, token by token.

Decoding is greedy, or samples with a temperature from the most probable tokens (nucleus sampling,
Holtzman et al. 2019, arXiv:1904.09751). Random values come from `backends.base.draws`, so the same
seed and logits give the same text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import jinja2
import torch

from backends.base import draws
from protocol.base.errors import DataError, describe_error
from worker.models.pretrained import max_sample_tokens
from worker.models.tokens import (
    check_tokens,
    end_tokens,
    find_message_end,
    marks_around_text,
    remove_whitespace,
)
from worker.results.load import is_seq2seq, probe_tokens, vocabulary_of

_CACHES: Final = ("past_key_values", "cache_params")
"""Keywords of forward for the state of attention and of state-space models."""
_CACHED_TOKENS: Final = 4
"""Number of probe tokens that are computed one by one, to test a model's cache."""
_CACHE_TOLERANCE: Final = 1e-3
"""Tolerance for float32, relative to the largest logit, or to 1 if that is larger."""
_INCOMPLETE_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for choosing the next token.

    Attributes:
        temperature: Divisor of logits; 0 always chooses the likeliest token.
        top_p: Sample only from the likeliest tokens with this total probability.
        seed: Seed of the random values.
        max_tokens: Maximum number of tokens.
    """

    temperature: float
    top_p: float
    seed: int
    max_tokens: int


def prompt_tokens(tokenizer: Any, prompt: str, system: str | None) -> list[int]:
    """Tokenize a prompt, as a user message if the tokenizer has a chat template.

    Raises:
        DataError: The template refuses the prompt, or the prompt has no tokens.
    """
    if tokenizer.chat_template:
        system_messages = [{"role": "system", "content": system}] if system is not None else []
        messages = [*system_messages, {"role": "user", "content": prompt}]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(
                "the tokenizer's chat template refuses this conversation: "
                f"{describe_error(error)}; change the prompt or --system"
            ) from None
        for value, option in ((system, "--system"), (prompt, "the prompt")):
            if value and find_message_end(remove_whitespace(text), value) < 0:
                raise DataError(
                    f"{option}: expected a chat template that writes this text, got one that drops "
                    "it; use a model whose template writes it"
                )
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    elif system is not None:
        raise DataError(
            "--system: expected a tokenizer with a chat template, found none; leave --system out"
        )
    else:
        # Like running text in training: with the begin token, but without an end token.
        begin_tokens, _ = marks_around_text(tokenizer)
        ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        ids = [*begin_tokens, *ids] if ids else []
    if not ids:
        raise DataError("expected a prompt with text, got one without tokens; write some text")
    return [int(token) for token in ids]


def source_tokens(tokenizer: Any, source: str, system: str | None) -> list[int]:
    """Tokenize a source text for an encoder-decoder, as in training.

    Raises:
        DataError: There is a system message, or the source has no tokens.
    """
    if system is not None:
        raise DataError(
            "--system: expected none for an encoder-decoder, which reads one text; leave --system "
            "out"
        )
    ids = tokenizer(source, verbose=False)["input_ids"] if source.strip() else []
    if not ids:
        raise DataError("expected a prompt with text, got one without tokens; write some text")
    return [int(token) for token in ids]


def generate(model: Any, tokenizer: Any, prompt: list[int], sampling: Sampling) -> Iterator[str]:
    """Yield pieces of text as soon as they are final, up to an end token or `max_tokens`.

    Args:
        model: A language model with its head, a decoder or an encoder-decoder, in evaluation mode.
        tokenizer: The model's tokenizer.
        prompt: Tokens of the prompt; see `prompt_tokens`.
        sampling: Settings for choosing tokens.

    Raises:
        DataError: Prompt and `max_tokens` exceed the model's positions, or the prompt has tokens
            outside the model's vocabulary.
    """
    check_tokens(max(prompt), vocabulary_of(model))
    limit = max_sample_tokens(model)
    if is_seq2seq(model):
        if max(len(prompt), sampling.max_tokens) > limit:
            raise DataError(
                f"expected at most {limit} tokens of prompt and as many of --max-tokens, the "
                f"model's positions, got {len(prompt)} and {sampling.max_tokens}; lower "
                "--max-tokens or shorten the prompt"
            )
        ends = end_tokens(model, tokenizer)
        return _decode_incrementally(tokenizer, _target_tokens(model, prompt, sampling, ends))
    if len(prompt) + sampling.max_tokens > limit:
        raise DataError(
            f"expected at most {limit} tokens of prompt and --max-tokens together, the model's "
            f"positions, got {len(prompt)} and {sampling.max_tokens}; lower --max-tokens"
        )
    return _decode_incrementally(
        tokenizer, _generate_tokens(model, prompt, sampling, end_tokens(model, tokenizer))
    )


def _generate_tokens(
    model: Any, prompt: list[int], sampling: Sampling, ends: frozenset[int]
) -> Iterator[int]:
    all_tokens, cache = torch.tensor([prompt], device=model.device), _find_cache_keyword(model)
    input_ids, options = all_tokens, _options(model, cache)
    uniforms = draws.uniforms(draws.derive_key(sampling.seed, "generate"), sampling.max_tokens)
    with torch.no_grad():
        for number in range(sampling.max_tokens):
            output = model(input_ids=input_ids, **options)
            token = choose_token(
                output.logits[0, -1].float().cpu(), sampling, float(uniforms[number])
            )
            if token in ends:
                return
            yield token
            input_ids = torch.tensor([[token]], device=model.device)
            if cache is None:
                input_ids = all_tokens = torch.cat([all_tokens, input_ids], 1)
            else:
                options[cache] = output[cache]


def _target_tokens(
    model: Any, source: list[int], sampling: Sampling, ends: frozenset[int]
) -> Iterator[int]:
    """Yield the tokens that an encoder-decoder generates for a source."""
    source_ids = torch.tensor([source], device=model.device)
    target = torch.tensor([[model.config.decoder_start_token_id]], device=model.device)
    uniforms = draws.uniforms(draws.derive_key(sampling.seed, "generate"), sampling.max_tokens)
    with torch.no_grad():
        encoder_outputs = _base_model(model).get_encoder()(input_ids=source_ids)
        for number in range(sampling.max_tokens):
            model_output = model(
                encoder_outputs=encoder_outputs, decoder_input_ids=target, use_cache=False
            )
            token = choose_token(
                model_output.logits[0, -1].float().cpu(), sampling, float(uniforms[number])
            )
            if token in ends:
                return
            yield token
            target = torch.cat([target, torch.tensor([[token]], device=model.device)], 1)


def _options(model: Any, cache: str | None) -> dict[str, Any]:
    """Return the keywords of the first forward pass."""
    parameters = inspect.signature(_base_model(model).forward).parameters
    return {"use_cache": cache is not None} if "use_cache" in parameters else {}


def _base_model(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _find_cache_keyword(model: Any) -> str | None:
    """Return the keyword that carries a model's state from token to token.

    Returns None if the model has no such keyword, or if its logits with the state differ from those
    of the whole text: some families store their state elsewhere, or count positions by other
    keywords.
    """
    parameters = inspect.signature(_base_model(model).forward).parameters
    ids = probe_tokens(vocabulary_of(model)).to(model.device)
    for cache in _CACHES:
        if cache in parameters and "use_cache" in parameters:
            with torch.no_grad():
                full_logits = model(input_ids=ids, use_cache=False).logits
                output = model(input_ids=ids[:, :-_CACHED_TOKENS], use_cache=True)
                parts = [output.logits]
                for position in range(ids.shape[1] - _CACHED_TOKENS, ids.shape[1]):
                    if output.get(cache) is None:
                        return None
                    state = {cache: output[cache], "use_cache": True}
                    output = model(input_ids=ids[:, position : position + 1], **state)
                    parts.append(output.logits)
            difference = (torch.cat(parts, 1) - full_logits).abs().max()
            return (
                cache if difference <= _CACHE_TOLERANCE * max(1, full_logits.abs().max()) else None
            )
    return None


def choose_token(logits: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """Choose the next token.

    Args:
        logits: Logits of all tokens, float32 (vocabulary,).
        sampling: Settings for the choice.
        uniform: A random value in [0, 1).
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = (
        (logits.double() / sampling.temperature).softmax(0).sort(descending=True, stable=True)
    )
    sums = probabilities.cumsum(0)
    # The token that reaches top_p is included.
    count = min(int((sums < sampling.top_p).sum()) + 1, len(sums))
    rank = int((sums[:count] <= uniform * float(sums[count - 1])).sum())
    return int(tokens[min(rank, count - 1)])


def _decode_incrementally(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Yield text once its characters are complete, since a token may be part of a character."""
    ids: list[int] = []
    printed = ""
    for token in tokens:
        ids.append(token)
        text = _text(tokenizer, ids)
        if text.startswith(printed) and not text.endswith(_INCOMPLETE_CHARACTER):
            yield text[len(printed) :]
            printed = text
    text = _text(tokenizer, ids)
    if text != printed:
        yield text[len(printed) :]


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
