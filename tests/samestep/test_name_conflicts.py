"""A file of the user's by one of our names is told by name, and taken for nothing of ours."""

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


def python(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As people start it; a process of the fork server would have imported ours already."""
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), str(ROOT)]))
    return subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def written(path: Path, text: str = "") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("taken", "script"),
    [
        ("protocol.py", SCRIPT),
        ("worker.py", "import worker\n" + SCRIPT),
        ("coordinator/__init__.py", SCRIPT),
    ],
)
def test_a_script_beside_it_ends_with_its_name(tmp_path, taken, script):
    written(tmp_path / taken)
    ended = python(written(tmp_path / "train.py", script))
    assert ended.returncode == 1
    assert ended.stdout == ""
    last_line = ended.stderr.splitlines()[-1]
    assert f"{taken}' has the name of one of samestep's packages" in last_line
    assert last_line.endswith("rename it")


def test_a_script_that_has_the_name_itself_ends_with_it(tmp_path):
    ended = python(written(tmp_path / "worker.py", SCRIPT))
    assert "worker.py' has the name of one of samestep's packages" in ended.stderr.splitlines()[-1]


def test_one_that_a_path_of_the_users_puts_before_ours_is_reported_too(tmp_path):
    written(tmp_path / "mine" / "protocol.py")
    ended = python(written(tmp_path / "train.py", SCRIPT), PYTHONPATH=str(tmp_path / "mine"))
    assert (
        "protocol.py' has the name of one of samestep's packages" in ended.stderr.splitlines()[-1]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_is_not_given_a_script_beside_one(tmp_path, monkeypatch, name):
    written(tmp_path / f"{name}.py")
    script = written(tmp_path / "train.py", SCRIPT)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch, "_JOIN_OPTIONS", [])
    monkeypatch.delitem(sys.modules, "samestep")  # the script is the first to import it
    with pytest.raises(SamestepError, match=rf"{name}(\.py)?' .*rename it"):
        launch.run_script(script, (), options=None)  # type: ignore[arg-type]  # nobody gets to it


def test_what_is_no_module_is_nobodys_concern(tmp_path):
    written(tmp_path / "worker" / "notes.py")  # whoever imports it is told that there is none
    assert conflicting_files(tmp_path) == []
    assert conflicting_files(ROOT) == []
