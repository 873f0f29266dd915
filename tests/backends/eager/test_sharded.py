"""Training with a sharded base has the bits of training with the whole base."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import processes
from tests.backends.eager.sharded_rank import CASES
from tests.free_ports import free_ports


@pytest.fixture(scope="module")
def rank_results() -> list[dict[str, Any]]:
    """Return the results of both ranks."""
    port = str(free_ports(1)[0])
    module = "tests.backends.eager.sharded_rank"
    ranks = [processes.start(module, str(rank), port) for rank in range(2)]
    outputs = [rank.communicate(timeout=processes.PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(output) for output in outputs]


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_evaluation_have_the_bits_of_the_whole_base(rank_results, case):
    assert [rank[case][0] for rank in rank_results] == [True, True]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_stores_half_of_the_base(rank_results, case):
    """Each rank also stores the float32 norms and biases of layers in half precision."""
    for _, local_bytes, whole_bytes in (rank[case] for rank in rank_results):
        assert local_bytes < 0.53 * whole_bytes


def test_half_precision_takes_half_of_the_memory(rank_results):
    (_, float32_bytes, _), (_, bfloat16_bytes, _) = (
        rank_results[0][case] for case in ("float32", "bfloat16")
    )
    assert bfloat16_bytes < 0.65 * float32_bytes, "embeddings stay float32"


def test_error_for_an_unsupported_base_names_the_setting_to_change(rank_results):
    for rank in rank_results:
        assert rank["int4"] == (
            "expected a base in float32 or half precision with --shard, got int4; write "
            "model.base_dtype=bfloat16, or remove --shard"
        )
        assert "expected a base without experts for --shard" in rank["experts"]
