"""A process that a library aborts still prints one line and exits with its code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")

PROGRAM = """
import ctypes, os, sys, threading
from backends.wgpu.device.abort_handler import install_abort_handler
install_abort_handler(lambda: print("so it ends", file=sys.stderr, flush=True), 7)
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "os.abort()",
        "ctypes.CDLL(None).abort()  # as a library does: it does not hold Python's lock",
        "threading.Thread(target=ctypes.CDLL(None).abort).start(); threading.Event().wait()",
    ],
)
def test_abort_prints_one_line(end):
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (completed.returncode, completed.stderr) == (7, "so it ends\n")
