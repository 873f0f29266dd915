"""Errors of a rank that cannot reach the rendezvous."""

from __future__ import annotations

from datetime import timedelta

import pytest

from protocol.base.errors import Unreachable
from tests.silent_address import refusing_port
from worker.torchrun import group
from worker.torchrun.group import RankGroup


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
