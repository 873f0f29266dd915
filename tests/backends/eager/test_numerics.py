"""Settings of torch that affect bits: a run sets them, then restores the user's values."""

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


def set_precision_with_older_names() -> None:
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cudnn.allow_tf32 = BACKENDS.cudnn.benchmark = True
    BACKENDS.cuda.matmul.allow_fp16_reduced_precision_reduction = True


@contextlib.contextmanager
def restore_matmul_precision() -> Iterator[None]:
    """Restore a setting that a run neither changes nor restores."""
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


def other_settings() -> dict[str, object]:
    products = BACKENDS.cuda.matmul
    return {
        "deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        "num_threads": torch.get_num_threads(),
        "benchmark": BACKENDS.cudnn.benchmark,
        "cudnn_sdp": BACKENDS.cuda.cudnn_sdp_enabled(),
        "bf16_reduction": products.allow_bf16_reduced_precision_reduction,
        "fp16_reduction": products.allow_fp16_reduced_precision_reduction,
        "fp16_accumulation": products.allow_fp16_accumulation,
        "fill_memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    }


SETTINGS_OF_A_RUN: dict[str, object] = {
    **dict.fromkeys(other_settings(), False), "deterministic_debug_mode": 2, "num_threads": 1,
}  # fmt: skip
"""Debug mode 2 raises an error for nondeterministic operators."""


@pytest.mark.skipif(not hasattr(BACKENDS, "fp32_precision"), reason="torch has older names only")
@pytest.mark.parametrize(
    "change", [use_tf32_everywhere, set_precision_of_each_library, set_precision_with_older_names]
)
def test_run_computes_in_float32_and_restores_settings(change: Callable[[], None]):
    with numerics.restore_settings(), restore_matmul_precision():
        change()
        user_settings = precisions(), other_settings()
        with numerics.restore_settings():
            numerics.make_deterministic()
            numerics.use_threads(1)
            assert precisions() == ["ieee"] * len(user_settings[0])
            assert other_settings() == SETTINGS_OF_A_RUN
        assert (precisions(), other_settings()) == user_settings


def test_code_may_disable_cudnn_during_and_after_a_run():
    """transformers does so around its CTC loss; `cudnn.flags` reads the older switch for TF32."""
    with numerics.restore_settings():
        numerics.make_deterministic()
        with torch.backends.cudnn.flags(enabled=False):
            pass
    with torch.backends.cudnn.flags(enabled=False):
        pass
