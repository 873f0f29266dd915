"""How long glibc keeps freed memory, measured in a separate process."""

import json
import platform
import subprocess
import sys

import pytest

from tests.processes import ROOT

PROGRAM = """
import json, re
from pathlib import Path
from protocol.machine.allocator import (
    give_back_freed_memory, keep_freed_memory, stop_keeping_freed_memory
)

def mib():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\\s+(\\d+)", status)[1]) >> 10

def mib_after_use():
    bytearray(100 << 20)
    return mib()

before = mib()
keep_freed_memory()
first_use = mib_after_use() - before
give_back_freed_memory()
after_return, after_reuse = mib() - before, mib_after_use() - before
stop_keeping_freed_memory()
print(json.dumps([first_use, after_return, after_reuse, mib() - before, mib_after_use() - before]))
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc's allocator has these settings"
)
def test_freed_arrays_are_kept_until_returned():
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    first_use, after_return, after_reuse, after_stop, last_use = json.loads(output)
    assert min(first_use, after_reuse) >= 90
    assert max(after_return, after_stop, last_use) < 10
