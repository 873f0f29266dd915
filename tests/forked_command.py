"""`python -SE forked_command.py MODULE ARGUMENTS...`: `python -P -m MODULE`, forked.

The product starts this where it would start its local workers, device processes and coordinators,
if the fork server started the product itself. This process has the fork server fork the module and
stands for it: it passes signals on, ends as the fork ends, and takes the fork along when it is
killed. Processes that the fork starts are not among this process's children.
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
FILES = Path("/proc/self/fd")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def inherited_files() -> list[int]:
    """Return all open files but the standard ones."""
    numbers = [int(path.name) for path in FILES.iterdir()]  # and that of the folder itself
    return sorted(each for each in numbers if each > 2 and (FILES / str(each)).exists())


def other_network(server: socket.socket) -> list[str]:
    """Return this process's network namespace if the server is in another one."""
    pid, _, _ = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    own, other = (Path(f"/proc/{each}/ns/net") for each in (os.getpid(), pid))
    return [] if own.stat().st_ino == other.stat().st_ino else [str(own)]


def begin_fork(module: str, arguments: list[str]) -> tuple[int, int]:
    """Return the process number of the fork, and the pipe that receives its exit status."""
    inherited = inherited_files()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    server.connect(os.environ[ADDRESS])
    own_end, server_end = os.pipe()
    request = {
        "code": None, "module": module, "arguments": arguments, "environment": dict(os.environ),
        "cwd": str(Path.cwd()), "networks": other_network(server),
        "session": os.getsid(0) == os.getpid(), "inherited": inherited, "ends_with_caller": True,
    }  # fmt: skip
    files = array.array("i", [0, 1, 2, server_end, *inherited])
    server.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    pid = int(server.recv(16))
    server.close()
    for number in (server_end, *inherited):
        os.close(number)
    return pid, own_end


def main() -> None:
    """Stand for the fork until it has ended."""
    module, *arguments = sys.argv[1:]
    early_signals: list[int] = []
    for each in PASSED_ON:
        signal.signal(each, lambda number, _: early_signals.append(number))
    pid, status_fd = begin_fork(module, arguments)
    for each in PASSED_ON:
        signal.signal(each, lambda number, _: os.kill(pid, number))
    for number in early_signals:
        os.kill(pid, number)
    code = int(os.read(status_fd, 16) or 1)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
