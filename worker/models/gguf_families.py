"""Settings that llama.cpp supports for each family; other settings that change logits are refused.

A GGUF file names an architecture, by which llama.cpp chooses the computation. llama.cpp ignores
keys that it does not expect, such as a window in Mistral, and then computes another model. Source:
src/models of https://github.com/ggml-org/llama.cpp, one file for each architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from protocol.base.errors import DataError

_GELU: Final = ("gelu_pytorch_tanh",)
_SILU: Final = ("silu", "swish")
_BIAS_KEYS: Final = frozenset({"attention_bias", "mlp_bias"})
_EXPERT_KEYS: Final = frozenset({
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_local_experts",
    "shared_expert_intermediate_size",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of llama.cpp's computation for the models of one `model_type`.

    Attributes:
        architecture: llama.cpp's name for the family.
        activations: The activation functions that llama.cpp computes for it.
        stored_keys: Settings that the file holds as keys or that its tensors imply, in addition to
            `_STORED_KEYS`.
        fixed_settings: Maps a configuration to the settings that llama.cpp has built in, which the
            file does not hold.
        head: Whether the head may share the embedding's matrix, must share it, or needs its own
            tensor.
        rotates_pairs: Whether rotary positions rotate neighboring pairs of a head, not its two
            halves.
        divides_frequencies: Whether llama.cpp reads divisors of rotary frequencies, as for Llama 3.
        adds_one_to_norms: Whether norms multiply by 1 + weight; the file holds 1 + weight.
    """

    architecture: str
    activations: tuple[str, ...] = _SILU
    stored_keys: frozenset[str] = frozenset()
    fixed_settings: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    head: Literal["either", "tied", "separate"] = "either"
    rotates_pairs: bool = False
    divides_frequencies: bool = False
    adds_one_to_norms: bool = False


def _windows_with_period(config: Any, period: int, large_layers: int) -> Mapping[str, Any]:
    """Return Gemma's layer types and attention scale.

    The last layer of each period attends to all tokens.
    """
    heads = config.num_attention_heads
    is_large = config.num_hidden_layers == large_layers
    return {
        "layer_types": [
            "full_attention" if (number + 1) % period == 0 else "sliding_attention"
            for number in range(config.num_hidden_layers)
        ],
        "query_pre_attn_scalar": config.hidden_size // heads if is_large else config.head_dim,
    }


def _smollm3_settings(config: Any) -> Mapping[str, Any]:
    layers = range(config.num_hidden_layers)
    return {
        "no_rope_layers": [int((number + 1) % 4 != 0) for number in layers],
        "no_rope_layer_interval": config.no_rope_layer_interval,  # determines the list
    }


_LLAMA: Final = Family(
    "LLAMA", stored_keys=_BIAS_KEYS | _EXPERT_KEYS, rotates_pairs=True, divides_frequencies=True
)
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Family("QWEN2"),
    "qwen3": Family("QWEN3"),
    "qwen2_moe": Family("QWEN2MOE", stored_keys=_EXPERT_KEYS, head="separate"),
    "qwen3_moe": Family(
        "QWEN3MOE", stored_keys=_EXPERT_KEYS, fixed_settings=lambda _: {"norm_topk_prob": True}
    ),
    "phi3": Family("PHI3"),
    "gemma": Family("GEMMA", _GELU, head="tied", adds_one_to_norms=True),
    "gemma2": Family(
        "GEMMA2", _GELU,
        frozenset({"attn_logit_softcapping", "final_logit_softcapping", "sliding_window"}),
        lambda config: _windows_with_period(config, 2, 46), head="tied", adds_one_to_norms=True,
    ),
    "gemma3_text": Family(
        "GEMMA3", _GELU, frozenset({"sliding_window"}),
        lambda config: _windows_with_period(config, 6, 62), adds_one_to_norms=True,
    ),
    "granite": Family(
        "GRANITE",
        stored_keys=_BIAS_KEYS | {"attention_multiplier", "embedding_multiplier", "logits_scaling",
                              "residual_multiplier"},
        rotates_pairs=True, divides_frequencies=True,
    ),
    "olmo2": Family("OLMO2", head="separate"),
    "smollm3": Family("SMOLLM3", fixed_settings=_smollm3_settings, rotates_pairs=True),
}  # fmt: skip
"""Families by `model_type`."""

