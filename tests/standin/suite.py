"""The eager backend on the stand-in accelerator: the CPU's bits, copies, and planted faults.

test_standin.py runs these in a process whose torch has the device.
"""

from __future__ import annotations

import copy
import gc
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from backends.base.inner_steps import InnerState, SchedulePosition
from backends.base.interface import Batch, BlockGradient, Loss, LossFailed, Trainable
from backends.eager import device_sums, torch_devices
from backends.eager.eager import EagerBackend, EagerProgram
from backends.eager.quantized_linear import QuantizedWeight, ScratchBuffer
from backends.losses import vocabulary_loss
from backends.quantization.quantize import quantize
from backends.registry import choose, devices, trial_device
from protocol.base.errors import BackendUnavailable, DeviceError, SamestepError
from protocol.datasets.capture_check import vocabulary_digest
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.manifest import CaptureLayout
from protocol.spec.run_spec import ModelRun
from protocol.spec.sections.model import ModelSpec
from protocol.spec.sections.optimizer import Sgd
from tests import standin
from tests.backends.eager.test_eager import Net, batch, make_trainable
from tests.sample_capture import write_capture
from tests.small_decoder import write_decoder_run
from worker.models import device_memory
from worker.models.tokens import load_saved_tokenizer
from worker.tasks.base.transformer import ROWS
from worker.tasks.checks.reachable_state import reachable_state
from worker.tasks.labels import classify
from worker.tasks.registry import build
from worker.tasks.small import regress

SUBTREE = [(batch(seed=seed), seed) for seed in range(5)]


@pytest.fixture(autouse=True)
def _no_missing_waits() -> Iterator[None]:
    """Check that every access waits as required, unless the test takes the reports."""
    standin.take_reports()
    standin.take_counts()
    yield
    standin.set_fault()
    assert standin.take_reports() == []


def gradients(
    backend: str, trainable: Trainable, subtree: Any = SUBTREE, index: int = 0
) -> list[bytes]:
    program = EagerBackend(backend, index).compile(trainable, subtree[0][0])
    try:
        items = list(program.gradients(subtree))
    finally:
        program.close()
    loss = items[-1]
    assert isinstance(loss, Loss)
    blocks = [item.values.tobytes() for item in items if isinstance(item, BlockGradient)]
    return [*blocks, repr(loss).encode()]


def make_small_trainable(**changes: Any) -> Trainable:
    torch.manual_seed(0)
    return make_trainable(Net(), **changes)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("leaves", [1, 2, 3, 5])
def test_subtree_sums_have_the_bits_of_the_host(index, leaves):
    subtree = SUBTREE[:leaves]
    assert gradients("accelerator", make_small_trainable(), subtree, index) == gradients(
        "cpu", make_small_trainable(), subtree
    )


@pytest.mark.parametrize("leaves", [1, 4])
def test_subtree_is_copied_once_per_block_without_waits(leaves):
    trainable = make_small_trainable()
    program = EagerBackend("accelerator").compile(trainable, batch())
    subtree = [(batch(seed=seed), seed) for seed in range(leaves)]
    list(program.gradients(subtree))
    standin.take_counts()
    list(program.gradients(subtree))
    counts = standin.take_counts()
    program.close()
    assert counts.pop("copies to host, deferred") == len(trainable.blocks)
    assert counts.pop("waits for an event") == len(trainable.blocks)
    assert counts.pop("copies to device, deferred") == 2 * leaves, "x and y of each microbatch"
    counts.pop("pinned allocations")
    counts.pop("kernels")
    assert counts == {}, "nothing else copies or waits"


@pytest.mark.parametrize("loss_type", [torch.float32, torch.float64, torch.int64])
def test_loss_value_equals_the_host_for_every_dtype(loss_type):
    def constant_loss(_: torch.nn.Module, arrays: Any) -> torch.Tensor:
        return (arrays["x"].sum() * 1000).to(loss_type)

    def loss_with_graph(module: torch.nn.Module, arrays: Any) -> torch.Tensor:
        return constant_loss(module, arrays) + next(module.parameters()).sum() * 0

    for loss in (constant_loss, loss_with_graph):
        totals = []
        for backend in ("cpu", "accelerator"):
            program: Any = EagerBackend(backend).compile(make_small_trainable(), batch())
            program._loss = loss
            *_, total = program.gradients(SUBTREE)
            program.close()
            totals.append(total)
        assert totals[0] == totals[1]


