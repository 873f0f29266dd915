"""`python -SE forked_command.py MODULE ARGUMENTS...`: `python -P -m MODULE`, forked.

If the fork server started the product, the product starts this script in place of its workers,
device processes and coordinators. The script asks the fork server to fork the module, and stands in
for the fork: it forwards signals to the fork and exits with the fork's status; if it is killed, the
fork is killed too. Processes that the fork starts are not children of this process.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path

ADDRESS = "TESTS_FORK_SERVER"
"""Environment variable with the address of the fork server."""
_OPEN_FILES = Path("/proc/self/fd")
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def inherited_files() -> list[int]:
    """Return the descriptors of all open files except the standard ones."""
    descriptors = [int(path.name) for path in _OPEN_FILES.iterdir()]
    # Without the descriptor that listed the folder: it is closed by now.
    return sorted(fd for fd in descriptors if fd > 2 and (_OPEN_FILES / str(fd)).exists())


def different_network(server: socket.socket) -> list[str]:
    """Return the file of this process's network namespace, in a list that is empty if the server
    has the same namespace."""
    pid, _, _ = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    own_namespace, server_namespace = (
        Path(f"/proc/{process}/ns/net") for process in (os.getpid(), pid)
    )
    is_shared = own_namespace.stat().st_ino == server_namespace.stat().st_ino
    return [] if is_shared else [str(own_namespace)]


def request_fork(module: str, arguments: list[str]) -> tuple[int, int]:
    """Fork a module; return the fork's process number and the pipe that receives its exit
    status."""
    inherited = inherited_files()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    server.connect(os.environ[ADDRESS])
    status_fd, status_writer = os.pipe()
    request = {
        "code": None, "module": module, "arguments": arguments, "environment": dict(os.environ),
        "cwd": str(Path.cwd()), "networks": different_network(server),
        "session": os.getsid(0) == os.getpid(), "inherited": inherited, "ends_with_caller": True,
    }  # fmt: skip
    files = array.array("i", [0, 1, 2, status_writer, *inherited])
    server.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    pid = int(server.recv(16))
    server.close()
    for fd in (status_writer, *inherited):
        os.close(fd)
    return pid, status_fd


def main() -> None:
    """Represent the fork until it has ended."""
    module, *arguments = sys.argv[1:]
    early_signals: list[int] = []
    for forwarded_signal in _FORWARDED_SIGNALS:
        signal.signal(forwarded_signal, lambda number, _: early_signals.append(number))
    pid, status_fd = request_fork(module, arguments)
    for forwarded_signal in _FORWARDED_SIGNALS:
        signal.signal(forwarded_signal, lambda number, _: os.kill(pid, number))
    for number in early_signals:
        os.kill(pid, number)
    code = int(os.read(status_fd, 16) or 1)
    if code < 0:  # a signal ended the fork: end by the same one
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
