"""One of two ranks that train LoRA with a sharded base, and compare with the base on one device.

`python -m tests.backends.eager.sharded_rank RANK PORT` writes a JSON object. It has a list for each
case: whether the bits are the same, the bytes of frozen weights on this rank, and on all ranks. For
each unsupported base it has the error message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from backends.base.interface import BlockGradient, Trainable
from backends.eager.eager import EagerBackend
from backends.eager.sharded import ShardedBackend
from backends.losses import vocabulary_loss
from protocol.base.errors import SamestepError
from tests.backends.losses.test_vocabulary_loss import add_lora
from tests.small_heads import TOKEN_LOSS, llama, model_of, texts
from worker.models.blocks import cut_into_blocks

CASES: dict[str, dict[str, Any]] = {
    "float32": {"base_dtype": "float32"},
    "bfloat16": {"base_dtype": "bfloat16"},
    "bfloat16, computed in bfloat16": {"base_dtype": "bfloat16", "precision": "bfloat16"},
    "bfloat16, computed in float16": {"base_dtype": "bfloat16", "precision": "float16"},
    "float16": {"base_dtype": "float16"},
    "gradient checkpointing": {
        "base_dtype": "bfloat16",
        "precision": "bfloat16",
        "checkpointed": True,
    },
    "tied": {"base_dtype": "bfloat16", "tied": True},
    "loss in parts": {"base_dtype": "bfloat16", "precision": "bfloat16", "chunk_tokens": 10},
    "LoRA of the head": {
        "base_dtype": "bfloat16",
        "targets": ("q_proj", "lm_head"),
        "chunk_tokens": 10,
    },
}


def make_trainable(case: dict[str, Any]) -> Trainable:
    model = llama(tie_word_embeddings=case.get("tied", False), mlp_bias=True)
    if case.get("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    module = add_lora(model, targets=case.get("targets", ("q_proj", "down_proj")))
    dtypes = {key: case[key] for key in ("base_dtype", "precision") if key in case}
    return Trainable(
        cut_into_blocks(module),
        module,
        TOKEN_LOSS,
        evaluate=lambda module, arrays: {"loss": float(TOKEN_LOSS(module, arrays))},
        **dtypes,
    )


def compute_results(backend: Any, case: dict[str, Any]) -> tuple[list[Any], Trainable]:
    """Return evaluations and gradients: of a subtree of two microbatches, then of one
    microbatch."""
    trainable = make_trainable(case)
    program = backend.compile(trainable, texts())
    results: list[Any] = []
    for leaves in ([(texts(), 1), (texts(90), 2)], [(texts(), 3)]):
        results.append(program.evaluate(texts()))
        for item in program.gradients(leaves):
            is_block = isinstance(item, BlockGradient)
            results.append(item.values.tobytes() if is_block else repr(item))
    program.close()
    return results, trainable


def frozen_bytes(module: Any) -> tuple[int, int]:
    """Return the bytes of frozen parameters on this rank, and on all ranks."""
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    local = (
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in frozen
    )
    return sum(p.nbytes for p in local), sum(p.nbytes for p in frozen)


def compare_cases() -> Iterator[tuple[str, Any]]:
    """Yield each case and its list of results; see the module's docstring."""
    backend = ShardedBackend("cpu", 0)
    for name, case in CASES.items():
        chunk_tokens = case.get("chunk_tokens", 1 << 20)
        with mock.patch.object(vocabulary_loss, "tokens_per_part", return_value=chunk_tokens):
            expected, _ = compute_results(EagerBackend("cpu"), case)
            results, trainable = compute_results(backend, case)
        yield name, [results == expected, *frozen_bytes(trainable.module)]


def refuse_unsupported_bases() -> Iterator[tuple[str, str]]:
    """Yield the name of each unsupported base and the error message."""
    import transformers

    experts = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=32, num_experts=2,
    )  # fmt: skip
    for name, model, base_dtype in (
        ("int4", llama(), "int4"), ("experts", model_of(experts), "bfloat16"),
    ):  # fmt: skip
        module = add_lora(model)
        trainable = Trainable(cut_into_blocks(module), module, TOKEN_LOSS, base_dtype=base_dtype)  # type: ignore[arg-type]
        try:
            ShardedBackend("cpu", 0).compile(trainable, texts())
        except SamestepError as error:
            yield name, str(error)


if __name__ == "__main__":
    rank, port = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    sys.stdout.write(json.dumps({**dict(compare_cases()), **dict(refuse_unsupported_bases())}))
    dist.destroy_process_group()