def test_card_without_float64_has_the_bits_of_the_host_and_tries_losses_on_the_cpu():
    def loss(module: torch.nn.Module, arrays: Any) -> torch.Tensor:
        total: torch.Tensor = (module(arrays["x"]) - arrays["y"]).square().sum()
        return total

    kind_without_float64 = replace(torch_devices.KINDS["accelerator"], has_float64=False)
    standin.set_float64(has_float64=False)
    try:
        with pytest.raises(RuntimeError, match="fp64"):
            torch.zeros(1, dtype=torch.float64, device="standin")
        with mock.patch.dict(torch_devices.KINDS, accelerator=kind_without_float64):
            device_gradients = gradients("accelerator", make_small_trainable(loss=loss))
            parameters = compute_inner_step(make_small_trainable(loss=loss))
            with trial_device("accelerator") as device:
                assert device.type == "cpu"
    finally:
        standin.set_float64(has_float64=True)
    assert device_gradients == gradients("cpu", make_small_trainable(loss=loss))
    np.testing.assert_allclose(
        parameters, compute_inner_step(make_small_trainable(loss=loss)), rtol=1e-6
    )


def test_metrics_on_a_card_without_float64_equal_those_of_the_host():
    module, arrays = torch.nn.Linear(3, 1), {"x": torch.randn(4, 3), "y": torch.randn(4)}
    labels = {"labels": torch.randn(4), ROWS: torch.arange(4)}
    scaled: Any = SimpleNamespace(scale=SimpleNamespace(mean=0.5, deviation=2.0))

    def sums_on(device: torch.device) -> list[Any]:
        moved_arrays = {name: tensor.to(device) for name, tensor in (arrays | labels).items()}
        module.to(device)
        patched = mock.patch.object(classify, "logits_of", lambda m, fields, _: m(fields["x"]))
        with patched, torch.no_grad():
            values = classify._regression(scaled, {}).evaluate(module, moved_arrays)
            return [regress._evaluate(module, moved_arrays), values]

    expected = sums_on(torch.device("cpu"))
    standin.set_float64(has_float64=False)
    try:
        assert sums_on(torch.device("standin", 1)) == [
            pytest.approx(tensor, rel=1e-6) for tensor in expected
        ]
    finally:
        standin.set_float64(has_float64=True)


def compute_inner_step(trainable: Trainable) -> Any:
    program: Any = EagerBackend("accelerator").compile(trainable, batch())
    optimizer = Sgd(name="sgd", lr=0.1, clip_norm=0.5)
    steps = program.inner_steps(optimizer)
    assert trainable.module is not None
    parameters = dict(trainable.module.named_parameters())
    start = [
        np.concatenate([parameters[t.name].detach().cpu().numpy().ravel() for t in block.tensors])
        for block in trainable.blocks
    ]
    steps.begin(InnerState(start, [], []))
    for _ in steps.step(SUBTREE[:2], SchedulePosition(1, 0, 1)):
        pass
    values = np.concatenate(steps.parameters())
    program.close()
    return values


def test_synchronous_device_without_index_computes_the_same():
    """Like the entry for Apple's device: no streams, no float64, sums on the host."""
    like_mps = replace(torch_devices.KINDS["mps"], backend="accelerator")
    with (
        mock.patch.dict(torch_devices.KINDS, accelerator=like_mps),
        mock.patch.object(torch_devices, "torch_device", return_value=torch.device("standin", 0)),
    ):
        device_gradients = gradients("accelerator", make_small_trainable())
        trainable = make_small_trainable()
        standin.set_memory_limit(2048)
        try:
            with pytest.raises(DeviceError, match=r"'accelerator'.*out of memory.*microbatch"):
                EagerBackend("accelerator").compile(trainable, batch())
        finally:
            standin.set_memory_limit(None)
    assert device_gradients == gradients("cpu", make_small_trainable())


