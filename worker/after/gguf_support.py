"""What llama.cpp computes for a family: every other setting that changes logits is refused.

A GGUF file names an architecture, and llama.cpp knows by that name what to compute. It ignores a
key that it does not expect there (a window of Mistral's, say) and computes another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from protocol.base.errors import DataError

ARCHITECTURES: Final = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""By `model_type`: what llama.cpp calls it."""

_INSTEAD: Final = "use the model's directory as it is"
_WRITTEN: Final = frozenset({
    "bos_token_id", "eos_token_id", "head_dim", "hidden_size", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "pad_token_id", "rms_norm_eps", "tie_word_embeddings", "vocab_size",
})  # fmt: skip
"""Settings that the file holds, as keys or by its tensors."""
_OF_WINDOWS: Final = frozenset({
    "layer_types", "max_window_layers", "sliding_window", "use_sliding_window",
})  # fmt: skip
_WITHOUT_EFFECT: Final = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "dtype", "id2label",
    "initializer_range", "label2id", "model_type", "output_attentions", "output_hidden_states",
    "pretraining_tp", "problem_type", "return_dict", "transformers_version", "use_cache",
})  # fmt: skip
"""Settings of training, of what a call returns, and of splitting matrices that gives the same."""
_BIASES: Final = {"LLAMA": {"attention_bias", "mlp_bias"}}
"""By architecture: biases that llama.cpp takes from the tensors where there are some."""
_ACTIVATIONS: Final = ("silu", "swish")
_SCALED: Final = {"rope_theta", "factor", "original_max_position_embeddings"}
_ROPE_KEYS: Final = {
    "default": {"rope_theta"},
    "linear": _SCALED,
    "yarn": _SCALED,
    "llama3": {
        "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
        "original_max_position_embeddings",
    },
}  # fmt: skip
"""By type of rotary positions: what the file holds of them."""


def check_config(config: Any) -> str:
    """Return llama.cpp's name for the architecture of a model with this configuration.

    Raises:
        DataError: llama.cpp has none, or would compute something else.
    """
    known = ARCHITECTURES.get(config.model_type)
    if known is None:
        raise DataError(
            f"expected a model of type {', '.join(ARCHITECTURES)} for GGUF, got "
            f"{config.model_type!r}; {_INSTEAD}"
        )
    _check_window(config)
    _check_rope(rope(config))
    for key, value in _other_settings(config, known):
        raise DataError(
            f"expected a {config.model_type} without {key} {value!r} for GGUF, as llama.cpp "
            f"computes it without; {_INSTEAD}"
        )
    return known


def rope(config: Any) -> Mapping[str, Any]:
    """Return the settings of rotary positions, of both ways in which transformers has kept them."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    theta = found.get("rope_theta", getattr(config, "rope_theta", None) or 10_000.0)
    return {"rope_type": "default", **found, "rope_theta": float(theta)}


def _check_window(config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is None or "sliding_attention" not in layers:
        return
    longest = config.max_position_embeddings
    if window < longest:
        raise DataError(
            f"expected a {config.model_type} whose tokens attend to all {longest} positions for "
            f"GGUF, got sliding_window {window}, which llama.cpp ignores; if no text is longer "
            f"than {window} tokens, set max_position_embeddings to {window} in the model's "
            f"config.json, else {_INSTEAD}"
        )


def _check_rope(found: Mapping[str, Any]) -> None:
    written = _ROPE_KEYS.get(found["rope_type"])
    if written is None:
        raise DataError(
            f"expected rotary positions of type {', '.join(_ROPE_KEYS)} for GGUF, got the scaling "
            f"{found['rope_type']!r}; {_INSTEAD}"
        )
    plain = {"partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True}
    for key, value in found.items():
        if key not in {*written, "rope_type", "type"} and value not in {None, plain.get(key)}:
            raise DataError(
                f"expected rotary positions without {key} {value!r} for GGUF, as llama.cpp "
                f"computes them without; {_INSTEAD}"
            )


def _other_settings(config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    """Yield each setting of the family that is not its default, and that the file does not hold."""
    if config.hidden_act not in _ACTIVATIONS:
        yield "hidden_act", config.hidden_act
    width = getattr(config, "head_dim", None)
    if (
        architecture == "QWEN2"
        and width
        and width * config.num_attention_heads != config.hidden_size
    ):
        yield "head_dim", width
    apart = {"hidden_act", "rope_parameters", "rope_scaling", "rope_theta"}
    apart |= _WRITTEN | _OF_WINDOWS | _WITHOUT_EFFECT | _BIASES.get(architecture, set())
    for key, usual in type(config)().to_dict().items():
        value = getattr(config, key, usual)
        if key not in apart and value != usual:
            yield key, value
