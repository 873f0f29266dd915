"""Low-rank adaptation of frozen layers with peft, and the file layout of adapters.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import difflib
import json
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from transformers.pytorch_utils import Conv1D

from backends.base import draws
from backends.base.interface import Array
from backends.quantization.frozen_base import frozen_base
from backends.quantization.mapped_weights import quantize_tensor, release_pages
from backends.quantization.quantize import STORAGE, Storage, dequantize
from protocol.base.errors import DataError, describe_error
from protocol.exact.digest import digest_arrays
from protocol.spec.files.adapter import (
    ADAPTER_WEIGHTS,
    adapter_config,
    adapter_directory,
    check_lora,
    targets_of,
)
from protocol.spec.manifest import ADAPTER_CONFIG, Block, Export
from protocol.spec.sections.model import BaseDtype, LoraSpec
from worker.models.added_tokens import table_names
from worker.models.pretrained import fill

TaskType = Literal[
    "SEQ_CLS", "TOKEN_CLS", "CAUSAL_LM", "SEQ_2_SEQ_LM", "MASKED_LM", "FEATURE_EXTRACTION"
]

LOG_SCALE: Final = "log_scale"
"""Name of the learned temperature of models and adapters that embed texts: log(1 / temperature)."""
_ELEMENTS_AT_ONCE: Final = 1 << 20
_SHOWN_NAMES: Final = 16
"""Most names that a message lists."""

ATTENTION: Final = (
    ("q_proj", "v_proj"),
    ("query", "value"),
    ("q_lin", "v_lin"),
    ("query_proj", "value_proj"),
    ("q", "v"),
    ("query_key_value",),
    ("qkv_proj",),
    ("Wqkv",),
    ("c_attn",),
)
"""Names of attention's query and value layers, or of fused layers, by family of models."""