def test_memory_in_a_reference_cycle_is_freed_for_the_next_model():
    """Python's garbage collection does not start when a card's memory is full."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            trainable = make_small_trainable()
            vars(trainable.module)["itself"] = [trainable.module]
            standin.peak_bytes(0)
            EagerBackend("accelerator").compile(trainable, batch()).close()
            del trainable
            standin.set_memory_limit(standin.peak_bytes(0) + 2048)
    finally:
        standin.set_memory_limit(None)
        gc.enable()


def test_program_memory_is_not_model_state():
    """The program is reachable through the module's hooks, and changes with each call."""
    program: Any = EagerBackend("accelerator").compile(make_small_trainable(), batch())
    paths = reachable_state({"module": program._module})
    program.close()
    assert "module._modules['first'].in_features" in paths
    assert [path for path in paths if "._copier" in path or "._thread" in path] == []


def test_every_thread_uses_the_card_of_the_program():
    standin.take_touched()
    gradients("accelerator", make_small_trainable(), index=1)
    lines = standin.take_touched()
    assert {line.partition(" ")[0] for line in lines} == {"standin:1"}
    assert len(lines) >= 3, "the caller's thread, the device's, autograd's"
    with mock.patch.object(torch_devices, "set_current"):  # the planted fault
        thread = threading.Thread(
            target=gradients, args=("accelerator", make_small_trainable(), SUBTREE, 1)
        )
        thread.start()
        thread.join()
    assert any(line.startswith("standin:0 ") for line in standin.take_touched())


def test_card_that_the_device_thread_cannot_use_is_named():
    busy_error = RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
    backend = EagerBackend("accelerator")
    with (
        mock.patch.object(torch_devices, "set_current", side_effect=busy_error),
        pytest.raises(DeviceError, match=r"accelerator 0.*busy or unavailable"),
    ):
        backend.compile(make_small_trainable(), batch())


