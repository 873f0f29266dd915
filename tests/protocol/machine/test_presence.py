"""Whether the worker that ran here before was killed by the kernel for memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.machine.presence import Presence


@pytest.fixture
def system(tmp_path):
    """Made-up procfs; a function that sets the kernel's count and the boot."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/\n")

    def counts(killed: int, boot: str = "a") -> None:
        (proc / "vmstat").write_text(f"oom_kill {killed}\n")
        (proc / "sys/kernel/random/boot_id").write_text(f"{boot}\n")

    counts(1)
    return proc, counts


def presence(tmp_path: Path, proc: Path, name: str = "w") -> Presence:
    return Presence(tmp_path / "home", name, proc, tmp_path / "groups")


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left_by(pid: int, monkeypatch, note: Presence) -> None:
    """A worker of that process has begun, and not ended."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        note.begin()


def test_one_that_was_killed_for_memory_is_reported_once(tmp_path, system, monkeypatch):
    proc, counts = system
    left_by(dead_pid(), monkeypatch, presence(tmp_path, proc))
    counts(2)
    assert presence(tmp_path, proc, "other").begin() == ""
    note = presence(tmp_path, proc)
    message = note.begin()
    assert "'w' that ran here before was killed by the kernel for memory" in message
    note.end()
    assert presence(tmp_path, proc).begin() == ""


@pytest.mark.parametrize("case", ["otherwise", "rebooted", "ended", "alive", "damaged"])
def test_what_reports_nothing_of_memory(tmp_path, system, monkeypatch, case):
    proc, counts = system
    note = presence(tmp_path, proc)
    left_by(os.getppid() if case == "alive" else dead_pid(), monkeypatch, note)
    counts(1 if case == "otherwise" else 2, "b" if case == "rebooted" else "a")
    (path,) = (tmp_path / "home" / "worker").glob("*.running")
    if case == "ended":
        path.unlink()
    elif case == "damaged":
        path.write_text("[")
    assert presence(tmp_path, proc).begin() == ""


def test_a_home_that_cannot_be_written_stops_nobody(tmp_path, system):
    (tmp_path / "home").write_text("a file")
    note = presence(tmp_path, system[0])
    assert note.begin() == ""
    note.end()
