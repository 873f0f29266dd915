"""A process that its library ends: one line and an exit code all the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")

PROGRAM = """
import ctypes, os, sys, threading
from backends.wgpu.device.abort_handler import on_abort
on_abort(lambda: print("so it ends", file=sys.stderr, flush=True), 7)
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
def test_whoever_aborts_the_last_words_are_said(end):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (7, "so it ends\n")
