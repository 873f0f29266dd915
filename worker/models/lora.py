"""Low-rank adaptation through peft: matrices beside frozen layers, and the adapter's own layout.

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
from backends.base.frozen_base import frozen_base
from backends.base.interface import Array
from backends.base.narrowing import quantize_tensor, release_pages
from backends.base.quantize import STORAGE, Storage, dequantize
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
"""A learned temperature beside a model, or an adapter, that embeds texts: log(1 / temperature)."""
_ELEMENTS_AT_ONCE: Final = 1 << 20
_SHOWN: Final = 16
"""As many names as a message lists."""

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
"""What families of models call attention's query and value layers."""


class Lora:
    """A model with low-rank matrices beside its targets; the head, if named, is trained too.

    Args:
        model: Its own parameters are frozen from here on.
        spec: Rank, scale, dropout, targets and what is seldom used; targets left out are found in
            the model.
        task_type: What the adapter is for, in peft's words.
        heads: Modules that are trained in full: a classifier's head, what the checkpoint lacks.
        seed: The run's.
        adapter: The directory of one to go on with, in PEFT's layout.
        added_tokens: Tokens whose rows of the embeddings and the head are trained.
        base_dtype: In what the frozen base will be stored.

    Attributes:
        adapter_digest: Of the one it goes on with; empty without.

    Raises:
        DataError: A target is not in the model, or none can be found; the adapter is another's.
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
        import peft  # noqa: PLC0415  (full fine-tuning does without)

        earlier = None if adapter is None else adapter_directory(adapter)
        config_of_earlier = None if earlier is None else adapter_config(earlier)
        targets = spec.targets if isinstance(spec.targets, tuple) else None
        if earlier is not None and config_of_earlier is not None:
            check_lora(earlier, config_of_earlier, spec)
            targets = targets or targets_of(config_of_earlier)
        if spec.targets == "all-linear":
            targets = targets or _all_linear(model, heads)
        targets = targets or _attention_targets(model)
        if earlier is None:
            _refuse_unknown_names(model, spec)
        heads = list(dict.fromkeys([*heads, *spec.modules_to_save]))
        _refuse_what_is_drawn_and_adapted(heads, targets)
        _refuse_tied_modules(model, spec.modules_to_save)
        self._config = {
            "bias": "none",
            "fan_in_fan_out": _transposed(model, targets),
            "lora_alpha": _whole(spec.alpha),
            "lora_dropout": spec.dropout,
            "modules_to_save": list(heads) or None,
            "r": spec.r,
            "target_modules": list(targets),
            "task_type": None if task_type == "MASKED_LM" else task_type,  # peft has none for it
            **_seldom(spec),
            **_trained_rows(model, added_tokens, heads, targets),
        }
        try:
            with warnings.catch_warnings():
                # Tied layers among the targets: they are looked at by `cut_into_blocks`.
                warnings.simplefilter("ignore")
                config = peft.LoraConfig(**self._config)
                self.module: torch.nn.Module = peft.get_peft_model(model, config)
        except ValueError as error:
            raise DataError(
                f"cannot add LoRA to {', '.join(targets)}: {describe_error(error)}; "
                "check lora.targets"
            ) from None
        if earlier is None:
            _refuse_idle_patterns(self.module, spec)
        _refuse_other_tables(self.module)
        _start(self.module, seed, STORAGE[base_dtype])
        if spec.dora and base_dtype != "float32":
            _keep_dora_narrow(self.module)
        self.adapter_digest = "" if earlier is None else _continue(self.module, earlier)

    def export(self, base: str, blocks: Sequence[Block], files: dict[str, str]) -> Export:
        """The adapter as `PeftModel.from_pretrained` reads it.

        Args:
            base: Where the frozen model came from.
            blocks: Of the module.
            files: Text files that go along.
        """
        # Keys that every version of peft knows.
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


def _seldom(spec: LoraSpec) -> dict[str, Any]:
    """Return the keys of an adapter's configuration that most adapters do without."""
    alphas = {name: _whole(alpha) for name, alpha in spec.alpha_pattern.items()}
    keys = {
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": alphas,
        "target_parameters": list(spec.target_parameters),
    }
    return {key: value for key, value in keys.items() if value}


