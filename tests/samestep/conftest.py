"""Coordinators that `fit` starts in a process of tests are forked off the server, as others are; a
script that is a process of its own starts them as anybody's does."""

import subprocess
from types import SimpleNamespace

import pytest

from samestep import own_coordinator
from tests.processes import forked_popen


@pytest.fixture(autouse=True)
def _forked_coordinators(monkeypatch):
    ours = SimpleNamespace(**{**vars(subprocess), "Popen": forked_popen})
    monkeypatch.setattr(own_coordinator, "subprocess", ours)
