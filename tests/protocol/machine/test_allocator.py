"""Which freed arrays glibc keeps, measured in a process of its own."""

import json
import platform
import subprocess
import sys

import pytest

from tests.processes import ROOT

LOOKED_AT = """
import json, re
from pathlib import Path
from protocol.machine.allocator import (
    give_back_freed_memory, keep_freed_memory, stop_keeping_freed_memory
)

def mib():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\\s+(\\d+)", status)[1]) >> 10

def after_use():
    bytearray(100 << 20)
    return mib()

before = mib()
keep_freed_memory()
kept = after_use() - before
give_back_freed_memory()
given_back, kept_again = mib() - before, after_use() - before
stop_keeping_freed_memory()
print(json.dumps([kept, given_back, kept_again, mib() - before, after_use() - before]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator alone is told")
def test_freed_arrays_are_kept_until_returned():
    output = subprocess.run(
        [sys.executable, "-c", LOOKED_AT], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    measured, given_back, kept_again, no_more, mapped = json.loads(output)
    assert min(measured, kept_again) >= 90
    assert max(given_back, no_more, mapped) < 10