def _trained_rows(
    model: torch.nn.Module, tokens: Sequence[int], heads: Sequence[str], targets: Sequence[str]
) -> dict[str, Any]:
    """Return peft's key for rows that are trained, unless their whole tables are.

    Raises:
        DataError: A table has low-rank matrices, or this peft has no such key.
    """
    tables = [name for name in table_names(model) if not is_named(name, heads)] if tokens else []
    adapted = [name for name in tables if is_named(name, targets)]
    if adapted:
        raise DataError(
            f"lora.targets names {adapted[0].rpartition('.')[2]!r}, whose rows of "
            "model.added_tokens are trained beside the matrices: leave it out, or name it in "
            "lora.modules_to_save"
        )
    if not tables:
        return {}
    import peft  # noqa: PLC0415

    if not hasattr(peft.LoraConfig, "trainable_token_indices"):
        raise DataError("model.added_tokens with lora needs peft 0.15; pip install -U peft")
    return {"trainable_token_indices": {name: sorted(tokens) for name in tables}}


def is_named(module: str, names: Sequence[str]) -> bool:
    """Whether a module, or parameter, has one of these names or ends with it, as in peft."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _all_linear(model: torch.nn.Module, heads: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all linear layers but the head, as short as they can be."""
    given: Any = model
    output = given.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = [name for name, child in model.named_modules() if _fits(child)]
    apart = [
        name
        for name, child in model.named_modules()
        if child is output or any(name == head or name.startswith(f"{head}.") for head in heads)
    ]
    within = [name for name in layers if name not in apart]
    short = {name.rpartition(".")[2] for name in within}
    taken = {name.rpartition(".")[2] for name in apart} & short
    return tuple(
        sorted(
            {
                name if name.rpartition(".")[2] in taken else name.rpartition(".")[2]
                for name in within
            }
        )
    )


def _refuse_unknown_names(model: torch.nn.Module, spec: LoraSpec) -> None:
    """Refuse a name of `lora.targets` or `lora.target_parameters` that peft would pass over.

    peft is content if one name of several is found, so a typo would train less than was asked for.

    Raises:
        DataError: The model has nothing of that name.
    """
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    adaptable = sorted(
        {
            name.rpartition(".")[2]
            for name, child in model.named_modules()
            if _fits(child) or isinstance(child, torch.nn.Embedding)
        }
    )
    targets = spec.targets if isinstance(spec.targets, tuple) else ()
    for asked in targets:
        if not any(is_named(name, (asked,)) for name in modules):
            raise DataError(
                f"cannot add LoRA to {asked}: expected layers of the model in lora.targets, got "
                f"{asked!r}; it has {_some(adaptable, asked)}"
            )
    for asked in spec.target_parameters:
        if not any(is_named(name, (asked,)) for name in parameters):
            endings = sorted({".".join(name.split(".")[-3:]) for name in parameters})
            raise DataError(
                f"expected weights of the model in lora.target_parameters, got {asked!r}; it has "
                f"{_some(endings, asked)}"
            )


def _refuse_idle_patterns(module: torch.nn.Module, spec: LoraSpec) -> None:
    """Refuse a key of `lora.rank_pattern` or `lora.alpha_pattern` that fits no adapted layer.

    Raises:
        DataError: A key does.
    """
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415
    from peft.utils.other import get_pattern_key  # noqa: PLC0415

    layers = [name for name, child in module.named_modules() if isinstance(child, LoraLayer)]
    patterns: dict[str, Mapping[str, float]] = {
        "rank_pattern": spec.rank_pattern, "alpha_pattern": spec.alpha_pattern,
    }  # fmt: skip
    for key, pattern in patterns.items():
        # Where two keys fit a layer, peft takes the first: each is asked alone.
        idle = [end for end in pattern if all(get_pattern_key([end], n) != end for n in layers)]
        if idle:
            adapted = sorted({name.rpartition(".")[2] for name in layers})
            raise DataError(
                f"expected names of adapted layers in lora.{key}, got {idle[0]!r}; "
                f"adapted are {_some(adapted, idle[0])}"
            )


