"""A machine booted by systemd, with this checkout installed as the units expect it.

It is a systemd-nspawn container whose root file system is this machine's below a tmpfs that takes
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

INSTALLED: Final = "/usr/local/lib/samestep"
"""Where the units look for the two commands."""
COORDINATOR_HOME: Final = "/var/lib/samestep-coordinator"
_SET_UP: Final = """
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
# What nspawn leaves in /run goes with this namespace.
mount -t tmpfs samestep /run
shift
exec systemd-nspawn "$@"
"""
_TARGET: Final = """[Unit]
Requires=basic.target samestep-test-limit.service
After=basic.target
AllowIsolate=yes
"""
_LIMIT: Final = """# A machine whose test was killed ends all the same.
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
    """Make one with `booted_machine`."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self._enter = ["nsenter", "--target", str(leader), "--all", "--"]
        self._root = Path(f"/proc/{leader}/root")
        self._entries: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._follower = subprocess.Popen(
            [*self._enter, "journalctl", "--follow", "--lines=all", "--output=json"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read_journal, daemon=True)
        self._reader.start()

    def run(self, *command: str, check: bool = True) -> str:
        """A command there, as root; what it prints."""
        done = subprocess.run(
            [*self._enter, *command],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SAMESTEP_HOME": COORDINATOR_HOME},
            capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}\n{self.journal()}"
        return done.stdout.strip()

    def path(self, path: str) -> Path:
        """A file there, as seen from here."""
        return self._root / path.lstrip("/")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file there."""
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def show(self, unit: str, name: str) -> str:
        """A unit's property."""
        return self.run("systemctl", "show", "--property", name, "--value", unit)

    def now(self) -> int:
        """A place in the journal, for `wait_for`."""
        return len(self._entries)

    def wait_for(self, since: int = 0, **fields: str) -> dict[str, Any]:
        """The first entry after that place with these fields; MESSAGE need only begin so."""

        def fits(entry: dict[str, Any]) -> bool:
            beginning = str(entry.get("MESSAGE")).startswith(fields.get("MESSAGE", ""))
            rest = {name: text for name, text in fields.items() if name != "MESSAGE"}
            return beginning and rest.items() <= entry.items()

        looked_at, entry = since, None

        def found() -> bool:
            nonlocal looked_at, entry
            new = self._entries[looked_at:]
            looked_at += len(new)
            entry = next(filter(fits, new), None)
            return entry is not None

        with self._changed:
            self._changed.wait_for(found, PATIENCE_S)
        assert entry is not None, f"no {fields} in the journal:\n{self.journal(since)}"
        return entry

    def wait_for_status(self, unit: str, pattern: str) -> None:
        """Until its status text begins so; there is no event for that, so it is asked again."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not re.match(pattern, status := self.show(unit, "StatusText")):
            assert time.monotonic() < deadline_s, f"{unit} says {status!r}"
            time.sleep(0.1)

    def journal(self, since: int = 0) -> str:
        """Its lines, for a failing test's text."""
        return "\n".join(
            f"{entry.get('SYSLOG_IDENTIFIER', '?')}: {entry.get('MESSAGE')}"
            for entry in self._entries[since:]
        )

    def close(self) -> None:
        """The machine has ended: so does what was read of it."""
        self._reader.join()
        self._follower.wait()

    def _read_journal(self) -> None:
        assert self._follower.stdout is not None
        with self._follower.stdout as lines:
            for line in lines:
                if not line.endswith("\n"):
                    return  # the machine has ended while it was told
                with self._changed:
                    self._entries.append(json.loads(line))
                    self._changed.notify_all()


