"""One process per device under one command."""

import signal
import subprocess
import sys

import pytest

from worker.shell import group
from worker.shell.group import run_group

ARGUMENTS = ["--coordinator", "host:1", "--gpus", "0,1", "--name=box", "--quiet"]


class Child:
    def __init__(self, code):
        self._code = code
        self.signals: list[int] = []

    def wait(self):
        return self._code

    def send_signal(self, number):
        self.signals.append(number)


@pytest.fixture
def started(monkeypatch):
    """What would be started, and with which codes it ends."""
    commands: list[list[str]] = []
    children: list[Child] = []
    codes = iter([0, 0, 0])

    def start(command, env):
        assert env["PATH"]
        commands.append(command)
        children.append(Child(next(codes)))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    handlers: dict[int, object] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)

    def run(*ends):
        nonlocal codes
        codes = iter(ends)
        return run_group(ARGUMENTS, list(range(len(ends))), "box")

    return run, commands, children, handlers


def test_each_device_gets_a_process_of_its_own_name(started):
    run, commands, _, _ = started
    assert run(0, 0) == 0
    assert commands == [
        [sys.executable, "-P", "-m", "worker", "--coordinator", "host:1", "--quiet",
         "--gpus", str(index), "--name", f"box-gpu{index}"]
        for index in (0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "expected"),
    [((0, 0), 0), ((0, 69), 69), ((78, 69), 78), ((-9, 0), 1), ((-15, 69), 69)],
)
def test_the_first_failure_is_the_group_s(started, ends, expected):
    run, *_ = started
    assert run(*ends) == expected


@pytest.mark.parametrize(("ends", "asked"), [((0, 69), True), ((2, 0), True), ((0, 1), False)])
def test_where_a_device_cannot_be_had_the_others_are_asked_to_end(started, ends, asked):
    run, _, children, _ = started
    run(*ends)
    assert any(child.signals for child in children) == asked


def test_a_termination_is_passed_on_and_an_interrupt_left_to_the_terminal(started):
    run, _, children, handlers = started
    run(0, 0)
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert [child.signals for child in children] == [[signal.SIGTERM], [signal.SIGTERM]]
    assert handlers[signal.SIGINT] is signal.SIG_IGN


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ([], []),
        (["--gpus", "0,1"], []),
        (["--gpus=0,1", "--name", "x", "--quiet"], ["--quiet"]),
        (["--backend", "cpu", "--gpus", "0"], ["--backend", "cpu"]),
        (["--gpus"], []),
        (["--names", "x"], ["--names", "x"]),
    ],
)
def test_options_are_taken_out_with_their_values(arguments, kept):
    assert group._without(arguments, "--gpus", "--name") == kept