_REMEDY: Final = "use the model's directory as it is"
_STORED_KEYS: Final = frozenset({
    "bos_token_id", "eos_token_id", "head_dim", "hidden_size", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "pad_token_id", "rms_norm_eps", "tie_word_embeddings", "vocab_size",
})  # fmt: skip
"""Settings that the file holds as keys or that its tensors imply."""
_WINDOW_KEYS: Final = frozenset({
    "_sliding_window_pattern", "layer_types", "max_window_layers", "sliding_window",
    "use_sliding_window",
})  # fmt: skip
_ACTIVATION_KEYS: Final = ("hidden_act", "hidden_activation")
_KEYS_WITHOUT_EFFECT: Final = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "dtype", "embd_pdrop", "id2label",
    "initializer_range", "label2id", "model_type", "original_max_position_embeddings",
    "output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp",
    "problem_type", "resid_pdrop", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "transformers_version", "use_cache",
})  # fmt: skip
"""Settings that do not change logits (training, a call's outputs, equivalent matrix splits), and a
rotary setting that `_check_rope` checks.
"""
_HEADS_DIVIDE_WIDTH: Final = ("OLMO2", "PHI3", "QWEN2", "QWEN2MOE")
"""Architectures without a key for the width of a head: it is the hidden size / heads."""
_SCALED_ROPE_KEYS: Final = {"rope_theta", "factor", "original_max_position_embeddings"}
_ROPE_KEYS: Final = {
    "default": {"rope_theta"},
    "linear": _SCALED_ROPE_KEYS,
    "yarn": _SCALED_ROPE_KEYS,
    "llama3": {
        "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
        "original_max_position_embeddings",
    },
}  # fmt: skip
"""The keys that a file holds, by type of rotary positions."""
ROPE_OF_WINDOWS: Final = {"rope_type": "default", "rope_theta": 10_000.0}
"""Rotary positions of Gemma 3's layers with a window; llama.cpp has them built in."""


def check_config(config: Any) -> Family:
    """Return the family of a configuration, if llama.cpp computes the same model.

    Raises:
        DataError: llama.cpp does not support the configuration, or computes another model with it.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise DataError(
            f"expected a model of type {', '.join(FAMILIES)} for GGUF, got "
            f"{config.model_type!r}; {_REMEDY}"
        )
    _check_rope(config, family)
    for key, value in _unsupported_settings(config, family):
        raise DataError(
            f"expected a {config.model_type} without {key} {value!r} for GGUF, as llama.cpp "
            f"ignores this setting; {_REMEDY}"
        )
    return family


def rope(config: Any) -> Mapping[str, Any]:
    """Return the settings of rotary positions, in old or new configurations of transformers.

    If layers differ, these are the settings of layers that attend to all tokens.
    """
    settings = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    settings = settings.get("full_attention", settings)
    theta = settings.get("rope_theta", getattr(config, "rope_theta", None) or 10_000.0)
    return {"rope_type": "default", **settings, "rope_theta": float(theta)}


def context_length(config: Any) -> int:
    """Return the length in tokens of the longest text for which llama.cpp computes correct logits.

    If llama.cpp ignores a sliding window, no text may be longer than the window: in shorter texts,
    every token attends to all earlier tokens.
    """
    max_tokens = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if not window or "sliding_attention" not in layers:
        return max_tokens
    is_computed = "sliding_window" in FAMILIES[config.model_type].stored_keys
    return max_tokens if is_computed else min(max_tokens, int(window))


def _check_rope(config: Any, family: Family) -> None:
    settings = rope(config)
    unsupported_types = set() if family.divides_frequencies else {"llama3"}
    unsupported_types |= {"yarn"} if "sliding_window" in family.stored_keys else set()
    supported_types = [name for name in _ROPE_KEYS if name not in unsupported_types]
    if settings["rope_type"] not in supported_types:
        raise DataError(
            f"expected rotary positions of type {', '.join(supported_types)} for GGUF, got the "
            f"scaling {settings['rope_type']!r}; {_REMEDY}"
        )
    stored_keys = _ROPE_KEYS[settings["rope_type"]]
    neutral_values = {
        "partial_rotary_factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": True,
    }
    for key, value in settings.items():
        if key not in {*stored_keys, "rope_type", "type"} and value not in {
            None,
            neutral_values.get(key),
        }:
            raise DataError(
                f"expected rotary positions without {key} {value!r} for GGUF, as llama.cpp "
                f"ignores this setting; {_REMEDY}"
            )
    window_rope = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention")
    if window_rope not in (None, ROPE_OF_WINDOWS):
        raise DataError(
            "expected rotary positions with rope_theta 10000 in layers with a window for GGUF, as "
            f"llama.cpp computes them, got {window_rope}; {_REMEDY}"
        )


def _unsupported_settings(config: Any, family: Family) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each setting that llama.cpp does not compute.

    Settings that the file holds are left out.
    """
    for key in _ACTIVATION_KEYS:
        if getattr(config, key, None) not in {None, *family.activations}:
            yield key, getattr(config, key)
    width = getattr(config, "head_dim", None)
    if (
        family.architecture in _HEADS_DIVIDE_WIDTH
        and width
        and width * config.num_attention_heads != config.hidden_size
    ):
        yield "head_dim", width
    fixed_settings = family.fixed_settings(config)
    ignored_keys = {*_ACTIVATION_KEYS, "rope_parameters", "rope_scaling", "rope_theta"}
    ignored_keys |= _STORED_KEYS | _WINDOW_KEYS | _KEYS_WITHOUT_EFFECT | family.stored_keys
    for key, default in {**type(config)().to_dict(), **fixed_settings}.items():
        value = getattr(config, key, default)
        if (key not in ignored_keys or key in fixed_settings) and value != default:
            yield key, value
