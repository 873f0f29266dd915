"""A machine booted by systemd, with this checkout installed as the units expect it.

It is a systemd-nspawn container. Its root file system is this machine's below a tmpfs that takes
all changes, so it starts within seconds and leaves nothing behind. Tests wait for entries of its
journal, never for a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cluster import PATIENCE_S, ROOT

INSTALL_DIRECTORY: Final = "/usr/local/lib/samestep"
"""Directory where the units expect the two commands."""
COORDINATOR_HOME: Final = "/var/lib/samestep-coordinator"
_SETUP_SCRIPT: Final = """
set -eu
mount -t tmpfs -o mode=755 samestep "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay samestep -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cp -a "$1.files/." "$1/root/"
rm -rf "$1/root/etc/samestep" "$1/root/etc/credstore"
# Machines that share a control group would end each other's services.
for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
    [ -f "$hierarchy/cgroup.procs" ] || continue
    mkdir "$hierarchy/samestep-machine-$$"
    echo $$ >"$hierarchy/samestep-machine-$$/cgroup.procs"
done
# Files that nspawn leaves in /run disappear with this namespace.
mount -t tmpfs samestep /run
shift
exec systemd-nspawn "$@"
"""
_TARGET: Final = """[Unit]
Requires=basic.target samestep-test-limit.service
After=basic.target
AllowIsolate=yes
"""
_TIME_LIMIT: Final = """# Ends the machine if its test was killed.
[Unit]
SuccessAction=exit-force
[Service]
ExecStart=sleep 1800
"""
_JOURNAL: Final = "[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n"
_COMMAND: Final = """#!/bin/sh
export PYTHONPATH={at}/source:{at}/site-packages LD_LIBRARY_PATH={at}/python/lib HF_HUB_OFFLINE=1
exec {python} -m {module} "$@"
"""


class Machine:
    """A booted container; create it with `booted_machine`."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self._enter = ["nsenter", "--target", str(leader), "--all", "--"]
        self._root = Path(f"/proc/{leader}/root")
        self._entries: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._journalctl = subprocess.Popen(
            [*self._enter, "journalctl", "--follow", "--lines=all", "--output=json"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read_journal, daemon=True)
        self._reader.start()

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command in the container as root and return its output."""
        completed = subprocess.run(
            [*self._enter, *command],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SAMESTEP_HOME": COORDINATOR_HOME},
            capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
        assert completed.returncode == 0 or not check, (
            f"{command}: {completed.stderr}\n{self.journal()}"
        )
        return completed.stdout.strip()

    def path(self, path: str) -> Path:
        """Return the path of a container file as this machine sees it."""
        return self._root / path.lstrip("/")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file in the container."""
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--property", name, "--value", unit)

    def journal_end(self) -> int:
        """Return the journal's current end, for `wait_for`."""
        return len(self._entries)

    def wait_for(self, start: int = 0, **fields: str) -> dict[str, Any]:
        """Wait for the first entry from `start` on with these fields; MESSAGE is a prefix."""

        def matches(entry: dict[str, Any]) -> bool:
            has_prefix = str(entry.get("MESSAGE")).startswith(fields.get("MESSAGE", ""))
            other_fields = {name: text for name, text in fields.items() if name != "MESSAGE"}
            return has_prefix and other_fields.items() <= entry.items()

        read_entries, entry = start, None

        def has_entry() -> bool:
            nonlocal read_entries, entry
            new_entries = self._entries[read_entries:]
            read_entries += len(new_entries)
            entry = next(filter(matches, new_entries), None)
            return entry is not None

        with self._changed:
            self._changed.wait_for(has_entry, PATIENCE_S)
        assert entry is not None, f"no {fields} in the journal:\n{self.journal(start)}"
        return entry

    def wait_for_status(self, unit: str, pattern: str) -> None:
        """Poll until the unit's status text matches: there is no event for it."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not re.match(pattern, status := self.show(unit, "StatusText")):
            assert time.monotonic() < deadline_s, f"{unit} says {status!r}"
            time.sleep(0.1)

    def journal(self, start: int = 0) -> str:
        """Return journal lines, for the text of a failing test."""
        return "\n".join(
            f"{entry.get('SYSLOG_IDENTIFIER', '?')}: {entry.get('MESSAGE')}"
            for entry in self._entries[start:]
        )

    def close(self) -> None:
        """Wait until the machine, which has been killed, has closed its journal."""
        self._reader.join()
        self._journalctl.wait()

    def _read_journal(self) -> None:
        assert self._journalctl.stdout is not None
        with self._journalctl.stdout as lines:
            for line in lines:
                if not line.endswith("\n"):
                    return  # the machine ended while the journal was read
                with self._changed:
                    self._entries.append(json.loads(line))
                    self._changed.notify_all()


@contextlib.contextmanager
def booted_machine(
    directory: Path,
    name: str = "lab",
    *,
    mounts: Mapping[Path, str] | None = None,
    network: Path | None = None,
) -> Iterator[Machine]:
    """Boot a machine; skip the test where none can be booted.

    Args:
        directory: Working directory, for files named after the machine.
        name: The machine's host name.
        mounts: Path in the container for each host directory to mount; samestep is not installed.
            None: install this checkout instead.
        network: File of the network namespace to join; None for a new one.
    """
    if os.geteuid() != 0:
        pytest.skip("no machine can be booted here: only root may mount its file system")
    for command in ("systemd-nspawn", "nsenter", "unshare", "journalctl"):
        if shutil.which(command) is None:
            pytest.skip(f"no machine can be booted here: {command} is missing (systemd-container)")
    base = directory / name
    base.mkdir()
    files = directory / f"{name}.files"
    _write_files(files, name)
    if mounts is None:
        _install(files)
    mount_options = (
        _checkout_mounts()
        if mounts is None
        else [f"--bind-ro={host_path}:{guest_path}" for host_path, guest_path in mounts.items()]
    )
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    # A path: an abstract socket name is visible in this network namespace only.
    notices.bind(str(directory / f"{name}.notify"))
    enter_network = ["nsenter", f"--net={network}"] if network is not None else []
    network_options = ["--private-network"] if network is None else []
    nspawn = subprocess.Popen(
        [*enter_network, "unshare", "--mount", "--propagation", "private",
         "sh", "-c", _SETUP_SCRIPT, "sh", base, "--quiet", f"--directory={base}/root", "--boot",
         f"--machine={name}", "--register=no", "--keep-unit", *network_options,
         "--link-journal=no", "--console=pipe", "--notify-ready=yes", *mount_options, "--",
         "--unit=samestep-test.target", "--show-status=no"],
        env={**os.environ, "NOTIFY_SOCKET": notices.getsockname()},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    leader, machine = 0, None
    try:
        with notices:  # closed after the boot: an unread socket would block systemd
            leader = _wait_for_leader(nspawn, notices)
        machine = Machine(leader)
        yield machine
    finally:
        # The machine ends with its first process.
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader or nspawn.pid, signal.SIGKILL)
        nspawn.communicate()
        if machine is not None:
            machine.close()
        _remove_control_groups(f"samestep-machine-{nspawn.pid}")


def _remove_control_groups(name: str) -> None:
    """Remove the machine's control groups; a busy one does no harm."""
    for hierarchy in ("", "unified", "systemd"):
        for path, _, _ in os.walk(Path("/sys/fs/cgroup", hierarchy, name), topdown=False):
            with contextlib.suppress(OSError):
                Path(path).rmdir()


def _wait_for_leader(nspawn: subprocess.Popen[str], notices: socket.socket) -> int:
    """Return the process number of the container's init, once systemd has booted."""
    assert nspawn.stdout is not None
    leader, is_ready = 0, False
    notices.settimeout(1.0)
    deadline_s = time.monotonic() + PATIENCE_S
    while not (leader and is_ready):
        try:
            message = notices.recv(4096).decode().splitlines()
        except TimeoutError:
            if nspawn.poll() is None:
                if time.monotonic() > deadline_s:
                    pytest.skip(f"no machine can be booted here: not up after {PATIENCE_S:.0f} s")
                continue
            pytest.skip(f"no machine can be booted here: {' '.join(nspawn.stdout.read().split())}")
        for line in message:
            name, _, value = line.partition("=")
            leader = int(value) if name == "X_NSPAWN_LEADER_PID" else leader
            is_ready = is_ready or line == "READY=1"
    return leader


def _write_files(files: Path, name: str) -> None:
    """Write the files that are copied into the container's file system."""
    units = files / "etc/systemd/system"
    units.mkdir(parents=True)
    (units / "samestep-test.target").write_text(_TARGET)
    (units / "samestep-test-limit.service").write_text(_TIME_LIMIT)
    (files / "etc/hostname").write_text(f"{name}\n")
    journald = files / "etc/systemd/journald.conf.d/samestep-test.conf"
    journald.parent.mkdir(parents=True)
    journald.write_text(_JOURNAL)


def _install(files: Path) -> None:
    """Install this checkout with the interpreter and packages that run the tests."""
    for unit in (ROOT / "deploy/systemd").glob("*.service"):
        shutil.copy(unit, files / "etc/systemd/system")
    commands = files / INSTALL_DIRECTORY.lstrip("/") / "bin"
    commands.mkdir(parents=True)
    for module in ("coordinator", "worker"):
        command = commands / module
        command.write_text(_COMMAND.format(at=INSTALL_DIRECTORY, python=_python(), module=module))
        command.chmod(0o755)


def _python() -> str:
    """Return the interpreter's path in the container: /usr is shared, other prefixes are bound."""
    host_path = os.path.realpath(sys.executable)
    if sys.base_prefix == "/usr":
        return host_path
    return f"{INSTALL_DIRECTORY}/python/{os.path.relpath(host_path, sys.base_prefix)}"


def _checkout_mounts() -> list[str]:
    """Return nspawn's options to mount this checkout, its packages and its Python read-only."""
    directories = {ROOT: "source", sysconfig.get_path("purelib"): "site-packages"}
    if sys.base_prefix != "/usr":
        directories[sys.base_prefix] = "python"
    return [
        f"--bind-ro={host_path}:{INSTALL_DIRECTORY}/{guest_path}"
        for host_path, guest_path in directories.items()
    ]
