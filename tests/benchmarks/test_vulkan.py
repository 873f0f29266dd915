"""Tests of the Vulkan benchmark at its smallest size: no duration is checked."""

import sys

import pytest
import torch

from backends.wgpu.device.adapters import adapters
from benchmarks import turns, vulkan, vulkan_steps
from benchmarks.torch_side import peak_tflops, torch_side


@pytest.fixture(scope="module")
def backend():
    adapter_list = adapters()
    if isinstance(adapter_list, str):
        pytest.skip(adapter_list)
    from backends.wgpu.backend import VulkanBackend

    vulkan = VulkanBackend(0)
    yield vulkan
    vulkan.device.close()


def test_functions_are_timed_alternately_and_the_first_round_is_dropped():
    order = []
    times = turns.measure_alternately([lambda: order.append("a"), lambda: order.append("b")], 2)
    assert order == ["a", "b"] * 3
    assert [len(function_times.wall_s) for function_times in times] == [2, 2]
    assert turns.ratios([2.0, 6.0, 1.0], [1.0, 2.0, 1.0]) == "2.00 (1.00-3.00)"


def test_matrix_product_is_timed_and_correct(backend):
    row = vulkan.matmul_row(backend, torch_side("cpu"), (16, 32, 8), 1, peak=1e-9)
    by_column = dict(zip(vulkan._PRODUCT_HEADER, row, strict=True))
    assert by_column["product"] == "16 x 32 by 32 x 8"
    assert float(by_column["error"]) < 1e-5
    assert float(by_column["of peak"].rstrip("%")) > 0
    assert bool(by_column["of CPU time"]) is backend.adapter.software
    assert vulkan.matmul_row(backend, torch_side("cpu"), (16, 32, 8), 1)[2] == ""


@pytest.mark.slow
def test_decoder_has_the_same_results_in_torch_and_on_vulkan(backend):
    decoder = vulkan_steps.Decoder(64, 2, 8, "LoRA")
    row = vulkan_steps.decoder_row(backend, torch_side("cpu"), decoder, 1, 2)
    by_column = dict(zip(vulkan._STEP_HEADER, row, strict=True))
    assert by_column["microbatch"] == "decoder 64, 4 layers, LoRA, 2 x 8"
    assert float(by_column["difference"]) < 1e-5
    assert float(by_column["ms"]) > 0
    assert float(by_column["torch ms"]) > 0


@pytest.mark.slow
def test_subtree_sum_on_the_device_is_read_back_once(backend):
    row = vulkan_steps.sums_row(backend, "causal-lm", 1, 2)
    device_readbacks, host_readbacks = map(int, row[-2:])
    assert host_readbacks == vulkan_steps.SUBTREE_LEAVES * device_readbacks


def test_torch_reference_uses_a_cuda_device_if_there_is_one():
    has_cuda = torch.cuda.is_available()
    assert torch_side("auto").device.type == ("cuda" if has_cuda else "cpu")
    assert torch_side("cpu").shares_cpu
    assert torch.get_float32_matmul_precision() == "highest", "no TF32"
    if not has_cuda:
        with pytest.raises(SystemExit, match="no CUDA device here"):
            torch_side("cuda")


def test_peak_tflops_follow_from_processors_architecture_and_clock():
    assert peak_tflops(132, (9, 0), 1_980_000) == pytest.approx(66.9, rel=1e-3)  # H100 SXM
    assert peak_tflops(108, (8, 0), 1_410_000) == pytest.approx(19.5, rel=1e-3)  # A100
    assert peak_tflops(82, (8, 6), 1_695_000) == pytest.approx(35.6, rel=1e-3)  # RTX 3090
    assert peak_tflops(82, (8, 6), 0) is None
    assert peak_tflops(82, (99, 0), 1_695_000) is None
    assert torch_side("cpu").peak_tflops_of("llvmpipe") is None


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_only_option_prints_one_table(monkeypatch, capsys):
    arguments = "--only decoder --hidden 64 --batch 2 8 --rounds 1 --against cpu"
    monkeypatch.setattr(sys, "argv", ["vulkan", *arguments.split()])
    vulkan.main()
    out = capsys.readouterr().out
    assert "against torch on cpu, " in out
    assert out.count("decoder 64, 4 layers") == 2
    assert "TFLOP/s" not in out
