"""LoRA options: the saved adapter computes the same in PEFT as in the run, with each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.base.errors import DataError, RunSpecError
from protocol.spec.files.adapter import adapter_config, check_lora
from protocol.spec.run_spec import parse_run_spec
from protocol.spec.sections.model import BaseDtype
from tests.small_chat import conversation, save_chat_model, write_jsonl
from tests.worker.tasks.test_classify import export, perturbed_values
from worker.results.merge import merge
from worker.results.saved_model import find_saved_model
from worker.tasks.registry import build

OPTIONS: dict[str, dict[str, Any]] = {
    "all-linear": {"targets": "all-linear"},
    "embeddings and head": {"targets": ["embed_tokens", "lm_head", "q_proj"]},
    "modules to save": {"modules_to_save": ["lm_head", "norm"]},
    "rank and alpha by pattern": {
        "targets": "all-linear",
        "rank_pattern": {"up_proj": 2, "layers.0.self_attn.q_proj": 1},
        "alpha_pattern": {"up_proj": 3.0},
    },
    "rsLoRA": {"rslora": True},
    "DoRA": {"dora": True, "targets": "all-linear"},
    "DoRA of a table": {"dora": True, "targets": ["embed_tokens", "q_proj"]},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("lora")
    save_chat_model(path / "model")
    write_jsonl(path / "chat.jsonl", [{"messages": conversation(n)} for n in range(12)])
    return path


def spec_of(directory: Path, model: str = "model", base: str = "float32", **lora: Any) -> Any:
    return parse_run_spec({
        "task": "causal-lm", "seed": 7, "steps": 1,
        "model": {"source": str(directory / model), "base_dtype": base},
        "lora": {"r": 4, **lora}, "batch": {"samples": 2, "microbatch": 2},
        "data": {"train": str(directory / "chat.jsonl"), "format": "messages", "max_tokens": 96},
    })  # fmt: skip


def check_loss_in_peft(task: Any, base: Path, result_directory: Path, batch: Any) -> None:
    """Compare the loss of trained values in the run with that of the saved adapter in PEFT."""
    import peft
    import torch
    import transformers

    parameters = dict(task.trainable.module.named_parameters())
    arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    with torch.no_grad():
        for block, values in zip(task.manifest.blocks, perturbed_values(task), strict=True):
            for tensor, elements in block.slices():
                parameters[tensor.name].copy_(torch.tensor(values[elements].reshape(tensor.shape)))
        run_loss = float(task.trainable.loss(task.trainable.module.eval(), arrays))
        model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        peft_model = peft.PeftModel.from_pretrained(model, result_directory).eval()
        logits = peft_model(input_ids=arrays["input_ids"]).logits
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), arrays["labels"].flatten(), reduction="sum"
        )
        base_logits = transformers.AutoModelForCausalLM.from_pretrained(base)(
            input_ids=arrays["input_ids"]
        ).logits
    assert run_loss == pytest.approx(float(expected), rel=1e-5)
    assert not torch.allclose(base_logits, logits, atol=1e-3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_adapter_in_peft_has_the_loss_of_the_run(directory, tmp_path, options):
    spec = spec_of(directory, **options)
    task = build(spec)
    result_directory = export(task, perturbed_values(task), tmp_path)
    check_loss_in_peft(task, directory / "model", result_directory, task.batch([0, 1]))
    merge(find_saved_model(result_directory), None, tmp_path / "merged")  # merge compares logits
    check_lora(result_directory, adapter_config(result_directory), spec.lora)
    other = spec_of(directory, **{**options, "rslora": not options.get("rslora", False)})
    with pytest.raises(DataError, match=r"--set lora\.rslora="):
        check_lora(result_directory, adapter_config(result_directory), other.lora)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["q_proj", "v_porj"]}, "lora.targets, got 'v_porj'; it has down_proj"),
        ({"rank_pattern": {"v_porj": 2}}, "lora.rank_pattern, got 'v_porj'; the run adapts q_proj"),
        ({"alpha_pattern": {"k_proj": 2.0}}, "lora.alpha_pattern, got 'k_proj'; the run adapts"),
        ({"target_parameters": ["mlp.experts.up"]}, "lora.target_parameters, got 'mlp.experts.up'"),
    ],
)
def test_target_that_peft_would_ignore_is_refused(directory, options, message):
    with pytest.raises(DataError) as error:
        build(spec_of(directory, **options))
    assert message in str(error.value)


def loss_and_gradients_in_peft(
    task: Any, model: Any, result_directory: Path, batch: Any
) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients in PEFT, for a model whose base holds the dequantized values."""
    import peft
    import torch

    from worker.models.lora import adapter_name

    peft_model = peft.PeftModel.from_pretrained(model, result_directory, is_trainable=True).train()
    arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    loss = task.trainable.loss(peft_model, arrays)
    loss.backward()
    return float(loss.detach()), {
        adapter_name(name): parameter.grad
        for name, parameter in peft_model.named_parameters()
        if parameter.requires_grad
    }


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
QUANTIZED_CASES: dict[str, tuple[str, BaseDtype, dict[str, Any]]] = {
    "DoRA, bfloat16": ("model", "bfloat16", {"dora": True, "targets": "all-linear"}),
    "DoRA, int4": ("model", "int4", {"dora": True, "targets": "all-linear"}),
    "DoRA, nf4": ("model", "nf4", {"dora": True, "targets": "all-linear"}),
    "experts, int4": ("experts", "int4", {"target_parameters": EXPERTS}),
    "experts in 16 bits, nf4": ("half", "nf4", {"target_parameters": EXPERTS}),
    "attention of a model with experts, int8": ("experts", "int8", {}),
}


