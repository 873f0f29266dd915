"""quickstart.sh and environment.sh with a scripted Python, pip and df: no network, no waiting."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/bash
# Stands for Python; $FAKE says what goes wrong.
case "$*" in
"-V") echo "Python ${FAKE_VERSION:-3.11.7}" ;;
*%d.%d*) echo "${FAKE_MINOR:-3.11}" ;;
*version_info*) [ -z "$FAKE_VERSION" ] ;;
*"import venv"*) [ "$FAKE" != no-venv ] ;;
"-m venv "*)
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
    printf '#!/bin/bash\\necho ran "$@"\\n' >"$3/bin/coordinator" && chmod +x "$3/bin/coordinator"
    ;;
"-m pip "*)
    echo "pip ${*: -2}" >>"$FAKE_LOG"
    echo "Collecting something"
    case "$*" in *rocm.txt*) echo "$FAKE_ROCM"; [ -z "$FAKE_ROCM" ]; exit ;; esac
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
        self.has_driver("NVIDIA-SMI has failed", code=9)

    def has_driver(self, *lines: str, code: int = 0) -> None:
        """What nvidia-smi says when asked for the driver's version."""
        script_lines = "".join(f"echo '{line}'\n" for line in lines)
        command = self.commands / "nvidia-smi"
        command.write_text(f"#!/bin/bash\n{script_lines}exit {code}\n")
        command.chmod(0o755)

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


def test_quickstart_creates_the_environment_and_runs(place: Place):
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


def test_a_second_run_changes_and_prints_nothing(place: Place):
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


def test_an_interrupted_environment_is_recreated(place: Place):
    place.run(FAKE_PIP="ERROR: killed")
    left = place.repository / ".venv" / "left"
    left.touch()
    assert place.run().returncode == 0
    assert not left.exists()


def test_a_development_environment_also_runs(place: Place):
    environment(place, "dev")
    before = place.did()
    assert "pip -r requirements/dev.txt" in before
    place.run()
    assert place.did() == before


def environment(place: Place, name: str, **fakes: str) -> str:
    """Make it; what is said on standard error."""
    script = str(place.repository / "deploy" / "environment.sh")
    variables = {"PATH": f"{place.commands}:{os.environ['PATH']}"}
    variables |= {"FAKE_FREE": "99000000", "FAKE_LOG": str(place.log)}
    command = ["bash", script, name]
    done = subprocess.run(
        command, env=variables | fakes, check=True, capture_output=True, text=True
    )
    return done.stderr


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


NO_ROCM = "ERROR: No matching distribution found for torch==2.13.0+rocm7.2"
NOT_OFFERED = "ERROR: No matching distribution found for torch==2.13.0+cpu"
CPU, CUDA = "pip -r requirements/cpu.txt", "pip -r requirements/cuda.txt"


def test_without_the_cpu_build_the_indexs_build_is_installed(place: Place):
    assert place.run(FAKE_CPU=NOT_OFFERED).returncode == 0
    assert CUDA in place.did()


@pytest.mark.parametrize("version", ["580", "580.65.06", "610.57.04"])
def test_a_recent_driver_gets_cuda(place: Place, version):
    place.has_driver(version, version)  # a line for each of two cards
    assert "driver" not in environment(place, "worker")
    assert CUDA in place.did()
    assert CPU not in place.did()


@pytest.mark.parametrize("version", ["535.261.03", "579.99.99", "90.1"])
def test_an_old_driver_is_reported_and_cuda_left_out(place: Place, version):
    place.has_driver(version)
    output = environment(place, "worker")
    assert f"NVIDIA's driver is {version}, but CUDA needs 580 or later" in output
    assert CPU in place.did()
    assert CUDA not in place.did()


def test_a_driver_upgrade_switches_to_cuda(place: Place):
    place.has_driver("535.261.03")
    environment(place, "worker")
    before = place.did()
    assert environment(place, "worker") == ""
    assert place.did() == before
    place.has_driver("580.65.06")
    assert environment(place, "worker", TORCH="cpu") == ""
    assert environment(place, "coordinator") == ""
    assert place.did() == before
    assert "now recent enough for CUDA" in environment(place, "worker")
    assert CUDA in place.did()[len(before) :]
    after = place.did()
    assert environment(place, "worker") == ""
    place.has_driver("NVIDIA-SMI has failed", code=9)
    assert environment(place, "worker") == ""
    assert place.did() == after


def test_the_cpu_build_may_be_requested_with_an_old_driver(place: Place):
    place.has_driver("535.261.03")
    assert "driver" not in environment(place, "worker", TORCH="cpu")
    assert CPU in place.did()


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_cpu_build_of_later_pythons(place: Place, version):
    environment(place, "worker", FAKE_MINOR=version, TORCH="cpu")
    assert CPU in place.did()


def test_a_python_without_a_locked_cpu_build_gets_the_indexs_build(place: Place):
    assert "not locked for Python 3.14" in environment(place, "worker", FAKE_MINOR="3.14")
    assert CPU not in place.did()
    assert CUDA in place.did()


