"""The coordinator's disk is lost; the run continues on another one, from a copy, with the same
bits."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.end_to_end.test_restart import ANY_PORT, LOCAL, one_line, result_of, run
from tests.free_ports import free_address

SPEC = """
task: scripted
steps: 30
batch: {samples: 8, microbatch: 1}
checkpoint: {every: 10, copies: [%s]}
"""


@pytest.fixture(scope="module")
def reference_out(tmp_path_factory) -> Path:
    """Return the directory of the same run without copies."""
    directory: Path = tmp_path_factory.mktemp("undisturbed")
    spec = directory / "run.yaml"
    spec.write_text(SPEC % "")
    out = directory / "out"
    completed = run(*ANY_PORT, "--run", str(spec), *LOCAL, "--out", str(out))
    assert completed.returncode == 0, completed.stderr
    return out


def copy_steps(copies: Path) -> list[str]:
    return sorted(path.name for path in next(copies.iterdir()).iterdir())


def test_a_run_continues_without_the_coordinator_s_disk(tmp_path, reference_out):
    copies = tmp_path / "copies"
    spec = tmp_path / "run.yaml"
    spec.write_text(SPEC % copies)
    run_options = "--run", str(spec)
    options = ("--bind", free_address(), "--control", "127.0.0.1:0", "--expect-workers", "1")
    with Cluster(tmp_path / "lost", *options, *run_options) as first:
        worker = first.start_paused_worker("w0", 21, "--backend", "scripted")
        worker.wait_until_paused()
        first.wait_for("checkpoint_copied", step=20)
        first.coordinator.send_signal(signal.SIGKILL)
        first.wait_for_exit(first.coordinator)
        first.workers["w0"].kill()
    shutil.rmtree(tmp_path / "lost")
    assert copy_steps(copies)[-1] == "after-0000000020"

    new_directory = tmp_path / "elsewhere"
    arguments = (*ANY_PORT, *LOCAL, "--out", str(new_directory), "--resume")
    completed = run(*arguments, "--from", str(copies))
    assert completed.returncode == 0, completed.stderr
    assert "continues after step 20" in completed.stdout
    for key in ("weights_digest", "losses"):
        assert result_of(new_directory)[key] == result_of(reference_out)[key]
    audit = run("audit", str(new_directory))
    assert audit.returncode == 0, audit.stdout
    second_resume = run(*arguments, "--from", str(copies))
    assert second_resume.returncode == 2
    assert "holds a run already" in one_line(second_resume)
