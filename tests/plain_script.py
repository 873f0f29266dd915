"""Run `python SCRIPT ARGUMENTS...` in a process of the fork server, which has imported torch."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    os.environ.setdefault("SAMESTEP_BIND", "127.0.0.1:0")  # the usual port may be taken
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
