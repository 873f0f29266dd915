"""A process that a library aborts prints one line and exits with a chosen code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="abort raises a signal on POSIX only")

PROGRAM = """
import ctypes, os, sys, threading
from backends.wgpu.device.abort_handler import install_abort_handler
install_abort_handler(lambda: print("last line", file=sys.stderr, flush=True), 7)
{abort}
"""


@pytest.mark.parametrize(
    "abort",
    [
        "os.abort()",
        "ctypes.CDLL(None).abort()  # as a library does, without Python's lock",
        "threading.Thread(target=ctypes.CDLL(None).abort).start(); threading.Event().wait()",
    ],
)
def test_abort_prints_one_line_and_sets_the_exit_code(abort):
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(abort=abort)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (completed.returncode, completed.stderr) == (7, "last line\n")
