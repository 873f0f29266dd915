"""Settings of torch that decide bits: set for a run, and restored to the user's values
afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from backends.eager import numerics

BACKENDS: Any = torch.backends


def use_tf32_everywhere() -> None:
    BACKENDS.fp32_precision = "tf32"


def set_precision_of_each_library() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    BACKENDS.cudnn.conv.fp32_precision = "tf32"
    BACKENDS.mkldnn.conv.fp32_precision = "bf16"


def set_precision_by_earlier_names() -> None:
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cudnn.allow_tf32 = BACKENDS.cudnn.benchmark = True
    BACKENDS.cuda.matmul.allow_fp16_reduced_precision_reduction = True


@contextlib.contextmanager
def restore_matmul_precision() -> Iterator[None]:
    """Restore a setting that runs never change, and therefore do not restore."""
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def precisions() -> list[str]:
    cudnn, mkldnn = BACKENDS.cudnn, BACKENDS.mkldnn
    parts = (
        BACKENDS, BACKENDS.cuda.matmul, cudnn, cudnn.conv, cudnn.rnn,
        mkldnn, mkldnn.conv, mkldnn.rnn, mkldnn.matmul,
    )  # fmt: skip
    return [part.fp32_precision for part in parts]


def flags() -> list[object]:
    products = BACKENDS.cuda.matmul
    return [
        torch.get_deterministic_debug_mode(),
        torch.get_num_threads(),
        BACKENDS.cudnn.benchmark,
        BACKENDS.cuda.cudnn_sdp_enabled(),
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_fp16_accumulation,
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    ]


@pytest.mark.skipif(not hasattr(BACKENDS, "fp32_precision"), reason="torch has one name for each")
@pytest.mark.parametrize(
    "change", [use_tf32_everywhere, set_precision_of_each_library, set_precision_by_earlier_names]
)
def test_run_computes_in_float32_and_restores_settings(change: Callable[[], None]):
    with numerics.restore_settings(), restore_matmul_precision():
        change()
        user_settings = precisions(), flags()
        with numerics.restore_settings():
            numerics.make_deterministic()
            numerics.use_threads(1)
            assert precisions() == ["ieee"] * len(user_settings[0])
            assert flags() == [2, 1, *[False] * 6]
        assert (precisions(), flags()) == user_settings


def test_code_may_disable_cudnn_during_and_after_a_run():
    """As in transformers around CTC, which also reads torch's older switch."""
    with numerics.restore_settings():
        numerics.make_deterministic()
        with torch.backends.cudnn.flags(enabled=False):
            pass
    with torch.backends.cudnn.flags(enabled=False):
        pass
