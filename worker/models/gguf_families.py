"""What llama.cpp computes for a family: every other setting that changes logits is refused.

A GGUF file names an architecture, and llama.cpp knows by that name what to compute. It ignores a
key that it does not expect there (a window of Mistral's, say) and computes another model. Source:
src/models of https://github.com/ggml-org/llama.cpp, one file for each architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from protocol.base.errors import DataError

_GELU: Final = ("gelu_pytorch_tanh",)
_SILU: Final = ("silu", "swish")
_OF_BIASES: Final = frozenset({"attention_bias", "mlp_bias"})
_OF_EXPERTS: Final = frozenset({
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_local_experts",
    "shared_expert_intermediate_size",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """How llama.cpp computes the models of one `model_type`.

    Attributes:
        architecture: llama.cpp's name for it.
        activations: The activation functions that it computes.
        written: Settings that the file holds as keys or by its tensors, beside the usual ones.
        fixed: The values of settings that llama.cpp knows without the file, for a configuration.
        head: Whether a head may be the embedding's matrix, must be it, or needs a tensor of its
            own.
        rotates_pairs: Rotary positions turn neighboring pairs of a head, not its two halves.
        divides_frequencies: It reads divisors of rotary frequencies, as Llama 3 has them.
        adds_one_to_norms: Norms multiply by 1 + weight; the file holds the sum.
    """

    architecture: str
    activations: tuple[str, ...] = _SILU
    written: frozenset[str] = frozenset()
    fixed: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    head: Literal["either", "tied", "separate"] = "either"
    rotates_pairs: bool = False
    divides_frequencies: bool = False
    adds_one_to_norms: bool = False


def _windows_every(config: Any, period: int, large_layers: int) -> Mapping[str, Any]:
    """Gemma's: the last layer of each period attends to everything; the largest model's scale."""
    heads = config.num_attention_heads
    is_large = config.num_hidden_layers == large_layers
    return {
        "layer_types": [
            "full_attention" if (number + 1) % period == 0 else "sliding_attention"
            for number in range(config.num_hidden_layers)
        ],
        "query_pre_attn_scalar": config.hidden_size // heads if is_large else config.head_dim,
    }


def _smollm3(config: Any) -> Mapping[str, Any]:
    layers = range(config.num_hidden_layers)
    return {
        "no_rope_layers": [int((number + 1) % 4 != 0) for number in layers],
        "no_rope_layer_interval": config.no_rope_layer_interval,  # (what makes the list)
    }


_LLAMA: Final = Family(
    "LLAMA", written=_OF_BIASES | _OF_EXPERTS, rotates_pairs=True, divides_frequencies=True
)
FAMILIES: Final[Mapping[str, Family]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Family("QWEN2"),
    "qwen3": Family("QWEN3"),
    "qwen2_moe": Family("QWEN2MOE", written=_OF_EXPERTS, head="separate"),
    "qwen3_moe": Family(
        "QWEN3MOE", written=_OF_EXPERTS, fixed=lambda _: {"norm_topk_prob": True}
    ),
    "phi3": Family("PHI3"),
    "gemma": Family("GEMMA", _GELU, head="tied", adds_one_to_norms=True),
    "gemma2": Family(
        "GEMMA2", _GELU,
        frozenset({"attn_logit_softcapping", "final_logit_softcapping", "sliding_window"}),
        lambda config: _windows_every(config, 2, 46), head="tied", adds_one_to_norms=True,
    ),
    "gemma3_text": Family(
        "GEMMA3", _GELU, frozenset({"sliding_window"}),
        lambda config: _windows_every(config, 6, 62), adds_one_to_norms=True,
    ),
    "granite": Family(
        "GRANITE",
        written=_OF_BIASES | {"attention_multiplier", "embedding_multiplier", "logits_scaling",
                              "residual_multiplier"},
        rotates_pairs=True, divides_frequencies=True,
    ),
    "olmo2": Family("OLMO2", head="separate"),
    "smollm3": Family("SMOLLM3", fixed=_smollm3, rotates_pairs=True),
}  # fmt: skip
"""By `model_type`."""

_INSTEAD: Final = "use the model's directory as it is"
_WRITTEN: Final = frozenset({
    "bos_token_id", "eos_token_id", "head_dim", "hidden_size", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "pad_token_id", "rms_norm_eps", "tie_word_embeddings", "vocab_size",
})  # fmt: skip
"""Settings that the file holds, as keys or by its tensors."""
_OF_WINDOWS: Final = frozenset({
    "_sliding_window_pattern", "layer_types", "max_window_layers", "sliding_window",
    "use_sliding_window",
})  # fmt: skip
_OF_ACTIVATION: Final = ("hidden_act", "hidden_activation")
_WITHOUT_EFFECT: Final = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "dtype", "embd_pdrop", "id2label",
    "initializer_range", "label2id", "model_type", "original_max_position_embeddings",
    "output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp",
    "problem_type", "resid_pdrop", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "transformers_version", "use_cache",
})  # fmt: skip
"""Settings of training, of what a call returns, of splitting matrices that gives the same, and of
rotary positions that are looked at where they are."""
_HEADS_DIVIDE_WIDTH: Final = ("OLMO2", "PHI3", "QWEN2", "QWEN2MOE")
"""Architectures without a key for the width of a head."""
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
ROPE_OF_WINDOWS: Final = {"rope_type": "default", "rope_theta": 10_000.0}
"""Gemma 3's in layers with a window, which llama.cpp knows without the file."""


