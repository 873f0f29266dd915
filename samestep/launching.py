"""`worker SCRIPT ARGUMENTS...`: runs the script so that every `fit` in it joins a run of it."""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.base.errors import DataError, UsageError
from samestep import script
from samestep.fitting import Joining, join_from_now_on
from samestep.own_names import files_of_our_names, words_for


def run_script(path: Path, arguments: Sequence[str], joining: Joining) -> None:
    """Run it as `python SCRIPT ARGUMENTS...` would.

    Raises:
        UsageError: There is no such script, or a file beside it has the name of a part of ours.
        DataError: It has ended without a `fit`.
        SamestepError: The run refused this worker, or failed.
    """
    if not path.is_file():
        raise UsageError(f"expected a script, found no file {str(path)!r}")
    if taken := files_of_our_names(path.resolve().parent):
        raise UsageError(words_for(taken[0]))
    join_from_now_on(joining)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    # The first of these drains, as Ctrl-C does; `fit` waits for both in the same place.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_path(str(path.absolute()), run_name="__main__")
    if not script.calls():
        raise DataError(
            f"the script {path.name!r} has ended without a samestep.fit, which is what a worker "
            "joins"
        )