@pytest.mark.parametrize("case", QUANTIZED_CASES)
def test_training_with_a_quantized_base_equals_peft(directory, mixture, tmp_path, case):
    import torch
    import transformers

    from backends.base.interface import BlockGradient, Loss
    from backends.eager.eager import EagerBackend
    from backends.quantization.frozen_base import round_frozen_base
    from worker.models.lora import adapter_name

    name, base, options = QUANTIZED_CASES[case]
    model_directory = directory if name == "model" else mixture
    task = build(spec_of(model_directory, name, base=base, **options))
    values, batch = perturbed_values(task), task.batch([0, 1])
    result_directory = export(task, values, tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model_directory / name, attn_implementation="eager", dtype=torch.float32
    )
    model.requires_grad_(requires_grad=False)
    round_frozen_base(model, base)
    # At the start the adapter adds zero, also with DoRA's magnitudes.
    program = EagerBackend("cpu").compile(task.trainable, batch)
    program.load(task.initial_parameters())
    *_, start_loss = program.gradients([(batch, 0)])
    ids, labels = (torch.tensor(batch.arrays[name]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    torch_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    assert isinstance(start_loss, Loss)
    assert start_loss.loss_sum == pytest.approx(float(torch_loss), rel=1e-5)
    program.load(values)
    items = [*program.gradients([(batch, 0)])]
    module: Any = task.trainable.module
    assert not [n for n, p in module.named_parameters() if "mlp.experts." in n and p.dim() == 3]
    program.close()
    expected_loss, expected = loss_and_gradients_in_peft(task, model, result_directory, batch)
    assert items[-1].loss_sum == pytest.approx(expected_loss, rel=1e-5)
    for item in items:
        if isinstance(item, BlockGradient):
            for tensor, elements in task.manifest.blocks[item.block].slices():
                reference = expected[adapter_name(tensor.name)].numpy().reshape(-1)
                distance = np.linalg.norm(item.values[elements] - reference)
                assert distance <= 1e-5 * np.linalg.norm(reference), tensor.name
    merge(find_saved_model(result_directory), None, tmp_path / "merged")  # merge compares logits


def test_dora_with_dropout_saves_no_full_weight_for_backward(directory, monkeypatch):
    import torch

    from backends.eager.quantized_base import quantize_frozen_base
    from worker.models import lora

    def step() -> tuple[int, Any]:
        task: Any = build(spec_of(directory, base="int4", dora=True, dropout=0.5))
        module, full_weight_counts = task.trainable.module, [0]
        quantize_frozen_base(module, "int4", torch.device("cpu"))
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(0.01)

        def count_saved(tensor: torch.Tensor) -> torch.Tensor:
            full_weight_counts[0] += tensor.shape == (32, 32)
            return tensor

        torch.manual_seed(0)
        arrays = {name: torch.tensor(array) for name, array in task.batch([0, 1]).arrays.items()}
        with torch.autograd.graph.saved_tensors_hooks(count_saved, lambda tensor: tensor):
            loss = task.trainable.loss(module.train(), arrays)
        loss.backward()
        (first, *_) = (p.grad for n, p in module.named_parameters() if "lora_A" in n)
        return full_weight_counts[0], first

    saved_count, gradient = step()
    monkeypatch.setattr(lora, "_use_base_product_in_dora", lambda _: None)
    unpatched_count, expected = step()
    assert unpatched_count == saved_count + 1, "the first layer's input has no gradient"
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_all_linear_targets_equal_those_of_peft(directory):
    import peft
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory / "model")
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_config(config),
        peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    peft_names = {name for name, p in model.named_parameters() if p.requires_grad}
    task = build(spec_of(directory, targets="all-linear"))
    assert {t.name for block in task.manifest.blocks for t in block.tensors} == peft_names


def test_dora_starts_with_the_norms_of_the_rows(directory):
    import safetensors.numpy

    task = build(spec_of(directory, dora=True))
    weights = safetensors.numpy.load_file(directory / "model" / "model.safetensors")
    block, values = task.manifest.blocks[0], task.initial_parameters()[0]
    [(_, elements)] = [s for s in block.slices() if "q_proj.lora_magnitude_vector" in s[0].name]
    norms = np.linalg.norm(weights["model.layers.0.self_attn.q_proj.weight"], axis=1)
    np.testing.assert_allclose(values[elements], norms, rtol=1e-6)


@pytest.fixture(scope="module")
def mixture(directory, tmp_path_factory) -> Path:
    """A directory with a small mixture of experts and its data."""
    import torch
    import transformers

    path: Path = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
    config_class: Any = transformers.Qwen3MoeConfig
    config = config_class(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=8, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    model: Any = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(path / "experts")
    model.to(torch.bfloat16).save_pretrained(path / "half")
    for name in ("experts", "half"):
        tokenizer.save_pretrained(path / name)
    write_jsonl(path / "chat.jsonl", [{"messages": conversation(n)} for n in range(12)])
    return path


def test_adapter_of_expert_parameters_has_the_loss_of_the_run(mixture, tmp_path):
    task = build(spec_of(mixture, "experts", target_parameters=EXPERTS))
    assert any("experts" in t.name for block in task.manifest.blocks for t in block.tensors)
    result_directory = export(task, perturbed_values(task), tmp_path)
    check_loss_in_peft(task, mixture / "experts", result_directory, task.batch([0, 1]))
    merge(find_saved_model(result_directory), None, tmp_path / "merged")


def test_invalid_options_are_refused_in_one_line(directory):
    with pytest.raises(DataError, match="'head', which the model does not have"):
        build(spec_of(directory, modules_to_save=["head"]))
    with pytest.raises(DataError, match="'lm_head', which is already trained in full"):
        build(spec_of(directory, modules_to_save=["lm_head"], targets=["lm_head"]))
    with pytest.raises(RunSpecError, match=r"remove lora\.dropout"):
        spec_of(directory, target_parameters=["experts"], dropout=0.1)