DECODER_VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"base_dtype": "bfloat16", "precision": "bfloat16"},
    "float16": {"base_dtype": "float16"},
    "int8": {"base_dtype": "int8"},
    "int4": {"base_dtype": "int4"},
    "nf4": {"base_dtype": "nf4", "gradient_checkpointing": True},
    "q8_0": {"base_dtype": "q8_0", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("variant", DECODER_VARIANTS)
def test_lora_of_a_decoder_matches_the_host_and_is_reproducible(variant, tmp_path):
    """The gradients match within rounding, because attention uses another kernel on the card."""
    source = {"source": str(tmp_path / "model"), **DECODER_VARIANTS[variant]}
    spec = load_run_spec(write_decoder_run("causal-lm", tmp_path, model=source, lora={"r": 4}))
    disable_dropout(tmp_path / "model")
    results = []
    for backend in ("cpu", "accelerator", "accelerator"):
        task = build(spec)
        subtree = [(task.batch([0, 1]), 1), (task.batch([2, 3]), 2)]
        results.append(gradients(backend, task.trainable, subtree, int(backend != "cpu")))
    host, device, repeat = results
    assert device == repeat
    tolerance = 0.05 if source.get("precision") == "bfloat16" else 1e-5
    for expected, content in zip(host[:-1], device[:-1], strict=True):
        reference = np.frombuffer(expected, np.float32)
        max_magnitude = float(np.abs(reference).max())
        np.testing.assert_allclose(
            np.frombuffer(content, np.float32), reference, rtol=0, atol=tolerance * max_magnitude
        )


EXPERT_LORA: dict[str, Any] = {
    "r": 4, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip
MEMORY_CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "long samples": {"tokens": 256},
    "a large vocabulary": {"vocab_size": 4096},
    "a large vocabulary, loss in parts": {"vocab_size": 4096, "logits": 1 << 18},
    "a large vocabulary, loss in parts, full training": {
        "vocab_size": 4096,
        "logits": 1 << 18,
        "lora": None,
    },
    "more layers": {"num_hidden_layers": 8},
    "bfloat16": {"precision": "bfloat16"},
    "a base in bfloat16": {"base_dtype": "bfloat16", "precision": "bfloat16"},
    "int4": {"base_dtype": "int4"},
    "int8, checkpointed": {"base_dtype": "int8", "gradient_checkpointing": True},
    "all linear layers": {"base_dtype": "int4", "lora": {"r": 16, "targets": "all-linear"}},
    "all linear layers, bfloat16": {
        "base_dtype": "int4",
        "precision": "bfloat16",
        "lora": {"r": 16, "targets": "all-linear"},
    },
    "trained head": {
        "base_dtype": "int4",
        "lora": {"r": 4, "modules_to_save": ["lm_head"]},
    },
    "experts, in float32": {"experts": 8},
    "experts, int4": {"experts": 8, "base_dtype": "int4"},
    "more experts, nf4": {"experts": 16, "base_dtype": "nf4"},
    "LoRA of experts, in float32": {"experts": 8, "lora": EXPERT_LORA},
    "LoRA of experts, int4": {"experts": 8, "lora": EXPERT_LORA, "base_dtype": "int4"},
    "LoRA of experts, rank 16, q8_0": {
        "experts": 8,
        "lora": EXPERT_LORA | {"r": 16},
        "base_dtype": "q8_0",
    },
    "LoRA of experts, bfloat16": {
        "experts": 8,
        "lora": EXPERT_LORA,
        "base_dtype": "int4",
        "precision": "bfloat16",
    },
    "LoRA of experts, checkpointed": {
        "experts": 8,
        "lora": EXPERT_LORA,
        "base_dtype": "int4",
        "gradient_checkpointing": True,
    },
    "LoRA of experts, checkpointed, in float32": {
        "experts": 8,
        "lora": EXPERT_LORA,
        "gradient_checkpointing": True,
    },
    "experts, full training": {"experts": 8, "lora": None},
    "distilled": {"task": "distil", "vocab_size": 4096},
    "distilled in parts": {"task": "distil", "vocab_size": 4096, "logits": 1 << 18},
    "full training": {"lora": None},
    "full training, four microbatches": {"lora": None, "microbatches": 4},
}


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_memory_estimate_is_within_five_percent(case, tmp_path, monkeypatch):
    sizes = {"tokens": 128, "microbatches": 1, "lora": {"r": 4}, **MEMORY_CASES[case]}
    if "logits" in sizes:
        monkeypatch.setattr(vocabulary_loss, "LOGITS_AT_ONCE", sizes["logits"])
    model = {k: v for k, v in sizes.items() if k in ModelSpec.model_fields}
    path = write_decoder_run(
        sizes.get("task", "causal-lm"), tmp_path, lora=sizes["lora"],
        model={"source": str(tmp_path / "model"), **model},
        batch={"samples": 2 * sizes["microbatches"], "microbatch": 2},
    )  # fmt: skip
    config: dict[str, Any] = {
        **json.loads((tmp_path / "model" / "config.json").read_text()),
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "attention_dropout": 0.0, "max_position_embeddings": 512,
        **{name: sizes[name] for name in ("vocab_size", "num_hidden_layers") if name in sizes},
    }  # fmt: skip
    config_class: Any = transformers.LlamaConfig
    if "experts" in sizes:
        config_class = transformers.Qwen3MoeConfig
        config.pop("model_type")
        config |= {
            "num_experts": sizes["experts"], "num_experts_per_tok": 2, "moe_intermediate_size": 192,
        }  # fmt: skip
    decoder = transformers.AutoModelForCausalLM.from_config(config_class(**config))
    decoder.save_pretrained(tmp_path / "model")
    is_distilled = "task" in sizes
    if is_distilled:
        layout = CaptureLayout(tokens=sizes["tokens"], vocabulary=sizes["vocab_size"] - 96, top_k=8)
        tokenizer = load_saved_tokenizer(tmp_path / "model")
        logits = write_capture(
            tmp_path / "capture", layout, 2, steps_per_file=2,
            vocabulary_digest=vocabulary_digest(tokenizer.get_vocab()),
        )  # fmt: skip
        changes = [f"data={json.dumps({'train': str(logits), 'holdout': 0.25})}"]
    else:
        changes = [f"data.max_tokens={sizes['tokens']}"]
    spec = load_run_spec(path, changes)
    assert isinstance(spec, ModelRun)
    expected, task = device_memory.estimate(spec), build(spec)
    assert expected is not None
    arrays = task.batch([0, 1]).arrays
    if not is_distilled:
        arrays = {name: np.resize(array, (2, sizes["tokens"])) for name, array in arrays.items()}
    microbatch = Batch(arrays, 2.0 * sizes["tokens"])
    with mock.patch.object(
        EagerProgram, "_refuse_loss_not_additive"
    ):  # that check would double the memory
        program = EagerBackend("accelerator").compile(task.trainable, microbatch)
    gc.collect()
    standin.peak_bytes(0)
    weights_bytes = standin.peak_bytes(0)
    list(program.gradients([(microbatch, seed) for seed in range(sizes["microbatches"])]))
    peak_bytes = standin.peak_bytes(0)
    program.close()
    del program, task
    gc.collect()
    assert weights_bytes == pytest.approx(expected.weights, rel=0.03)
    assert peak_bytes == pytest.approx(expected.total, rel=0.05)


@pytest.mark.parametrize(
    ("storage", "bytes_for_float32", "bytes_for_bfloat16"),
    [("bf16", 6, 0), ("int8", 5, 3), ("q8_0", 5, 3), ("int4", 16.5, 14.5), ("nf4", 16.5, 14.5)],
)
def test_bytes_moved_by_dequantization(storage, bytes_for_float32, bytes_for_bfloat16):
    """Bytes per element, with scales. A weight that has the dtype of the product is not copied."""
    values = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    device = torch.device("standin", 0)
    weight, scratch = (
        QuantizedWeight(quantize(values, storage), device),
        ScratchBuffer(values.size, device),
    )
    for dtype, expected in (
        (torch.float32, bytes_for_float32),
        (torch.bfloat16, bytes_for_bfloat16),
    ):
        scratch.operand(weight, dtype)
        standin.take_kernel_bytes()
        operand = scratch.operand(weight, dtype)
        moved_bytes = standin.take_kernel_bytes()
        assert moved_bytes / values.size == pytest.approx(expected, abs=0.13)
        host = QuantizedWeight(quantize(values, storage), torch.device("cpu"))
        host_operand = ScratchBuffer(values.size, torch.device("cpu")).operand(host, dtype)
        assert torch.equal(operand.cpu(), host_operand), "the bits of the host"


def nvidia_card_with_kernels(architectures: Sequence[str]) -> Any:
    """Return a context in which the stand-in is an NVIDIA card, and torch has kernels for these
    architectures."""
    cuda_functions = {
        "is_available": lambda: True,
        "get_device_capability": torch.get_device_module("standin").get_device_capability,
        "get_arch_list": lambda: architectures,
    }  # fmt: skip
    patches = ExitStack()
    patches.enter_context(mock.patch.multiple(torch.cuda, **cuda_functions))
    patches.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
    device = torch.device("standin", 0)
    patches.enter_context(mock.patch.object(torch_devices, "torch_device", return_value=device))
    return patches


@pytest.mark.parametrize(
    ("capability", "architectures", "is_usable"),
    [
        ((6, 1), ["sm_75", "sm_90", "compute_90"], False),
        ((7, 5), ["sm_75", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90"], False),
        ((9, 0), ["sm_90a"], True),
        ((6, 1), [], True),
    ],
)
def test_card_without_kernels_in_torch_is_not_chosen(
    monkeypatch, capability, architectures, is_usable
):
    monkeypatch.setattr(
        torch.get_device_module("standin"), "get_device_capability", lambda _=None: capability
    )
    with nvidia_card_with_kernels(architectures):
        row, _ = torch_devices.devices_of("cuda")
        assert row.usable == is_usable
        if is_usable:
            return
        assert f"no kernels for compute capability {capability[0]}.{capability[1]}" in row.reason
        assert "use --backend vulkan" in row.reason
        choice = choose("auto")
        assert choice.backend.info.backend != "cuda"
        assert "no kernels for compute" in choice.reason
        with pytest.raises(BackendUnavailable, match="no kernels for compute capability"):
            choose("cuda")


def disable_dropout(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.0}))


# Planted faults that a CPU does not reveal and the stand-in does.


class UnwaitedEvent(torch.Event):
    def synchronize(self) -> None:
        pass


class UnorderedStream(torch.Stream):
    def wait_stream(self, stream: Any) -> None:
        pass


def planted_fault(**changes: Any) -> Any:
    """Return a context that replaces a class of torch in the module that copies gradients."""
    return mock.patch.object(device_sums, "torch", SimpleNamespace(**{**vars(torch), **changes}))


def test_missing_wait_for_a_copy_is_noticed():
    with planted_fault(Event=UnwaitedEvent):
        device_gradients = gradients("accelerator", make_small_trainable())[:-1]
    assert device_gradients != gradients("cpu", make_small_trainable())[:-1]


def test_memory_freed_while_it_is_copied_is_noticed():
    with mock.patch.object(torch.Tensor, "record_stream"):
        device_gradients = read_after_the_last_copy()
    standin.take_reports()  # a write to the memory during the copy may be reported as well
    assert device_gradients != gradients("cpu", make_small_trainable(), SUBTREE[:1])[:-1]


def read_after_the_last_copy() -> list[bytes]:
    """Return the blocks of one microbatch, which are read after all blocks were copied."""
    program: Any = EagerBackend("accelerator").compile(make_small_trainable(), batch())
    stream = program.gradients(SUBTREE[:1])
    program._thread.submit(lambda: None).result()
    torch.accelerator.synchronize()
    blocks = [item.values.tobytes() for item in stream if isinstance(item, BlockGradient)]
    program.close()
    return blocks


def test_copy_before_its_values_are_ready_is_noticed():
    with planted_fault(Stream=UnorderedStream):
        gradients("accelerator", make_small_trainable())
    assert any("without waiting" in report for report in standin.take_reports())


def test_staging_memory_reused_before_it_is_read_is_noticed():
    expected = gradients("cpu", make_small_trainable(), SUBTREE[:1])[:-1]
    assert read_after_the_last_copy() == expected
    with mock.patch.object(device_sums.StagingMemory, "_free_start", return_value=0):
        assert read_after_the_last_copy() != expected


def test_batch_that_stays_on_the_host_is_noticed():
    def keep_on_host(_program: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(array) for name, array in batch.arrays.items()}

    with (
        mock.patch("backends.eager.eager.EagerProgram._copy_to_device", keep_on_host),
        pytest.raises(RuntimeError, match="at least two devices"),
    ):
        gradients("accelerator", make_small_trainable())


def test_unseeded_random_numbers_of_the_device_are_noticed():
    module = Net(dropout=0.5)

    def gradients_of_seed(seed: int) -> list[bytes]:
        return gradients("accelerator", make_trainable(copy.deepcopy(module)), [(batch(), seed)])

    assert gradients_of_seed(1) == gradients_of_seed(1) != gradients_of_seed(2)
    with mock.patch.object(torch_devices, "seed"):
        assert gradients_of_seed(1) != gradients_of_seed(1)


def test_gradient_that_misses_its_hook_is_named():
    program: Any = EagerBackend("accelerator").compile(make_small_trainable(), batch())
    for hook in program._hooks:
        hook.remove()
    with pytest.raises(SamestepError, match=r"gradient of 'first\.weight' at its hook, got none"):
        list(program.gradients(SUBTREE[:1]))
    program.close()


# Devices that are too small, or fail.


@pytest.fixture
def limit() -> Iterator[Any]:
    yield standin.set_memory_limit
    standin.set_memory_limit(None)


def test_model_too_large_for_the_device_is_a_device_error_with_a_remedy(limit):
    limit(2048)
    with pytest.raises(DeviceError, match=r"accelerator 0.*out of memory.*microbatch") as error:
        EagerBackend("accelerator").compile(make_small_trainable(), batch())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_microbatch_that_runs_out_of_memory_once_is_retried(limit, phase):
    standin.peak_bytes(0)  # forget the peak of earlier tests
    program = EagerBackend("accelerator").compile(make_small_trainable(), batch())
    small_limit = standin.peak_bytes(0) // 8
    released_devices: list[torch.device] = []
    backward = torch.Tensor.backward

    def limit_then_backward(loss: torch.Tensor) -> None:
        if not released_devices:
            limit(small_limit)
        backward(loss)

    def release_memory(device: torch.device) -> None:
        released_devices.append(device)
        limit(None)

    with (
        mock.patch.object(torch_devices, "release_memory", release_memory),
        mock.patch.object(torch.Tensor, "backward", limit_then_backward),
    ):
        if phase == "forward":
            limit(small_limit)
        *blocks, loss = program.gradients(SUBTREE)
    program.close()
    assert len(released_devices) == 1
    block_bytes = [item.values.tobytes() for item in blocks if isinstance(item, BlockGradient)]
    assert [*block_bytes, repr(loss).encode()] == gradients("cpu", make_small_trainable())


class LookupModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(7, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.rows(ids)
        return scores


def lookup_loss(module: torch.nn.Module, arrays: Any) -> torch.Tensor:
    scores = module(arrays["ids"]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(scores, arrays["labels"].view(-1), reduction="sum")


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("ids", 7, r"'ids' has 7 at \[1, 2\].*7 rows"),
        ("ids", -1, "'ids' has -1"),
        ("labels", 3, r"'labels' has 3 at \[1, 2\].*3 rows"),
    ],
)
def test_index_out_of_range_is_refused_before_it_breaks_the_device(array, value, message):
    arrays = {"ids": np.ones((2, 4), np.int64), "labels": np.ones((2, 4), np.int64)}
    arrays["labels"][0, 0] = -100
    valid_batch = Batch({name: values.copy() for name, values in arrays.items()}, 7.0)
    program = EagerBackend("accelerator").compile(
        make_trainable(LookupModel(), loss=lookup_loss), valid_batch
    )
    arrays[array][1, 2] = value
    with pytest.raises(LossFailed, match=message) as error:
        list(program.gradients([(Batch(arrays, 7.0), 0)]))
    assert error.value.row == 1
    assert list(program.gradients([(valid_batch, 0)]))
    program.close()


def test_computed_index_out_of_range_names_the_microbatch():
    def loss_out_of_range(module: torch.nn.Module, arrays: Any) -> torch.Tensor:
        loss: torch.Tensor = module(arrays["ids"] + arrays["ids"].max() // 5).sum()
        return loss

    program = EagerBackend("accelerator").compile(
        make_trainable(LookupModel(), loss=loss_out_of_range),
        Batch({"ids": np.zeros((2, 4), np.int64)}, 8.0),
    )
    try:
        with pytest.raises(LossFailed, match="looks up an index"):
            list(program.gradients([(Batch({"ids": np.full((2, 4), 6)}, 8.0), 0)]))
    finally:
        standin.set_fault()
        program.close()


FAULTS = (
    "CUDA error: an illegal memory access was encountered",
    "HIP error: an illegal memory access was encountered",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_failing_device_is_named_instead_of_the_model(fault):
    program = EagerBackend("accelerator").compile(make_small_trainable(), batch())
    standin.set_fault(fault)
    try:
        with pytest.raises(DeviceError, match=f"accelerator 0.*{fault[:9]}"):
            list(program.gradients(SUBTREE))
    finally:
        standin.set_fault()
        program.close()


class PoolingModel(torch.nn.Module):
    """A model with pooling that has no deterministic backward on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(5))
        self.pool = torch.nn.AdaptiveAvgPool2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool((x * self.weight)[None, None]).flatten()


def pooled_loss(module: torch.nn.Module, arrays: Any) -> torch.Tensor:
    loss: torch.Tensor = module(arrays["x"]).square().sum()
    return loss


def cumulative_loss(module: torch.nn.Module, arrays: Any) -> torch.Tensor:
    loss: torch.Tensor = (arrays["x"] * module.get_parameter("weight")).cumsum(0).square().sum()
    return loss


@pytest.mark.parametrize(
    ("loss", "operator"), [(pooled_loss, "adaptive_avg_pool2d"), (cumulative_loss, "cumsum")]
)
def test_nondeterministic_operator_is_named_before_the_run(loss, operator):
    with pytest.raises(DeviceError, match=rf"accelerator 0.*{operator}.*no fixed order"):
        EagerBackend("accelerator").compile(make_trainable(PoolingModel(), loss=loss), batch())


def test_error_for_cumsum_names_a_replacement_with_equal_results():
    x = torch.randn(3, 5)
    sums = x @ torch.ones(5, 5, device=x.device).triu()
    torch.testing.assert_close(sums, x.cumsum(-1))
    with pytest.raises(
        DeviceError, match=r"by x @ torch\.ones\(n, n, device=x\.device\)\.triu\(\)"
    ):
        EagerBackend("accelerator").compile(
            make_trainable(PoolingModel(), loss=cumulative_loss), batch()
        )


def multinomial_loss(module: torch.nn.Module, arrays: Any) -> torch.Tensor:
    """Draw a column for each sample, as a noise-contrastive loss does."""
    scores = module(arrays["x"]) - arrays["y"]
    weights = scores.detach().square() + 0.1
    column = torch.multinomial(weights, 1)
    loss: torch.Tensor = scores.gather(1, column).square().sum()
    return loss


@pytest.mark.parametrize("has_float64", [True, False])
def test_loss_that_draws_with_multinomial_is_reproducible_on_the_card(has_float64):
    kind = replace(torch_devices.KINDS["accelerator"], has_float64=has_float64)
    standin.set_float64(has_float64=has_float64)
    try:
        with mock.patch.dict(torch_devices.KINDS, accelerator=kind):
            device_gradients = gradients("accelerator", make_small_trainable(loss=multinomial_loss))
            repeated = gradients("accelerator", make_small_trainable(loss=multinomial_loss))
    finally:
        standin.set_float64(has_float64=True)
    assert device_gradients == repeated


def test_index_out_of_range_in_the_first_microbatch_does_not_break_the_device():
    arrays = {"ids": np.full((2, 4), 7), "labels": np.ones((2, 4), np.int64)}
    with pytest.raises(IndexError, match="'ids' has 7"):
        EagerBackend("accelerator").compile(
            make_trainable(LookupModel(), loss=lookup_loss), Batch(arrays, 8.0)
        )
    EagerBackend("accelerator").compile(make_small_trainable(), batch()).close()


def test_standin_is_listed_and_chosen_by_name_only(limit):
    limit(1 << 30)
    rows = [row for row in devices() if row.backend == "accelerator"]
    assert [(row.index, row.usable, row.memory_bytes) for row in rows] == [
        (0, True, 1 << 30), (1, True, 1 << 30),
    ]  # fmt: skip
    assert choose("accelerator", 1).backend.info.index == 1
    assert choose("auto").backend.info.backend != "accelerator"


def test_profile_of_a_card_excludes_its_host(limit, monkeypatch):
    backend = EagerBackend("accelerator")
    profile = backend.numerics_profile(1)
    assert profile == backend.numerics_profile(8), "threads of the host do not matter"
    assert "isa" not in profile
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    limit(1 << 30)
    changed_profile = backend.numerics_profile(1)
    assert {name for name in changed_profile if profile.get(name) != changed_profile[name]} == {
        "NVIDIA_TF32_OVERRIDE", "memory",
    }  # fmt: skip
