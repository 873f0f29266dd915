"""quickstart.sh and environment.sh with a scripted Python, pip and df: no network, no waiting."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/bash
# Stands for Python; $FAKE says what goes wrong.
case "$*" in
"-V") echo "Python ${FAKE_VERSION:-3.11.7}" ;;
*version_info*) [ -z "$FAKE_VERSION" ] ;;
*"import venv"*) [ "$FAKE" != no-venv ] ;;
"-m venv "*)
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
    printf '#!/bin/bash\\necho ran "$@"\\n' >"$3/bin/coordinator" && chmod +x "$3/bin/coordinator"
    ;;
"-m pip "*)
    echo "pip ${*: -2}" >>"$FAKE_LOG"
    echo "Collecting something"
    case "$*" in *cpu.txt*) echo "$FAKE_CPU"; [ -z "$FAKE_CPU" ]; exit ;; esac
    [ -z "$FAKE_PIP" ] || { echo "$FAKE_PIP"; exit 1; }
    ;;
"-m compileall "*) echo compiled >>"$FAKE_LOG" ;;
esac
"""
DF = """#!/bin/bash
printf 'Filesystem 1024-blocks Used Available Capacity Mounted\\nx 0 0 %s 0%% /\\n' "$FAKE_FREE"
"""


class Place:
    """A copy of the scripts beside scripted commands, all in one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "repository"
        self.commands = folder / "bin"
        self.log = folder / "log"
        shutil.copytree(ROOT / "deploy", self.repository / "deploy")
        shutil.copytree(ROOT / "requirements", self.repository / "requirements")
        shutil.copy(ROOT / "pyproject.toml", self.repository)
        self.commands.mkdir()
        for name, text in (("python3.11", PYTHON), ("df", DF)):
            (self.commands / name).write_text(text)
            (self.commands / name).chmod(0o755)
        no_driver = self.commands / "nvidia-smi"
        no_driver.write_text("#!/bin/bash\nexit 9\n")
        no_driver.chmod(0o755)

    def run(self, *arguments: str, **fakes: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.commands}:{os.environ['PATH']}",
            "FAKE_FREE": "99000000",
            "FAKE_LOG": str(self.log),
        }
        return subprocess.run(
            ["bash", str(self.repository / "deploy" / "quickstart.sh"), *arguments],
            env=environment | fakes,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def did(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_makes_the_environment_and_runs_the_main_job(place: Place):
    done = place.run("--set", "steps=20")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "ran --expect-workers 3 --local-workers 3 --run deploy/runs/sms-spam.yaml --set steps=20\n"
    )
    assert place.did() == [
        "pip -r requirements/assets.txt",
        "pip -r requirements/cpu.txt",
        "pip -e .",
        "compiled",
    ]


def test_a_second_run_installs_nothing_and_says_nothing(place: Place):
    place.run()
    before = place.did()
    again = place.run()
    assert (again.returncode, again.stderr) == (0, "")
    assert place.did() == before


def test_another_lock_installs_again(place: Place):
    place.run()
    before = len(place.did())
    with (place.repository / "requirements" / "run.txt").open("a") as lock:
        lock.write("# a change\n")
    place.run()
    assert len(place.did()) == 2 * before


def test_an_environment_cut_off_half_way_is_made_anew(place: Place):
    place.run(FAKE_PIP="ERROR: killed")
    left = place.repository / ".venv" / "left"
    left.touch()
    assert place.run().returncode == 0
    assert not left.exists()


def test_an_environment_for_development_serves_for_running(place: Place):
    environment(place, "dev")
    before = place.did()
    assert "pip -r requirements/dev.txt" in before
    place.run()
    assert place.did() == before


def environment(place: Place, name: str) -> None:
    script = str(place.repository / "deploy" / "environment.sh")
    variables = {"PATH": f"{place.commands}:{os.environ['PATH']}"}
    variables |= {"FAKE_FREE": "99000000", "FAKE_LOG": str(place.log)}
    subprocess.run(["bash", script, name], env=variables, check=True, capture_output=True)


def test_a_coordinator_gets_no_torch(place: Place):
    environment(place, "coordinator")
    assert place.did() == ["pip -r requirements/coordinator.txt", "pip -e .", "compiled"]
    environment(place, "coordinator")
    assert len(place.did()) == 3
    environment(place, "worker")
    assert place.did()[3:5] == ["pip -r requirements/run.txt", "pip -r requirements/cpu.txt"]
    before = place.did()
    environment(place, "coordinator")
    assert place.did() == before


def test_without_the_cpu_build_takes_what_the_index_has(place: Place):
    missing = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    assert place.run(FAKE_CPU=missing).returncode == 0
    assert "pip -r requirements/cuda.txt" in place.did()


NO_NETWORK = (
    "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError("
    "Failed to establish a new connection: [Errno -3] Temporary failure in name resolution)'\n"
    "ERROR: No matching distribution found for numpy==2.4.6"
)


@pytest.mark.parametrize(
    ("fakes", "code", "says"),
    [
        ({"FAKE_PIP": NO_NETWORK}, 69, "cannot reach the package index"),
        ({"FAKE_CPU": NO_NETWORK}, 69, "cannot reach"),
        (
            {"FAKE_CPU": "ERROR: No matching distribution found for y", "TORCH": "cpu"},
            69,
            "offered y",
        ),
        ({"FAKE_PIP": "ERROR: No matching distribution found for x==1"}, 69, "not offered x==1"),
        ({"FAKE_PIP": "ERROR: [Errno 28] No space left on device"}, 1, "the disk is full"),
        ({"FAKE_FREE": "1000000"}, 1, "expected 2000 MiB free for .venv, found 976"),
        ({"FAKE": "no-venv"}, 78, "apt install python3-venv"),
        ({"FAKE_VERSION": "3.9.2", "PYTHON": "python3.11"}, 78, "found python3.11 is Python 3.9.2"),
        ({"PYTHON": "no-such-python"}, 78, "expected Python 3.11 or later, found none"),
        ({"FAKE_PIP": "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"}, 78, "hash differs"),
        ({"FAKE_PIP": "note\nERROR: something new\n"}, 1, "ERROR: something new"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(place: Place, fakes, code, says):
    done = place.run(**fakes)
    *progress, last = done.stderr.splitlines()
    assert says in last
    assert last.startswith("samestep: ")
    assert done.returncode == code
    assert all(line.startswith(("samestep: making", "samestep: installing")) for line in progress)
    assert done.stdout == ""