class Lora:
    """A frozen model with low-rank matrices for its target layers; `heads` are trained in full.

    Args:
        model: The model, whose parameters this freezes.
        spec: Rank, scale, dropout, targets and other options. The default targets are attention's
            query and value layers.
        task_type: The adapter's task type in peft.
        heads: Names of modules that are trained in full: a classifier's head, and modules that the
            checkpoint lacks.
        seed: The run's seed.
        adapter: Source of an adapter in PEFT's layout, whose training continues.
        added_tokens: Tokens whose rows of the embeddings and the head are trained.
        base_dtype: Stored dtype of the frozen base.

    Attributes:
        adapter_digest: Digest of the continued adapter; empty if there is none.

    Raises:
        DataError: A target is not in the model, no default targets are found, or the adapter
            belongs to another model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        spec: LoraSpec,
        task_type: TaskType,
        heads: Sequence[str],
        seed: int,
        *,
        adapter: str | None = None,
        added_tokens: Sequence[int] = (),
        base_dtype: BaseDtype = "float32",
    ) -> None:
        import peft  # noqa: PLC0415  (full fine-tuning does not need it)

        earlier_directory = None if adapter is None else adapter_directory(adapter)
        earlier_config = None if earlier_directory is None else adapter_config(earlier_directory)
        targets = spec.targets if isinstance(spec.targets, tuple) else None
        if earlier_directory is not None and earlier_config is not None:
            check_lora(earlier_directory, earlier_config, spec)
            targets = targets or targets_of(earlier_config)
        if spec.targets == "all-linear":
            targets = targets or _linear_layers(model, heads)
        targets = targets or _attention_targets(model)
        if earlier_directory is None:
            _refuse_unknown_names(model, spec)
        heads = list(dict.fromkeys([*heads, *spec.modules_to_save]))
        _refuse_adapted_heads(heads, targets)
        _refuse_tied_modules(model, spec.modules_to_save)
        self._config = {
            "bias": "none",
            "fan_in_fan_out": _has_transposed_weights(model, targets),
            "lora_alpha": _int_if_whole(spec.alpha),
            "lora_dropout": spec.dropout,
            "modules_to_save": list(heads) or None,
            "r": spec.r,
            "target_modules": list(targets),
            "task_type": None if task_type == "MASKED_LM" else task_type,  # peft has no type for it
            **_optional_keys(spec),
            **_trained_token_keys(model, added_tokens, heads, targets),
        }
        try:
            with warnings.catch_warnings():
                # peft warns about tied layers among the targets; `cut_into_blocks` handles them.
                warnings.simplefilter("ignore")
                config = peft.LoraConfig(**self._config)
                self.module: torch.nn.Module = peft.get_peft_model(model, config)
        except ValueError as error:
            raise DataError(
                f"cannot add LoRA to {', '.join(targets)}: {describe_error(error)}; "
                "check lora.targets"
            ) from None
        if earlier_directory is None:
            _refuse_unused_patterns(self.module, spec)
        _refuse_unusual_embeddings(self.module)
        _initialize_matrices(self.module, seed, STORAGE[base_dtype])
        if spec.dora and base_dtype != "float32":
            _use_base_product_in_dora(self.module)
        self.adapter_digest = (
            "" if earlier_directory is None else _load_adapter(self.module, earlier_directory)
        )

    def export(self, base: str, blocks: Sequence[Block], files: dict[str, str]) -> Export:
        """Return the adapter in the layout that `PeftModel.from_pretrained` reads.

        Args:
            base: Source of the frozen model.
            blocks: Blocks of the module.
            files: Further text files.
        """
        # Every version of peft knows these keys.
        config = self._config | {
            "base_model_name_or_path": base,
            "inference_mode": True,
            "init_lora_weights": True,
            "peft_type": "LORA",
        }
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        return Export(
            directory="adapter",
            weights_file="adapter_model.safetensors",
            names={
                tensor.name: adapter_name(tensor.name)
                for block in blocks
                for tensor in block.tensors
            },
            files={ADAPTER_CONFIG: text, **files},
        )


def _optional_keys(spec: LoraSpec) -> dict[str, Any]:
    """Return the keys of an adapter's configuration that are left out at their defaults."""
    alphas = {name: _int_if_whole(alpha) for name, alpha in spec.alpha_pattern.items()}
    keys = {
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": alphas,
        "target_parameters": list(spec.target_parameters),
    }
    return {key: value for key, value in keys.items() if value}


def _trained_token_keys(
    model: torch.nn.Module, tokens: Sequence[int], heads: Sequence[str], targets: Sequence[str]
) -> dict[str, Any]:
    """Return peft's key that trains the rows of these tokens, for tables not trained in full.

    Raises:
        DataError: A table has low-rank matrices, or this release of peft lacks the key.
    """
    tables = [name for name in table_names(model) if not is_named(name, heads)] if tokens else []
    adapted_tables = [name for name in tables if is_named(name, targets)]
    if adapted_tables:
        raise DataError(
            f"lora.targets names {adapted_tables[0].rpartition('.')[2]!r}, whose rows for "
            "model.added_tokens are already trained: leave it out, or name it in "
            "lora.modules_to_save"
        )
    if not tables:
        return {}
    import peft  # noqa: PLC0415

    if not hasattr(peft.LoraConfig, "trainable_token_indices"):
        raise DataError("model.added_tokens with lora needs peft 0.15; pip install -U peft")
    return {"trainable_token_indices": {name: sorted(tokens) for name in tables}}


def is_named(module: str, names: Sequence[str]) -> bool:
    """Return whether the name of a module or parameter is one of these, or ends with one.

    As in peft, `a.b.c` ends with `b.c`, but not with `c` inside a word.
    """
    return any(module == name or module.endswith(f".{name}") for name in names)


