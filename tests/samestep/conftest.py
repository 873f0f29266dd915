"""Fixtures for calls of `fit` within the test process: its coordinators come from the fork server.

That saves the time of their imports. A script in a separate process starts them as users do.
"""

import subprocess
from types import SimpleNamespace

import pytest

from samestep import coordinator_subprocess, fitting
from tests.processes import forked_popen


@pytest.fixture(autouse=True)
def _forked_coordinators(monkeypatch):
    forking_subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": forked_popen})
    monkeypatch.setattr(coordinator_subprocess, "subprocess", forking_subprocess)


@pytest.fixture(autouse=True)
def _any_port(monkeypatch):
    """Let every call of `fit` listen at a free port: tests run in parallel."""
    monkeypatch.setenv("SAMESTEP_BIND", "127.0.0.1:0")
    monkeypatch.setattr(fitting, "_LAST_ADDRESS", [])