@contextlib.contextmanager
def booted_machine(
    directory: Path,
    name: str = "lab",
    *,
    bare: Mapping[Path, str] | None = None,
    network: Path | None = None,
) -> Iterator[Machine]:
    """Boot one; skips the test where none can be had.

    Args:
        directory: One to work in; the machine's name is not taken there.
        name: Its host name.
        bare: Nothing of samestep is installed; these directories of this machine are seen there.
        network: The file of the network namespace that it is in; None for one of its own.
    """
    if os.geteuid() != 0:
        pytest.skip("no machine can be booted here: only root may mount its file system")
    for command in ("systemd-nspawn", "nsenter", "unshare", "journalctl"):
        if shutil.which(command) is None:
            pytest.skip(f"no machine can be booted here: {command} is missing (systemd-container)")
    base = directory / name
    base.mkdir()
    files = directory / f"{name}.files"
    _lay_out(files, name)
    if bare is None:
        _install(files)
    binds = (
        _binds() if bare is None else [f"--bind-ro={here}:{there}" for here, there in bare.items()]
    )
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    # By a path: an abstract name would be of this network namespace alone.
    notices.bind(str(directory / f"{name}.notify"))
    enter = ["nsenter", f"--net={network}"] if network is not None else []
    own_network = ["--private-network"] if network is None else []
    nspawn = subprocess.Popen(
        [*enter, "unshare", "--mount", "--propagation", "private", "sh", "-c", _SET_UP, "sh", base,
         "--quiet", f"--directory={base}/root", "--boot", f"--machine={name}", "--register=no",
         "--keep-unit", *own_network, "--link-journal=no", "--console=pipe",
         "--notify-ready=yes", *binds, "--",
         "--unit=samestep-test.target", "--show-status=no"],
        env={**os.environ, "NOTIFY_SOCKET": notices.getsockname()},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    leader, machine = 0, None
    try:
        with notices:  # and no longer: a socket that is not read would stop systemd there
            leader = _leader(nspawn, notices)
        machine = Machine(leader)
        yield machine
    finally:
        # Without its first process the machine is no more.
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader or nspawn.pid, signal.SIGKILL)
        nspawn.communicate()
        if machine is not None:
            machine.close()
        _remove_control_groups(f"samestep-machine-{nspawn.pid}")


def _remove_control_groups(name: str) -> None:
    """Nothing runs in them any more; one that is still busy does no harm."""
    for hierarchy in ("", "unified", "systemd"):
        for path, _, _ in os.walk(Path("/sys/fs/cgroup", hierarchy, name), topdown=False):
            with contextlib.suppress(OSError):
                Path(path).rmdir()


def _leader(nspawn: subprocess.Popen[str], notices: socket.socket) -> int:
    """The number of its first process, once systemd has booted there."""
    assert nspawn.stdout is not None
    leader, ready = 0, False
    notices.settimeout(1.0)
    deadline_s = time.monotonic() + PATIENCE_S
    while not (leader and ready):
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
            ready = ready or line == "READY=1"
    return leader


def _lay_out(files: Path, name: str) -> None:
    """What is copied into its file system."""
    units = files / "etc/systemd/system"
    units.mkdir(parents=True)
    (units / "samestep-test.target").write_text(_TARGET)
    (units / "samestep-test-limit.service").write_text(_LIMIT)
    (files / "etc/hostname").write_text(f"{name}\n")
    journald = files / "etc/systemd/journald.conf.d/samestep-test.conf"
    journald.parent.mkdir(parents=True)
    journald.write_text(_JOURNAL)


def _install(files: Path) -> None:
    """This checkout, by the interpreter and the packages that run the tests."""
    for unit in (ROOT / "deploy/systemd").glob("*.service"):
        shutil.copy(unit, files / "etc/systemd/system")
    commands = files / INSTALLED.lstrip("/") / "bin"
    commands.mkdir(parents=True)
    for module in ("coordinator", "worker"):
        command = commands / module
        command.write_text(_COMMAND.format(at=INSTALLED, python=_python(), module=module))
        command.chmod(0o755)


def _python() -> str:
    """The interpreter's name there: /usr is as here, another prefix may be in someone's home."""
    here = os.path.realpath(sys.executable)
    if sys.base_prefix == "/usr":
        return here
    return f"{INSTALLED}/python/{os.path.relpath(here, sys.base_prefix)}"


def _binds() -> list[str]:
    """Directories of this machine that are seen there; nothing there can change them."""
    bound = {ROOT: "source", sysconfig.get_path("purelib"): "site-packages"}
    if sys.base_prefix != "/usr":
        bound[sys.base_prefix] = "python"
    return [f"--bind-ro={here}:{INSTALLED}/{there}" for here, there in bound.items()]
