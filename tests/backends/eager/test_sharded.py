"""A sharded base has the bits of the whole one, in float32 and in half precision."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import processes
from tests.backends.eager.sharded_rank import CASES
from tests.free_ports import free_ports


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    """What both ranks have found."""
    port = str(free_ports(1)[0])
    module = "tests.backends.eager.sharded_rank"
    ranks = [processes.start(module, str(rank), port) for rank in range(2)]
    outputs = [rank.communicate(timeout=processes.PATIENCE_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(output) for output in outputs]


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_evaluation_have_the_bits_of_the_whole_base(by_rank, case):
    assert [rank[case][0] for rank in by_rank] == [True, True]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_keeps_half_of_the_base(by_rank, case):
    """And small tensors of layers in half precision, norms and biases."""
    for _, kept, whole in (rank[case] for rank in by_rank):
        assert kept < 0.53 * whole


def test_half_precision_takes_half_of_the_memory(by_rank):
    (_, wide, _), (_, half, _) = (by_rank[0][case] for case in ("float32", "bfloat16"))
    assert half < 0.65 * wide, "embeddings stay float32"


def test_what_cannot_be_sharded_is_refused_with_what_to_set(by_rank):
    for rank in by_rank:
        assert rank["int4"] == (
            "expected a base in float32 or half precision with --shard, got int4; write "
            "model.base_dtype=bfloat16, or remove --shard"
        )
        assert "expected a base without experts for --shard" in rank["experts"]
