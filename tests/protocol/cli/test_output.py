"""Output problems never stop the work: vanished readers, full disks, closed streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.base.errors import ExitCode
from tests.processes import ROOT

STREAMS = {"closed": "<&- >&- 2>&-", "full": ">/dev/full 2>/dev/full", "a dead pipe": "2>&1 | true"}


def shell_report(
    command: str, streams: str, home: Path, **overrides: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m COMMAND` with these streams in a shell; return the completed process."""
    line = f"{sys.executable} -m {command} {streams}; exit ${{PIPESTATUS[0]}}"
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment | overrides, timeout=120, check=False,
        capture_output=True, text=True,
    )  # fmt: skip


def run_command_line(directory: Path, *, steps: int = 3) -> str:
    """Return the command line of a complete run with one local worker."""
    spec = {"name": "r", "task": "regress", "steps": steps, "seed": 1, "batch": {"samples": 8,
            "microbatch": 4}, "optimizer": {"name": "sgd", "lr": 0.01}}  # fmt: skip
    (directory / "run.yaml").write_text(json.dumps(spec))
    return (
        f"coordinator --run {directory}/run.yaml --out {directory}/out --local-workers 1 "
        "--bind 127.0.0.1:0 --control 127.0.0.1:0"
    )


@pytest.mark.slow
@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_run_finishes_with_unusable_streams(tmp_path, streams):
    """The coordinator and its local worker share the streams."""
    result = shell_report(run_command_line(tmp_path), streams, tmp_path)
    assert result.returncode == 0
    assert json.loads((tmp_path / "out" / "result.json").read_bytes())["outcome"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("coordinator --version", 0),
        ("coordinator status --control 127.0.0.1:1", ExitCode.UNREACHABLE),
        ("worker devices", 0),
        ("coordinator check /nowhere.yaml", ExitCode.USAGE),
    ],
)
def test_exit_code_does_not_depend_on_the_streams(tmp_path, command, code, streams):
    assert shell_report(command, streams, tmp_path).returncode == code


def test_a_daemon_does_not_wait_for_a_reader_that_stalls():
    """Lost output is counted and reported to the next reader."""
    code = (
        "import sys; from protocol.cli import output as o; o._PATIENCE_S = 0.01;"
        "o.tolerate_stream_failures('worker'); o.never_wait_for_readers();"
        "[print('x' * 999, flush=True) for _ in range(200)];"
        "print('still here', file=sys.stderr, flush=True); sys.stdin.read(1); print('end')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stdout is not None
    assert process.stderr.readline() == "still here\n"
    first = process.stdout.read(40_000)
    assert process.stdin is not None
    process.stdin.write("x")
    process.stdin.flush()
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert set(first) == {"x", "\n"}
    note, end = rest.splitlines()[-2:]
    assert note.endswith("bytes of output are lost: nobody read them)")
    assert end == "end"


def test_a_full_disk_behind_the_output_is_reported_once():
    code = (
        "from protocol.cli.output import tolerate_stream_failures;"
        "tolerate_stream_failures('worker'); import os;"
        "[print('x', flush=True) for _ in range(3)]; print('é\\udcff'); os._exit(0)"
    )
    result = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{code}" >/dev/full'], cwd=ROOT, check=False,
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert result.returncode == 0
    assert result.stderr == (
        "worker: standard output cannot be written: No space left on device; lines are lost; "
        "the work continues\n"
    )


def test_unencodable_characters_are_replaced():
    code = (
        "from protocol.cli.output import tolerate_stream_failures;"
        "tolerate_stream_failures('worker'); print('\\u4f60')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True,
        env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "\\u4f60\n")


@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_unusable_streams_only_lose_their_output(streams):
    """No socket gets the descriptor of a closed stream."""
    code = (
        "from protocol.cli.output import tolerate_stream_failures as k; k('worker');"
        "import sys, socket;"
        "print('x', flush=True); print('y', file=sys.stderr); sys.stdin.read();"
        "sys.exit(socket.socket().fileno() < 3)"
    )
    line = f'{sys.executable} -c "{code}" {streams}; exit ${{PIPESTATUS[0]}}'
    environment = {"PATH": "/usr/bin:/bin"}
    result = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0
