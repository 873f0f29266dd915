"""The wheel in an empty environment, run from a folder with user files of the same names."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.cluster import PATIENCE_S
from tests.deploy.built_wheel import build_wheel

DECOY = "raise SystemExit('a file of the user ran')\n"
RUN = """
task: scripted
steps: 2
batch: {samples: 4, microbatch: 1}
scripted: {blocks: 2, block_bytes: 64, samples: 4}
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Path:
    """Return the environment's commands; dependencies come from the current environment."""
    directory = tmp_path_factory.mktemp("installed")
    venv.create(directory / "venv", with_pip=False, symlinks=True)
    python = directory / "venv" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
         "--no-index", build_wheel(directory)],
        check=True,
    )  # fmt: skip
    (packages,) = (directory / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return python.parent


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder in which a user has modules named like those of samestep."""
    for name in ("worker.py", "coordinator.py", "backends.py", "protocol/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(DECOY)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def run(command: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [command, *arguments], cwd=folder, env={**environment, "HOME": str(folder)},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def test_commands_run_the_wheel(commands, folder):
    program = "import protocol, samestep, worker.cli; print(protocol.__file__, samestep.__file__)"
    completed = run(commands / "python", "-P", "-c", program, folder=folder)
    paths = completed.stdout.split()
    assert len(paths) == 2, completed.stderr
    assert all(path.startswith(str(commands.parent)) for path in paths)


@pytest.mark.slow
def test_local_workers_run_the_wheel(commands, folder):
    run_options = ("--run", "run.yaml", "--local-workers", "2", "--backend", "scripted")
    ports = ("--bind", "127.0.0.1:0", "--control", "127.0.0.1:0", "--out", "out")
    completed = run(commands / "coordinator", *run_options, *ports, folder=folder)
    assert completed.returncode == 0, completed.stderr
    assert "a file of the user ran" not in completed.stdout + completed.stderr
    assert (folder / "out" / "result.json").exists()


def test_device_processes_run_the_wheel(commands, folder):
    no_coordinator = ("--coordinator", "127.0.0.1:9", "--retry-for", "0", "--backend", "scripted")
    completed = run(commands / "worker", *no_coordinator, "--gpus", "0,1", folder=folder)
    assert completed.returncode == 69
    assert "no coordinator at 127.0.0.1:9" in completed.stderr
    assert "a file of the user ran" not in completed.stdout + completed.stderr
