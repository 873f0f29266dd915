"""`python -m tests.fork_server FD`: forks off processes of the two commands, imports done.

A worker spends two seconds of processor on importing torch, a coordinator one on the rest, and
the tests start hundreds of them. Here that is done once: each request on the socket FD (see
`tests.processes`) becomes a child that goes on as `python -m MODULE ARGUMENTS...` would.
"""

from __future__ import annotations

import array
import importlib
import json
import os
import runpy
import selectors
import socket
import sys
from typing import Any

PRELOADED = (
    "torch", "torch.nn.functional", "wgpu.backends.wgpu_native", "backends.eager.eager",
    "backends.scripted", "coordinator.main", "worker.main", "worker.shell.engine",
)  # fmt: skip
"""Nothing of them may start a thread, or read what the environment says of one process."""

REQUEST_BYTES = 1 << 20


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork at every request, and tell how each child ended, until nobody asks any more.

    Returns:
        In a child: what it is to run. In the server, at the end: None.
    """
    ends: dict[int, tuple[int, int]] = {}
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in ends:
                pid, told = ends.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(told, b"%d" % code)
                os.close(told)
                continue
            text, files = _request(requests)
            if not text:
                return None
            out, err, told = files
            pid = os.fork()
            if pid == 0:
                for each in (*ends, *(end for _, end in ends.values()), told):
                    os.close(each)
                selector.close()
                requests.close()
                for source, target in ((out, 1), (err, 2)):
                    os.dup2(source, target)
                    os.close(source)
                request: dict[str, Any] = json.loads(text)
                return request
            os.close(out)
            os.close(err)
            follower = os.pidfd_open(pid)
            ends[follower] = (pid, told)
            selector.register(follower, selectors.EVENT_READ)
            requests.sendall(b"%d" % pid)


def _request(requests: socket.socket) -> tuple[bytes, array.array[int]]:
    text, ancillary, _, _ = requests.recvmsg(REQUEST_BYTES, socket.CMSG_LEN(3 * 4))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    return text, files


def main() -> None:
    """Import, serve; in a child become the command."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    request = serve(requests)
    if request is None:
        return
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
