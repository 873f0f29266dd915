"""The coordinator of one `samestep.fit`: a request as a JSON line in, events as JSON lines out.

The coordinator ends when its standard input closes, which `fit` keeps open.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Final

from coordinator.main import main
from coordinator.operator.event_pipe import EventPipe
from coordinator.options import CoordinatorOptions, usual_name
from protocol.base.address import parse_address
from protocol.base.errors import ExitCode, SamestepError
from protocol.base.option_names import option, options_as_arguments
from protocol.cli.command_line import end_with_standard_input
from protocol.spec.run_spec import parse_run_spec

_LOG: Final = logging.getLogger(__name__)


def serve() -> int:
    """Execute the requested run; return its exit code."""
    events = EventPipe(os.dup(1))
    os.dup2(2, 1)  # libraries may print, and their lines are not events
    request = sys.stdin.buffer.readline()
    if not request.endswith(b"\n"):
        return ExitCode.FAILED  # `fit` has ended
    end_with_standard_input("coordinator")
    events.sends_records = json.loads(request)["records"]
    with options_as_arguments():
        try:
            return main(_options(request), events)
        except SamestepError as error:
            event = {"event": "ended", "exit_code": int(error.exit_code), "reason": str(error)}
            events.write(str(error), {**event, "is_resumable": False})
            return error.exit_code
        finally:
            events.close()


def _options(request: bytes) -> CoordinatorOptions:
    document = json.loads(request)
    return CoordinatorOptions(
        bind=parse_address(document["bind"], option("--bind")),
        control=("127.0.0.1", 0),
        plaintext=False,
        name=usual_name(),
        expect_workers=document["expect_workers"],
        out=Path(document["directory"]),
        spec=parse_run_spec(document["run"], notify=_LOG.warning),
        resume=document["resume"],
        from_step=None, from_copies=None,
        local_workers=0, local_backend="auto", local_devices=(),
        address_file=None, trace=None, trackers=(), log_json=False,
        may_change=document["may_change"],
        script=document["script"],
    )  # fmt: skip
