"""Coordinators that `fit` starts in a process of tests are forked off the server, as others are; a
script that is a process of its own starts them as anybody's does."""

import subprocess
from types import SimpleNamespace

import pytest

from samestep import coordinator_subprocess, fitting
from tests.processes import forked_popen


@pytest.fixture(autouse=True)
def _forked_coordinators(monkeypatch):
    ours = SimpleNamespace(**{**vars(subprocess), "Popen": forked_popen})
    monkeypatch.setattr(coordinator_subprocess, "subprocess", ours)


@pytest.fixture(autouse=True)
def _any_port(monkeypatch):
    """Tests beside each other take none of each other's, also where a process listens again."""
    monkeypatch.setenv("SAMESTEP_BIND", "127.0.0.1:0")
    monkeypatch.setattr(fitting, "_BOUND_TO", [])