def test_the_other_build_of_torch_replaces_the_first(place: Place):
    environment(place, "worker")
    environment(place, "worker", TORCH="cpu")
    before = place.did()
    assert before.count(CPU) == 1
    site = place.repository / ".venv" / "lib" / "python3.11" / "site-packages"
    (site / "torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    environment(place, "worker", TORCH="cuda")
    assert place.did()[len(before) :][1:3] == ["pip triton-rocm torch", CUDA]
    after = place.did()
    for torch in ("cuda", ""):
        environment(place, "worker", TORCH=torch)
    assert place.did() == after


def test_the_build_for_cards_of_amd_says_that_it_has_no_hashes(place: Place):
    output = environment(place, "worker", TORCH="rocm")
    assert "installing torch's ROCm build by exact version, without hashes" in output
    assert place.did()[1] == "pip -r requirements/rocm.txt"
    assert {CPU, CUDA}.isdisjoint(place.did())
    before = place.did()
    for torch in ("rocm", ""):
        assert environment(place, "worker", TORCH=torch) == ""
    assert place.did() == before


@pytest.mark.parametrize(
    ("present", "wanted", "is_removed"),
    [("2.13.0", "rocm", True), ("2.13.0+cpu", "rocm", True), ("2.13.0+rocm7.2", "rocm", False),
     ("2.13.0+rocm7.2", "cuda", True), ("2.13.0", "cuda", False)],
)  # fmt: skip
def test_no_build_of_torch_is_laid_over_another(place: Place, present, wanted, is_removed):
    environment(place, "coordinator")
    site = place.repository / ".venv" / "lib" / "python3.11" / "site-packages"
    (site / f"torch-{present}.dist-info").mkdir(parents=True)
    environment(place, "worker", TORCH=wanted)
    assert ("pip triton-rocm torch" in place.did()) == is_removed
    assert f"pip -r requirements/{wanted}.txt" in place.did()


def test_pip_takes_the_rocm_set_as_it_is_written(tmp_path: Path):
    """Without a network: from a folder with files of these names, and nothing in them."""
    tags = "py3-none-any"
    names = {"torch": "2.13.0+rocm7.2", "triton-rocm": "3.7.1"}
    for name, version in names.items():
        file_name = name.replace("-", "_")
        info = f"{file_name}-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"{file_name}-{version}-{tags}.whl", "w") as wheel:
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--find-links",
        str(tmp_path),
        "--dry-run",
        "--ignore-installed",
        "--report",
        str(report),
        "-r",
        str(ROOT / "requirements/rocm.txt"),
    ]
    subprocess.run(command, check=True, timeout=60)
    chosen = {
        each["metadata"]["name"]: each["metadata"]["version"]
        for each in json.loads(report.read_text())["install"]
    }
    assert chosen == names
    version = names["torch"].partition("+")[0]
    for lock in ("cpu", "cuda"):
        text = (ROOT / "requirements" / f"{lock}.txt").read_text()
        assert f"torch=={version}" in text, "all builds are of one version"


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
            {"FAKE_CPU": NOT_OFFERED, "TORCH": "cpu"},
            69,
            "set PIP_EXTRA_INDEX_URL to PyTorch's index",
        ),
        (
            {"FAKE_MINOR": "3.14", "TORCH": "cpu"},
            78,
            "for Python 3.11 3.12 3.13, found 3.14",
        ),
        (
            {"FAKE_ROCM": NO_ROCM, "TORCH": "rocm"},
            69,
            "set PIP_EXTRA_INDEX_URL to PyTorch's index of ROCm builds",
        ),
        ({"FAKE_ROCM": NO_NETWORK, "TORCH": "rocm"}, 69, "cannot reach"),
        ({"TORCH": "gpu"}, 2, "expected TORCH=cpu, TORCH=cuda or TORCH=rocm, got 'gpu'"),
        ({"FAKE_PIP": "ERROR: No matching distribution found for x==1"}, 69, "finds no x==1"),
        ({"FAKE_PIP": "ERROR: [Errno 28] No space left on device"}, 1, "the disk is full"),
        ({"FAKE_FREE": "1000000"}, 1, "expected 2000 MiB free for .venv, found 976"),
        ({"FAKE": "no-venv"}, 78, "apt install python3-venv"),
        ({"FAKE_VERSION": "3.9.2", "PYTHON": "python3.11"}, 78, "found python3.11 is Python 3.9.2"),
        ({"PYTHON": "no-such-python"}, 78, "expected Python 3.11 or later, found none"),
        ({"FAKE_PIP": "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"}, 78, "wrong hash"),
        ({"FAKE_PIP": "note\nERROR: something new\n"}, 1, "ERROR: something new"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(place: Place, fakes, code, says):
    done = place.run(**fakes)
    *progress, last = done.stderr.splitlines()
    assert says in last
    assert last.startswith("samestep: ")
    assert done.returncode == code
    assert all(line.startswith(("samestep: creating", "samestep: installing")) for line in progress)
    assert done.stdout == ""


def test_requested_cuda_is_refused_with_an_old_driver(place: Place):
    place.has_driver("550.163.01")
    done = place.run(TORCH="cuda")
    assert done.returncode == 78
    assert done.stderr.startswith("samestep: expected NVIDIA's driver 580 or later, found 550.163")
    assert done.stderr.count("\n") == 1
    assert place.did() == []