def _linear_layers(model: torch.nn.Module, heads: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all linear layers except the head's, as short as possible."""
    any_model: Any = model
    output_layer = (
        any_model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    )
    layers = [name for name, child in model.named_modules() if _is_adaptable(child)]
    head_names = [
        name
        for name, child in model.named_modules()
        if child is output_layer
        or any(name == head or name.startswith(f"{head}.") for head in heads)
    ]
    target_names = [name for name in layers if name not in head_names]
    last_names = {name.rpartition(".")[2] for name in target_names}
    ambiguous_names = {name.rpartition(".")[2] for name in head_names} & last_names
    return tuple(
        sorted(
            {
                name if name.rpartition(".")[2] in ambiguous_names else name.rpartition(".")[2]
                for name in target_names
            }
        )
    )


def _refuse_unknown_names(model: torch.nn.Module, spec: LoraSpec) -> None:
    """Refuse a name in `lora.targets` or `lora.target_parameters` that peft ignores.

    peft accepts a list if the model has one of its names, so a typo trains less than intended.

    Raises:
        DataError: The model has no module or parameter of that name.
    """
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    adaptable = sorted(
        {
            name.rpartition(".")[2]
            for name, child in model.named_modules()
            if _is_adaptable(child) or isinstance(child, torch.nn.Embedding)
        }
    )
    targets = spec.targets if isinstance(spec.targets, tuple) else ()
    for target in targets:
        if not any(is_named(name, (target,)) for name in modules):
            raise DataError(
                f"cannot add LoRA to {target}: expected layers of the model in lora.targets, got "
                f"{target!r}; it has {_similar_names(adaptable, target)}"
            )
    for target in spec.target_parameters:
        if not any(is_named(name, (target,)) for name in parameters):
            endings = sorted({".".join(name.split(".")[-3:]) for name in parameters})
            raise DataError(
                f"expected weights of the model in lora.target_parameters, got {target!r}; it has "
                f"{_similar_names(endings, target)}"
            )


def _refuse_unused_patterns(module: torch.nn.Module, spec: LoraSpec) -> None:
    """Refuse a key of `lora.rank_pattern` or `lora.alpha_pattern` that matches no adapted layer.

    Raises:
        DataError: A key matches no layer.
    """
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415
    from peft.utils.other import get_pattern_key  # noqa: PLC0415

    layers = [name for name, child in module.named_modules() if isinstance(child, LoraLayer)]
    patterns: dict[str, Mapping[str, float]] = {
        "rank_pattern": spec.rank_pattern, "alpha_pattern": spec.alpha_pattern,
    }  # fmt: skip
    for key, pattern in patterns.items():
        # If two keys match a layer, peft takes the first, so each key is tested alone.
        unused_keys = [
            pattern_key
            for pattern_key in pattern
            if all(
                get_pattern_key([pattern_key], layer_name) != pattern_key for layer_name in layers
            )
        ]
        if unused_keys:
            adapted_names = sorted({name.rpartition(".")[2] for name in layers})
            raise DataError(
                f"expected names of adapted layers in lora.{key}, got {unused_keys[0]!r}; "
                f"the run adapts {_similar_names(adapted_names, unused_keys[0])}"
            )


def _similar_names(names: Sequence[str], name: str) -> str:
    """Return these names as text; of many names, only those most similar to `name`."""
    similar = (
        names
        if len(names) <= _SHOWN_NAMES
        else difflib.get_close_matches(name, names, _SHOWN_NAMES, 0.0)
    )
    return ", ".join(similar)


def _refuse_tied_modules(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Refuse to train a module in full if another module shares its weight.

    Raises:
        DataError: A module's weight is shared, or there is no module of that name.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(owner_of(name))
    for module_name in names:
        matching_modules = [
            name
            for name, _ in model.named_modules()
            if name == module_name or name.endswith(f".{module_name}")
        ]
        if not matching_modules:
            raise DataError(
                f"lora.modules_to_save names {module_name!r}, which the model does not have; "
                "correct the name, or leave it out"
            )
        shared_owners = [
            sharing_modules
            for sharing_modules in owners.values()
            if len(sharing_modules) > 1 and {*sharing_modules} & {*matching_modules}
        ]
        if shared_owners:
            other_modules = sorted({*shared_owners[0]} - {*matching_modules})
            raise DataError(
                f"lora.modules_to_save names {module_name!r}, whose weight "
                f"{' and '.join(other_modules)} shares; training would separate them: name it in "
                "lora.targets instead"
            )


def head_modules(model: torch.nn.Module) -> list[str]:
    """Return the names of the head's modules: children other than the body, with parameters."""
    body = getattr(model, "base_model_prefix", "")
    return [
        name
        for name, child in model.named_children()
        if name != body and any(True for _ in child.parameters())
    ]


def list_new_modules(drawn_names: Collection[str], heads: Sequence[str]) -> tuple[str, ...]:
    """Return the sorted names of the modules of these parameters, except those in a head.

    Args:
        drawn_names: Names of the parameters that the checkpoint lacks, which are initialized at
            random.
        heads: Names of the head's modules.
    """
    owners = {owner_of(name) for name in drawn_names}
    return tuple(sorted(owner for owner in owners if owner.partition(".")[0] not in heads))


def owner_of(parameter: str) -> str:
    """Return the name of a parameter's module."""
    return parameter.rpartition(".")[0]


def _refuse_adapted_heads(heads: Sequence[str], targets: Sequence[str]) -> None:
    """Refuse low-rank matrices in a module that is trained in full.

    Raises:
        DataError: A target is trained in full.
    """
    adapted_heads = [
        head for head in heads if head.rpartition(".")[2] in targets or head in targets
    ]
    if adapted_heads:
        raise DataError(
            f"lora.targets names {adapted_heads[0]!r}, which is already trained in full; leave it "
            "out"
        )


def _refuse_unusual_embeddings(module: torch.nn.Module) -> None:
    """Refuse embeddings that forward does not call as plain lookups.

    Raises:
        DataError: A target is a table of positions, or the table that encoder and decoder share.
    """
    from peft.tuners.lora import Embedding  # noqa: PLC0415

    for name, layer in module.named_modules():
        if not isinstance(layer, Embedding):
            continue
        table: Any = layer.get_base_layer()
        target, remedy = name.rpartition(".")[2], "leave it out of lora.targets"
        is_plain = type(table).forward is torch.nn.Embedding.forward or hasattr(
            table, "embed_scale"
        )
        if target == "shared":
            is_plain, remedy = False, "name embed_tokens, of encoder and decoder, instead"
        if not is_plain:
            raise DataError(
                f"expected lora.targets of linear layers and plain embeddings, got {target!r}, a "
                f"{type(table).__name__} which the forward pass calls in another way; {remedy}"
            )


def _initialize_matrices(module: torch.nn.Module, seed: int, storage: Storage) -> None:
    """Initialize A as peft does (kaiming_uniform_ with a = sqrt(5)), and B with zeros.

    Random values come from `backends.base.draws`. DoRA's magnitudes are the norms of the stored
    weight's rows.
    """
    low_precision_ids = (
        {id(tensor) for tensor in frozen_base(module).values()} if storage != "f32" else set()
    )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_A." in name or ".lora_embedding_B." in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                key = draws.derive_key(seed, name)
                fill(parameter, draws.symmetric_uniforms(key, parameter.numel(), bound))
            elif ".lora_B." in name or ".lora_embedding_A." in name:
                parameter.zero_()
            elif ".lora_magnitude_vector." in name:
                layer: Any = module.get_submodule(name.partition(".lora_magnitude_vector.")[0])
                weight = layer.get_base_layer().weight
                rows = weight.detach()
                # For a table, peft takes the norms of columns: again one magnitude per output.
                if isinstance(layer.get_base_layer(), Conv1D | torch.nn.Embedding):
                    rows = rows.T
                fill(
                    parameter,
                    _row_norms(rows, storage if id(weight) in low_precision_ids else "f32"),
                )


def _row_norms(rows: torch.Tensor, storage: Storage) -> Array:
    """Return the norm of each row after rounding to the storage type, (rows,) float32.

    Sums are in float64, so the norms have the same bits on all machines.
    """
    norms = np.empty(len(rows), np.float32)
    rows_per_part = max(1, _ELEMENTS_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), rows_per_part):
        part = rows[start : start + rows_per_part]
        values = part.double().numpy()
        if storage != "f32":
            values = dequantize(quantize_tensor(part, storage)).astype(np.float64)
        norms[start : start + rows_per_part] = np.sqrt(np.square(values).sum(axis=1))
    release_pages(rows)
    return norms


def _use_base_product_in_dora(module: torch.nn.Module) -> None:
    """Make DoRA use the product that the base layer computes, instead of its weight.

    Otherwise autograd saves each layer's weight, converted to float32, for that product.
    """
    from peft.tuners.lora.dora import DoraLinearLayer  # noqa: PLC0415

    def add_base_result(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("base_result") is None:
            kwargs["base_result"] = kwargs["base_layer"](*args)
        return args, kwargs

    for layer in module.modules():
        if type(layer) is DoraLinearLayer:
            layer.register_forward_pre_hook(add_base_result, with_kwargs=True)


def _load_adapter(module: torch.nn.Module, directory: Path) -> str:
    """Copy an adapter's values into the module; return their digest.

    Raises:
        DataError: The adapter cannot be read, or its names and shapes are not those of this module.
    """
    from safetensors.torch import load_file  # noqa: PLC0415

    path = directory / ADAPTER_WEIGHTS
    try:
        adapter_tensors = {
            adapter_name(name): value.float() for name, value in load_file(path).items()
        }
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read the adapter's {str(path)!r}: {error}") from None
    adapter_tensors.pop(LOG_SCALE, None)  # the run spec sets the temperature
    trained_parameters = {
        adapter_name(name): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    wrong_names = sorted(adapter_tensors.keys() ^ trained_parameters.keys())
    wrong_names += [
        name
        for name in trained_parameters
        if name in adapter_tensors and adapter_tensors[name].shape != trained_parameters[name].shape
    ]
    if wrong_names:
        raise DataError(
            f"the adapter in {str(directory)!r} belongs to another model: {len(wrong_names)} of "
            f"its tensors (such as {wrong_names[0]!r}) differ from those that the run trains; set "
            "model.source to the adapter's base, and lora.targets to its targets"
        )
    with torch.no_grad():
        for name, parameter in trained_parameters.items():
            parameter.copy_(adapter_tensors[name])
    return digest_arrays({name: value.numpy() for name, value in adapter_tensors.items()})


def _attention_targets(model: torch.nn.Module) -> tuple[str, ...]:
    layers = {
        name.rpartition(".")[2] for name, child in model.named_modules() if _is_adaptable(child)
    }
    for targets in ATTENTION:
        if layers.issuperset(targets):
            return targets
    names = ", ".join(sorted(layers)[:12])
    raise DataError(
        "expected query and value projections with known names to adapt, found none among "
        f"{names}; name the layers in lora.targets"
    )


def _has_transposed_weights(model: torch.nn.Module, targets: Sequence[str]) -> bool:
    """Return whether any target layer has transposed weights, as in GPT-2."""
    target_layers = (
        child for name, child in model.named_modules() if name.endswith(tuple(targets))
    )
    return any(isinstance(child, Conv1D) for child in target_layers)


def _is_adaptable(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear | Conv1D)


def adapter_name(name: str) -> str:
    """Return the name of a module's parameter in an adapter's file.

    Names in files of earlier releases, in which embeddings end in `.default`, are translated too.
    """
    file_name = name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
    file_name = file_name.replace(".modules_to_save.default.", ".").replace(".default.", ".")
    return file_name.removesuffix(".default")


def _int_if_whole(number: float) -> Any:
    return int(number) if number.is_integer() else number
