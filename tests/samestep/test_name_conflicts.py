"""A user's file with the name of one of samestep's packages is reported, not imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.base.errors import SamestepError
from samestep.name_conflicts import NAMES, conflicting_files
from tests.processes import ROOT
from worker.scripts import launch

SCRIPT = "import samestep\nprint('imported')\n"


def run_script(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter, since a forked one has imported samestep's packages."""
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), str(ROOT)]))
    return subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def write_file(path: Path, text: str = "") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("conflicting_name", "script"),
    [
        ("protocol.py", SCRIPT),
        ("worker.py", "import worker\n" + SCRIPT),
        ("coordinator/__init__.py", SCRIPT),
    ],
)
def test_script_beside_a_conflicting_file_names_the_file(tmp_path, conflicting_name, script):
    write_file(tmp_path / conflicting_name)
    completed = run_script(write_file(tmp_path / "train.py", script))
    assert completed.returncode == 1
    assert completed.stdout == ""
    last_line = completed.stderr.splitlines()[-1]
    assert f"{conflicting_name}' has the name of one of samestep's packages" in last_line
    assert last_line.endswith("rename it")


def test_script_with_a_conflicting_name_names_itself(tmp_path):
    completed = run_script(write_file(tmp_path / "worker.py", SCRIPT))
    assert (
        "worker.py' has the name of one of samestep's packages" in completed.stderr.splitlines()[-1]
    )


def test_conflicting_file_on_the_python_path_is_named(tmp_path):
    write_file(tmp_path / "mine" / "protocol.py")
    completed = run_script(
        write_file(tmp_path / "train.py", SCRIPT), PYTHONPATH=str(tmp_path / "mine")
    )
    assert (
        "protocol.py' has the name of one of samestep's packages"
        in completed.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize("name", NAMES)
def test_worker_refuses_a_script_beside_a_conflicting_file(tmp_path, monkeypatch, name):
    write_file(tmp_path / f"{name}.py")
    script = write_file(tmp_path / "train.py", SCRIPT)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch, "_JOIN_OPTIONS", [])
    monkeypatch.delitem(sys.modules, "samestep")  # the script is the first to import it
    with pytest.raises(SamestepError, match=rf"{name}(\.py)?' .*rename it"):
        launch.run_script(script, (), options=None)  # type: ignore[arg-type]  # not used


def test_files_that_are_not_modules_are_ignored(tmp_path):
    write_file(
        tmp_path / "worker" / "notes.py"
    )  # the directory has no module, so nobody imports it
    assert conflicting_files(tmp_path) == []
    assert conflicting_files(ROOT) == []
