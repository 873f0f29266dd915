"""`worker generate`: text from a language model, token by token.

Greedy, or drawn with a temperature from the most probable tokens (nucleus sampling, Holtzman et
al. 2019, arXiv:1904.09751). Draws are `backends.base.draws`, so a seed gives the same text again
wherever the logits are the same.
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
from worker.models.pretrained import positions
from worker.models.tokens import (
    check_tokens,
    end_tokens,
    marks_around_text,
    where_said,
    without_spaces,
)
from worker.results.load import is_seq2seq, probe_tokens, vocabulary_of

_CACHES: Final = ("past_key_values", "cache_params")
"""Keywords of forward for the state of attention, and of state-space models."""
_CACHED_TOKENS: Final = 4
_CACHE_TOLERANCE: Final = 1e-3
"""Tolerance for float32, relative to the largest logit, or to 1 if that is larger."""
_HALF_A_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: Divisor of logits; 0 always takes the likeliest token.
        top_p: Draw only among the likeliest tokens with this total probability.
        seed: Seed of the draws.
        max_tokens: Maximum number of tokens.
    """

    temperature: float
    top_p: float
    seed: int
    max_tokens: int


def prompt_tokens(tokenizer: Any, prompt: str, system: str | None) -> list[int]:
    """Tokenize a prompt, as a user's message if the tokenizer has a chat template.

    Raises:
        DataError: The template refuses it, or nothing is left of the prompt.
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
            if value and where_said(without_spaces(text), value) < 0:
                raise DataError(
                    f"{option}: the tokenizer's chat template leaves it out, so the model would "
                    "not read it; use a model whose template writes it"
                )
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    elif system is not None:
        raise DataError(
            "--system: expected a tokenizer with a chat template, found none; leave --system out"
        )
    else:
        # As running text is read in training: begun, and not ended.
        before, _ = marks_around_text(tokenizer)
        ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        ids = [*before, *ids] if ids else []
    if not ids:
        raise DataError("expected a prompt with text in it, got none that the tokenizer knows")
    return [int(each) for each in ids]


def source_tokens(tokenizer: Any, source: str, system: str | None) -> list[int]:
    """Return a source as an encoder-decoder reads it in training.

    Raises:
        DataError: There is a system message, or nothing is left of the source.
    """
    if system is not None:
        raise DataError("--system: an encoder-decoder reads one text; leave --system out")
    ids = tokenizer(source, verbose=False)["input_ids"] if source.strip() else []
    if not ids:
        raise DataError("expected a prompt with text in it, got none that the tokenizer knows")
    return [int(each) for each in ids]


def generate(model: Any, tokenizer: Any, prompt: list[int], sampling: Sampling) -> Iterator[str]:
    """Yield pieces of text as soon as they are final, up to an end token or `max_tokens`.

    Args:
        model: A decoder with its head, in evaluation mode.
        tokenizer: The model's tokenizer.
        prompt: Tokens of the prompt; see `prompt_tokens`.
        sampling: How tokens are chosen.

    Raises:
        DataError: The prompt and what is asked for are longer than the model has positions, or the
            prompt has tokens that the model does not know.
    """
    check_tokens(max(prompt), vocabulary_of(model))
    limit = positions(model)
    if is_seq2seq(model):
        ends = end_tokens(model, tokenizer)
        return _pieces(tokenizer, _target_tokens(model, prompt, sampling, ends))
    if len(prompt) + sampling.max_tokens > limit:
        raise DataError(
            f"expected a prompt and --max-tokens of {limit} tokens together, the model's "
            f"positions, got {len(prompt)} and {sampling.max_tokens}; lower --max-tokens"
        )
    return _pieces(tokenizer, _tokens(model, prompt, sampling, end_tokens(model, tokenizer)))


def _tokens(
    model: Any, prompt: list[int], sampling: Sampling, ends: frozenset[int]
) -> Iterator[int]:
    text, cache = torch.tensor([prompt], device=model.device), _cache(model)
    step, options = text, _options(model, cache)
    uniforms = draws.uniforms(draws.key_of(sampling.seed, "generate"), sampling.max_tokens)
    with torch.no_grad():
        for number in range(sampling.max_tokens):
            out = model(input_ids=step, **options)
            token = choose(out.logits[0, -1].float().cpu(), sampling, float(uniforms[number]))
            if token in ends:
                return
            yield token
            step = torch.tensor([[token]], device=model.device)
            if cache is None:
                step = text = torch.cat([text, step], 1)
            else:
                options[cache] = out[cache]


def _target_tokens(
    model: Any, source: list[int], sampling: Sampling, ends: frozenset[int]
) -> Iterator[int]:
    """The tokens that an encoder-decoder makes of a source."""
    read = torch.tensor([source], device=model.device)
    output = torch.tensor([[model.config.decoder_start_token_id]], device=model.device)
    uniforms = draws.uniforms(draws.key_of(sampling.seed, "generate"), sampling.max_tokens)
    with torch.no_grad():
        encoded = _undecorated(model).get_encoder()(input_ids=read)
        for number in range(sampling.max_tokens):
            out = model(encoder_outputs=encoded, decoder_input_ids=output, use_cache=False)
            token = choose(out.logits[0, -1].float().cpu(), sampling, float(uniforms[number]))
            if token in ends:
                return
            yield token
            output = torch.cat([output, torch.tensor([[token]], device=model.device)], 1)


def _options(model: Any, cache: str | None) -> dict[str, Any]:
    """Keywords of the first forward pass."""
    parameters = inspect.signature(_undecorated(model).forward).parameters
    return {"use_cache": cache is not None} if "use_cache" in parameters else {}


def _undecorated(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _cache(model: Any) -> str | None:
    """Return the keyword that carries a model's state from token to token.

    None where there is none, or where it does not lead to the logits of the whole text: some
    families keep their state elsewhere, or count positions by keywords of their own.
    """
    parameters = inspect.signature(_undecorated(model).forward).parameters
    ids = probe_tokens(vocabulary_of(model)).to(model.device)
    for cache in _CACHES:
        if cache in parameters and "use_cache" in parameters:
            with torch.no_grad():
                whole = model(input_ids=ids, use_cache=False).logits
                out = model(input_ids=ids[:, :-_CACHED_TOKENS], use_cache=True)
                parts = [out.logits]
                for at in range(ids.shape[1] - _CACHED_TOKENS, ids.shape[1]):
                    if out.get(cache) is None:
                        return None
                    state = {cache: out[cache], "use_cache": True}
                    out = model(input_ids=ids[:, at : at + 1], **state)
                    parts.append(out.logits)
            difference = (torch.cat(parts, 1) - whole).abs().max()
            return cache if difference <= _CACHE_TOLERANCE * max(1, whole.abs().max()) else None
    return None


def choose(logits: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """Choose the next token.

    Args:
        logits: Logits of all tokens, float32 (vocabulary,).
        sampling: How to choose.
        uniform: A draw in [0, 1).
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = (
        (logits.double() / sampling.temperature).softmax(0).sort(descending=True, stable=True)
    )
    sums = probabilities.cumsum(0)
    # The token that reaches the share is the last one in.
    count = min(int((sums < sampling.top_p).sum()) + 1, len(sums))
    at = int((sums[:count] <= uniform * float(sums[count - 1])).sum())
    return int(tokens[min(at, count - 1)])


def _pieces(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Yield text as characters are complete: a token may be part of one."""
    ids: list[int] = []
    printed = ""
    for token in tokens:
        ids.append(token)
        text = _text(tokenizer, ids)
        if text.startswith(printed) and not text.endswith(_HALF_A_CHARACTER):
            yield text[len(printed) :]
            printed = text
    text = _text(tokenizer, ids)
    if text != printed:
        yield text[len(printed) :]


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
