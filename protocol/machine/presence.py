"""Detect that the previous worker of this name was killed by the OOM killer.

A killed worker cannot report that it was killed. But the kernel counts OOM kills: if a worker's
note still exists and the count has grown since the note was written, the worker was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.base.errors import UsageError
from protocol.base.regular_file import read_json
from protocol.machine.memory import GROUPS, PROC, count_oom_kills, has_new_kills
from protocol.machine.secret_file import write_secret


class Presence:
    """The note that exists while a worker runs.

    Args:
        home: See `secret_file.state_home`.
        name: The worker's name.
        proc: The root of procfs.
        groups: The root of the control group tree.
    """

    def __init__(self, home: Path, name: str, proc: Path = PROC, groups: Path = GROUPS) -> None:
        digest = hashlib.sha256(f"{platform.node()} {name}".encode()).hexdigest()
        self._path = home / "worker" / f"{digest[:32]}.running"
        self._name, self._proc, self._groups = name, proc, groups

    def begin(self) -> str:
        """Write the note; return a message if the previous worker was killed, else an empty
        text."""
        note = {
            "pid": os.getpid(),
            "boot": self._boot_id(),
            "killed": count_oom_kills(self._proc, self._groups),
        }
        earlier_note = self._read()
        if self._is_alive(earlier_note):
            return ""  # another worker of this name is running
        with suppress(UsageError):
            write_secret(self._path, json.dumps(note))
        if earlier_note.get("boot") != note["boot"]:
            return ""
        return self._describe_kill(earlier_note.get("killed"), note["killed"])

    def end(self) -> None:
        """Remove the note: this worker ends normally."""
        if self._read().get("pid") == os.getpid():
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _describe_kill(self, before: object, now: object) -> str:
        if not isinstance(before, dict) or not isinstance(now, dict):
            return ""
        counts = {scope: count for scope, count in before.items() if isinstance(count, int)}
        if not has_new_kills(counts, now):
            return ""
        return (
            f"the worker {self._name!r} that ran here before was killed by the kernel for memory "
            "(oom_kill): raise the memory limit of the unit or container, name fewer devices, or "
            "train with a smaller batch.microbatch"
        )

    def _boot_id(self) -> str:
        with suppress(OSError):
            return (self._proc / "sys/kernel/random/boot_id").read_text().strip()
        return ""

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            document = read_json(self._path)
            return document if isinstance(document, dict) else {}
        return {}

    @staticmethod
    def _is_alive(note: dict[str, Any]) -> bool:
        pid = note.get("pid")
        if not isinstance(pid, int) or pid <= 0 or pid == os.getpid():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return True
        return True
