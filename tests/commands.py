"""Run a `coordinator` or `worker` command within this process; return its output and exit code.

For commands that end by themselves. Tests of signals, ports and imports start a process instead.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import subprocess
import sys
from collections.abc import Mapping
from unittest import mock


def run_command(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS...` within this process."""
    main = importlib.import_module(f"{module}.cli").main
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", [module, *arguments]),
        mock.patch.dict("os.environ", environment or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return subprocess.CompletedProcess([module, *arguments], code, out.getvalue(), err.getvalue())
