"""Fork the coordinators that `fit` starts within the test process from the fork server, to save
their imports. A script that runs as its own process starts them normally."""

import subprocess
from types import SimpleNamespace

import pytest

from samestep import coordinator_subprocess, fitting
from tests.processes import forked_popen


@pytest.fixture(autouse=True)
def _forked_coordinators(monkeypatch):
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": forked_popen})
    monkeypatch.setattr(coordinator_subprocess, "subprocess", forking)


@pytest.fixture(autouse=True)
def _any_port(monkeypatch):
    """Bind to any free port, also when a process listens again: tests run in parallel."""
    monkeypatch.setenv("SAMESTEP_BIND", "127.0.0.1:0")
    monkeypatch.setattr(fitting, "_LAST_ADDRESS", [])
