"""Whether the kernel killed the previous worker of this machine for lack of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.machine.presence import Presence


@pytest.fixture
def system(tmp_path):
    """Return a fake procfs, and a function that sets the kernel's kill count and boot id."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/\n")

    def set_counts(kill_count: int, boot: str = "a") -> None:
        (proc / "vmstat").write_text(f"oom_kill {kill_count}\n")
        (proc / "sys/kernel/random/boot_id").write_text(f"{boot}\n")

    set_counts(1)
    return proc, set_counts


def presence(tmp_path: Path, proc: Path, name: str = "w") -> Presence:
    return Presence(tmp_path / "home", name, proc, tmp_path / "groups")


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def leave_note(pid: int, monkeypatch, note: Presence) -> None:
    """Leave the note of a worker process that started and did not end properly."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        note.begin()


def test_worker_killed_for_memory_is_reported_once(tmp_path, system, monkeypatch):
    proc, set_counts = system
    leave_note(dead_pid(), monkeypatch, presence(tmp_path, proc))
    set_counts(2)
    assert presence(tmp_path, proc, "other").begin() == ""
    note = presence(tmp_path, proc)
    message = note.begin()
    assert "'w' that ran here before was killed by the kernel for memory" in message
    note.end()
    assert presence(tmp_path, proc).begin() == ""


@pytest.mark.parametrize("case", ["otherwise", "rebooted", "ended", "alive", "damaged"])
def test_other_exits_are_not_reported(tmp_path, system, monkeypatch, case):
    proc, set_counts = system
    note = presence(tmp_path, proc)
    leave_note(os.getppid() if case == "alive" else dead_pid(), monkeypatch, note)
    set_counts(1 if case == "otherwise" else 2, "b" if case == "rebooted" else "a")
    (path,) = (tmp_path / "home" / "worker").glob("*.running")
    if case == "ended":
        path.unlink()
    elif case == "damaged":
        path.write_text("[")
    assert presence(tmp_path, proc).begin() == ""


def test_unwritable_home_is_ignored(tmp_path, system):
    (tmp_path / "home").write_text("a file")
    note = presence(tmp_path, system[0])
    assert note.begin() == ""
    note.end()
