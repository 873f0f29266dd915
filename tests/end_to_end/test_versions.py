"""A worker and a coordinator of different protocol versions: each names the side to upgrade."""

from __future__ import annotations

import subprocess
import sys

import pytest

from protocol import PROTOCOL_VERSION
from protocol.base.errors import ExitCode
from tests.cluster import PATIENCE_S, ROOT, Cluster

OLDER, NEWER = PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1
PLAINTEXT = ("--plaintext",)
PROGRAM = """
import sys, protocol
protocol.PROTOCOL_VERSION = int(sys.argv.pop(1))
from worker.cli import main
main()
"""


@pytest.mark.parametrize(
    ("version", "outdated_side", "options"),
    [
        pytest.param(NEWER, "the coordinator", (), id="newer worker, TLS"),
        pytest.param(OLDER, "this worker", PLAINTEXT, id="older worker, plaintext"),
        pytest.param(
            NEWER,
            "the coordinator",
            PLAINTEXT,
            id="newer worker, plaintext",
            marks=pytest.mark.slow,
        ),
        pytest.param(OLDER, "this worker", (), id="older worker, TLS", marks=pytest.mark.slow),
    ],
)
def test_both_sides_name_the_side_to_upgrade(tmp_path, version, outdated_side, options):
    with Cluster(tmp_path, "--expect-workers", "1", *options) as cluster:
        worker = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(version),
             "--coordinator", cluster.address["data"], *options],
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert worker.returncode == ExitCode.MISMATCH == 78
        message = (
            f"this worker speaks protocol version {version}, the coordinator {PROTOCOL_VERSION}"
        )
        assert worker.stderr.splitlines() == [f"worker: {message}: upgrade {outdated_side}"]
        assert not cluster.events_named("worker_connected")