def check_config(config: Any) -> Family:
    """Return how llama.cpp computes a model with this configuration.

    Raises:
        DataError: It has nothing for it, or would compute something else.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise DataError(
            f"expected a model of type {', '.join(FAMILIES)} for GGUF, got "
            f"{config.model_type!r}; {_INSTEAD}"
        )
    _check_rope(config, family)
    for key, value in _other_settings(config, family):
        raise DataError(
            f"expected a {config.model_type} without {key} {value!r} for GGUF, as llama.cpp "
            f"computes it without; {_INSTEAD}"
        )
    return family


def rope(config: Any) -> Mapping[str, Any]:
    """Return the settings of rotary positions, of both ways in which transformers has kept them.

    Where layers differ, those of layers that attend to everything.
    """
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = found.get("full_attention", found)
    theta = found.get("rope_theta", getattr(config, "rope_theta", None) or 10_000.0)
    return {"rope_type": "default", **found, "rope_theta": float(theta)}


def context_length(config: Any) -> int:
    """Return the longest text of which llama.cpp computes the model's logits.

    Where it ignores a sliding window, no text may be longer than that: within the window, every
    token attends to all before it.
    """
    longest = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    if not window or "sliding_attention" not in layers:
        return longest
    is_computed = "sliding_window" in FAMILIES[config.model_type].written
    return longest if is_computed else min(longest, int(window))


def _check_rope(config: Any, family: Family) -> None:
    found = rope(config)
    apart = set() if family.divides_frequencies else {"llama3"}
    apart |= {"yarn"} if "sliding_window" in family.written else set()
    known = [kind for kind in _ROPE_KEYS if kind not in apart]
    if found["rope_type"] not in known:
        raise DataError(
            f"expected rotary positions of type {', '.join(known)} for GGUF, got the scaling "
            f"{found['rope_type']!r}; {_INSTEAD}"
        )
    written = _ROPE_KEYS[found["rope_type"]]
    plain = {"partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True}
    for key, value in found.items():
        if key not in {*written, "rope_type", "type"} and value not in {None, plain.get(key)}:
            raise DataError(
                f"expected rotary positions without {key} {value!r} for GGUF, as llama.cpp "
                f"computes them without; {_INSTEAD}"
            )
    of_windows = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention")
    if of_windows not in (None, ROPE_OF_WINDOWS):
        raise DataError(
            "expected rotary positions with rope_theta 10000 in layers with a window for GGUF, as "
            f"llama.cpp computes them, got {of_windows}; {_INSTEAD}"
        )


def _other_settings(config: Any, family: Family) -> Iterator[tuple[str, Any]]:
    """Yield each setting of the family that is not its default, and that the file does not hold."""
    for key in _OF_ACTIVATION:
        if getattr(config, key, None) not in {None, *family.activations}:
            yield key, getattr(config, key)
    width = getattr(config, "head_dim", None)
    if (
        family.architecture in _HEADS_DIVIDE_WIDTH
        and width
        and width * config.num_attention_heads != config.hidden_size
    ):
        yield "head_dim", width
    fixed = family.fixed(config)
    apart = {*_OF_ACTIVATION, "rope_parameters", "rope_scaling", "rope_theta"}
    apart |= _WRITTEN | _OF_WINDOWS | _WITHOUT_EFFECT | family.written
    for key, usual in {**type(config)().to_dict(), **fixed}.items():
        value = getattr(config, key, usual)
        if (key not in apart or key in fixed) and value != usual:
            yield key, value