def _some(names: Sequence[str], near: str) -> str:
    """Return these names, or of many those that resemble one, for a message."""
    shown = names if len(names) <= _SHOWN else difflib.get_close_matches(near, names, _SHOWN, 0.0)
    return ", ".join(shown)


def _refuse_tied_modules(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Refuse to train in full a module whose weight another module shares.

    Raises:
        DataError: One is, or there is no module of that name.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(owner_of(name))
    for asked in names:
        found = [
            name for name, _ in model.named_modules() if name == asked or name.endswith(f".{asked}")
        ]
        if not found:
            raise DataError(
                f"lora.modules_to_save names {asked!r}, which the model does not have; correct the "
                "name, or leave it out"
            )
        tied = [each for each in owners.values() if len(each) > 1 and {*each} & {*found}]
        if tied:
            others = sorted({*tied[0]} - {*found})
            raise DataError(
                f"lora.modules_to_save names {asked!r}, whose weight {' and '.join(others)} "
                "shares, so they would become two: name it in lora.targets instead"
            )


def head_modules(model: torch.nn.Module) -> list[str]:
    """Names of the parts around the encoder that have parameters: the classification head."""
    encoder = getattr(model, "base_model_prefix", "")
    return [
        name
        for name, child in model.named_children()
        if name != encoder and any(True for _ in child.parameters())
    ]


def modules_drawn(drawn: Collection[str], heads: Sequence[str]) -> tuple[str, ...]:
    """The modules that hold these parameters, as far as they are in none of the heads, sorted."""
    owners = {owner_of(name) for name in drawn}
    return tuple(sorted(each for each in owners if each.partition(".")[0] not in heads))


def owner_of(parameter: str) -> str:
    """The name of the module that holds a parameter."""
    return parameter.rpartition(".")[0]


def _refuse_what_is_drawn_and_adapted(heads: Sequence[str], targets: Sequence[str]) -> None:
    """A module that is trained in full has no room for low-rank matrices.

    Raises:
        DataError: A target is one.
    """
    both = [head for head in heads if head.rpartition(".")[2] in targets or head in targets]
    if both:
        raise DataError(
            f"lora.targets names {both[0]!r}, which is trained in full already; leave it out"
        )


def _refuse_other_tables(module: torch.nn.Module) -> None:
    """Refuse embeddings that are called with other numbers than they look up, or never.

    Raises:
        DataError: A target is a table of positions, or the table that encoder and decoder share.
    """
    from peft.tuners.lora import Embedding  # noqa: PLC0415

    for name, layer in module.named_modules():
        if not isinstance(layer, Embedding):
            continue
        table: Any = layer.get_base_layer()
        target, remedy = name.rpartition(".")[2], "leave it out of lora.targets"
        plain = type(table).forward is torch.nn.Embedding.forward or hasattr(table, "embed_scale")
        if target == "shared":
            plain, remedy = False, "name embed_tokens, of encoder and decoder, instead"
        if not plain:
            raise DataError(
                f"expected lora.targets of linear layers and plain embeddings, got {target!r}, a "
                f"{type(table).__name__} which the forward pass calls in another way; {remedy}"
            )


def _start(module: torch.nn.Module, seed: int, storage: Storage) -> None:
    """Fill A by peft's rule (kaiming_uniform_ with a = sqrt(5)) with our draws, B with zeros.

    DoRA's magnitudes are the norms of the rows of the weight as it will be stored.
    """
    narrow = {id(each) for each in frozen_base(module).values()} if storage != "f32" else set()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_A." in name or ".lora_embedding_B." in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                key = draws.key_of(seed, name)
                fill(parameter, draws.symmetric(key, parameter.numel(), bound))
            elif ".lora_B." in name or ".lora_embedding_A." in name:
                parameter.zero_()
            elif ".lora_magnitude_vector." in name:
                layer: Any = module.get_submodule(name.partition(".lora_magnitude_vector.")[0])
                weight = layer.get_base_layer().weight
                rows = weight.detach()
                # peft takes the norms of a table's columns: one magnitude for each output, too.
                if isinstance(layer.get_base_layer(), Conv1D | torch.nn.Embedding):
                    rows = rows.T
                fill(parameter, _norms(rows, storage if id(weight) in narrow else "f32"))


def _norms(rows: torch.Tensor, storage: Storage) -> Array:
    """Return the norm of each row as it is stored, in float64 so that all machines have the same
    bits."""
    norms = np.empty(len(rows), np.float32)
    at_once = max(1, _ELEMENTS_AT_ONCE // rows.shape[1])
    for first in range(0, len(rows), at_once):
        part = rows[first : first + at_once]
        values = part.double().numpy()
        if storage != "f32":
            values = dequantize(quantize_tensor(part, storage)).astype(np.float64)
        norms[first : first + at_once] = np.sqrt(np.square(values).sum(axis=1))
    release_pages(rows)
    return norms


def _keep_dora_narrow(module: torch.nn.Module) -> None:
    """Let the base layer compute what DoRA computes from its weight where inputs are dropped.

    autograd would keep the widened weight of each layer for that product.
    """
    from peft.tuners.lora.dora import DoraLinearLayer  # noqa: PLC0415

    def with_result(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("base_result") is None:
            kwargs["base_result"] = kwargs["base_layer"](*args)
        return args, kwargs

    for layer in module.modules():
        if type(layer) is DoraLinearLayer:
            layer.register_forward_pre_hook(with_result, with_kwargs=True)


def _continue(module: torch.nn.Module, directory: Path) -> str:
    """Fill in an adapter's values; their digest.

    Raises:
        DataError: They are not this module's, name by name and shape by shape.
    """
    from safetensors.torch import load_file  # noqa: PLC0415

    path = directory / ADAPTER_WEIGHTS
    try:
        given = {adapter_name(name): value.float() for name, value in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read the adapter's {str(path)!r}: {error}") from None
    given.pop("log_scale", None)  # of task embed, beside the adapter: set by its run spec anew
    trained = {
        adapter_name(name): parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    odd = sorted(given.keys() ^ trained.keys())
    odd += [name for name in trained if name in given and given[name].shape != trained[name].shape]
    if odd:
        raise DataError(
            f"the adapter in {str(directory)!r} is another model's: {len(odd)} of its tensors "
            f"(such as {odd[0]!r}) are not those that the run trains; give its own base, and its "
            "lora.targets"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(given[name])
    return digest_arrays({name: value.numpy() for name, value in given.items()})


def _attention_targets(model: torch.nn.Module) -> tuple[str, ...]:
    layers = {name.rpartition(".")[2] for name, child in model.named_modules() if _fits(child)}
    for targets in ATTENTION:
        if layers.issuperset(targets):
            return targets
    names = ", ".join(sorted(layers)[:12])
    raise DataError(
        "expected query and value projections with known names to adapt, found none among "
        f"{names}; name the layers in lora.targets"
    )


def _transposed(model: torch.nn.Module, targets: Sequence[str]) -> bool:
    """GPT-2's layers hold their weights the other way round."""
    named = (child for name, child in model.named_modules() if name.endswith(tuple(targets)))
    return any(isinstance(child, Conv1D) for child in named)


def _fits(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear | Conv1D)


def adapter_name(name: str) -> str:
    """Return the name in an adapter's file of a parameter of a peft module.

    Also translates names in files of earlier releases, where those of embeddings end in `.default`.
    """
    plain = name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
    plain = plain.replace(".modules_to_save.default.", ".").replace(".default.", ".")
    return plain.removesuffix(".default")


def _whole(value: float) -> Any:
    return int(value) if value.is_integer() else value
