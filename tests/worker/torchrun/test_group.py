"""Errors of a rank that cannot reach the rendezvous, or has other numerics than the leader."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from backends.base.interface import DeviceInfo
from protocol.base.errors import SamestepError, Unreachable
from tests.silent_address import refusing_port
from worker.torchrun import group
from worker.torchrun.group import RankGroup
from worker.torchrun.leader import GroupBackend


def test_rank_without_a_rendezvous_ends_with_a_one_line_error(monkeypatch):
    port = refusing_port()
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**rendezvous, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(group, "RENDEZVOUS_TIMEOUT", timedelta(milliseconds=100))
    with pytest.raises(
        Unreachable, match=f"no answer from the ranks' rendezvous at 127.0.0.1:{port}"
    ):
        RankGroup(uses_cards=False)


def test_ranks_with_other_numerics_are_refused_with_every_difference():
    own_profile = {"torch": "2.8", "threads": "1", "processor": "Zen 4"}
    other_profile = {"torch": "2.7", "threads": "2", "processor": "Zen 5"}
    ranks: Any = SimpleNamespace(
        size=2, send_order=lambda *_: None,
        receive=lambda _: ({"numerics_profile": json.dumps(other_profile)}, {}),
    )  # fmt: skip
    info = DeviceInfo("cpu", "CPU", usable=True, reason="")
    backend: Any = SimpleNamespace(info=info, numerics_profile=lambda _: own_profile)
    with pytest.raises(SamestepError, match=r"different values of threads, torch on rank 1"):
        GroupBackend(ranks, backend, [{"name": "CPU"}]).numerics_profile(1)
