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
# Replaces Python; the FAKE variables choose what goes wrong.
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


class Checkout:
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
        self.set_driver("NVIDIA-SMI has failed", code=9)

    def set_driver(self, *lines: str, code: int = 0) -> None:
        """Script the driver version that nvidia-smi prints."""
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

    def logged_commands(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_quickstart_creates_the_environment_and_runs(checkout: Checkout):
    completed = checkout.run("--set", "steps=20")
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == (
        "ran --expect-workers 3 --local-workers 3 --run deploy/runs/sms-spam.yaml --set steps=20\n"
    )
    assert checkout.logged_commands() == [
        "pip -r requirements/assets.txt",
        "pip -r requirements/cpu.txt",
        "pip -e .",
        "compiled",
    ]


def test_a_second_run_changes_and_prints_nothing(checkout: Checkout):
    checkout.run()
    before = checkout.logged_commands()
    second_run = checkout.run()
    assert (second_run.returncode, second_run.stderr) == (0, "")
    assert checkout.logged_commands() == before


def test_another_lock_installs_again(checkout: Checkout):
    checkout.run()
    before = len(checkout.logged_commands())
    with (checkout.repository / "requirements" / "run.txt").open("a") as lock:
        lock.write("# a change\n")
    checkout.run()
    assert len(checkout.logged_commands()) == 2 * before


def test_an_interrupted_environment_is_recreated(checkout: Checkout):
    checkout.run(FAKE_PIP="ERROR: killed")
    leftover = checkout.repository / ".venv" / "left"
    leftover.touch()
    assert checkout.run().returncode == 0
    assert not leftover.exists()


def test_a_development_environment_also_runs(checkout: Checkout):
    make_environment(checkout, "dev")
    before = checkout.logged_commands()
    assert "pip -r requirements/dev.txt" in before
    checkout.run()
    assert checkout.logged_commands() == before


def make_environment(checkout: Checkout, name: str, **fakes: str) -> str:
    """Run environment.sh; return its standard error."""
    script = str(checkout.repository / "deploy" / "environment.sh")
    variables = {"PATH": f"{checkout.commands}:{os.environ['PATH']}"}
    variables |= {"FAKE_FREE": "99000000", "FAKE_LOG": str(checkout.log)}
    command = ["bash", script, name]
    completed = subprocess.run(
        command, env=variables | fakes, check=True, capture_output=True, text=True
    )
    return completed.stderr


def test_a_coordinator_gets_no_torch(checkout: Checkout):
    make_environment(checkout, "coordinator")
    assert checkout.logged_commands() == [
        "pip -r requirements/coordinator.txt",
        "pip -e .",
        "compiled",
    ]
    make_environment(checkout, "coordinator")
    assert len(checkout.logged_commands()) == 3
    make_environment(checkout, "worker")
    assert checkout.logged_commands()[3:5] == [
        "pip -r requirements/run.txt",
        "pip -r requirements/cpu.txt",
    ]
    before = checkout.logged_commands()
    make_environment(checkout, "coordinator")
    assert checkout.logged_commands() == before


NO_ROCM = "ERROR: No matching distribution found for torch==2.13.0+rocm7.2"
NO_CPU_BUILD = "ERROR: No matching distribution found for torch==2.13.0+cpu"
CPU, CUDA = "pip -r requirements/cpu.txt", "pip -r requirements/cuda.txt"


def test_without_the_cpu_build_the_index_s_build_is_installed(checkout: Checkout):
    assert checkout.run(FAKE_CPU=NO_CPU_BUILD).returncode == 0
    assert CUDA in checkout.logged_commands()


@pytest.mark.parametrize("version", ["580", "580.65.06", "610.57.04"])
def test_a_recent_driver_gets_cuda(checkout: Checkout, version):
    checkout.set_driver(version, version)  # one line for each of two cards
    assert "driver" not in make_environment(checkout, "worker")
    assert CUDA in checkout.logged_commands()
    assert CPU not in checkout.logged_commands()


@pytest.mark.parametrize("version", ["535.261.03", "579.99.99", "90.1"])
def test_an_old_driver_is_reported_and_cuda_left_out(checkout: Checkout, version):
    checkout.set_driver(version)
    output = make_environment(checkout, "worker")
    assert f"NVIDIA's driver is {version}, but CUDA needs 580 or later" in output
    assert CPU in checkout.logged_commands()
    assert CUDA not in checkout.logged_commands()


def test_a_driver_upgrade_switches_to_cuda(checkout: Checkout):
    checkout.set_driver("535.261.03")
    make_environment(checkout, "worker")
    before = checkout.logged_commands()
    assert make_environment(checkout, "worker") == ""
    assert checkout.logged_commands() == before
    checkout.set_driver("580.65.06")
    assert make_environment(checkout, "worker", TORCH="cpu") == ""
    assert make_environment(checkout, "coordinator") == ""
    assert checkout.logged_commands() == before
    assert "now recent enough for CUDA" in make_environment(checkout, "worker")
    assert CUDA in checkout.logged_commands()[len(before) :]
    after = checkout.logged_commands()
    assert make_environment(checkout, "worker") == ""
    checkout.set_driver("NVIDIA-SMI has failed", code=9)
    assert make_environment(checkout, "worker") == ""
    assert checkout.logged_commands() == after


def test_the_cpu_build_may_be_requested_with_an_old_driver(checkout: Checkout):
    checkout.set_driver("535.261.03")
    assert "driver" not in make_environment(checkout, "worker", TORCH="cpu")
    assert CPU in checkout.logged_commands()


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_later_pythons_get_the_cpu_build(checkout: Checkout, version):
    make_environment(checkout, "worker", FAKE_MINOR=version, TORCH="cpu")
    assert CPU in checkout.logged_commands()


def test_a_python_without_a_locked_cpu_build_gets_the_index_s_build(checkout: Checkout):
    assert "not locked for Python 3.14" in make_environment(checkout, "worker", FAKE_MINOR="3.14")
    assert CPU not in checkout.logged_commands()
    assert CUDA in checkout.logged_commands()


def test_the_other_build_of_torch_replaces_the_first(checkout: Checkout):
    make_environment(checkout, "worker")
    make_environment(checkout, "worker", TORCH="cpu")
    before = checkout.logged_commands()
    assert before.count(CPU) == 1
    site = checkout.repository / ".venv" / "lib" / "python3.11" / "site-packages"
    (site / "torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    make_environment(checkout, "worker", TORCH="cuda")
    assert checkout.logged_commands()[len(before) :][1:3] == ["pip triton-rocm torch", CUDA]
    after = checkout.logged_commands()
    for torch in ("cuda", ""):
        make_environment(checkout, "worker", TORCH=torch)
    assert checkout.logged_commands() == after


def test_rocm_build_is_reported_to_have_no_hashes(checkout: Checkout):
    output = make_environment(checkout, "worker", TORCH="rocm")
    assert "installing torch's ROCm build by exact version, without hashes" in output
    assert checkout.logged_commands()[1] == "pip -r requirements/rocm.txt"
    assert {CPU, CUDA}.isdisjoint(checkout.logged_commands())
    before = checkout.logged_commands()
    for torch in ("rocm", ""):
        assert make_environment(checkout, "worker", TORCH=torch) == ""
    assert checkout.logged_commands() == before


@pytest.mark.parametrize(
    ("installed_version", "requested_build", "is_removed"),
    [("2.13.0", "rocm", True), ("2.13.0+cpu", "rocm", True), ("2.13.0+rocm7.2", "rocm", False),
     ("2.13.0+rocm7.2", "cuda", True), ("2.13.0", "cuda", False)],
)  # fmt: skip
def test_another_build_of_torch_is_removed_first(
    checkout: Checkout, installed_version, requested_build, is_removed
):
    make_environment(checkout, "coordinator")
    site = checkout.repository / ".venv" / "lib" / "python3.11" / "site-packages"
    (site / f"torch-{installed_version}.dist-info").mkdir(parents=True)
    make_environment(checkout, "worker", TORCH=requested_build)
    assert ("pip triton-rocm torch" in checkout.logged_commands()) == is_removed
    assert f"pip -r requirements/{requested_build}.txt" in checkout.logged_commands()


def test_pip_accepts_the_rocm_requirements(tmp_path: Path):
    """Install without a network, from a folder of empty wheels with these names."""
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
    chosen_versions = {
        each["metadata"]["name"]: each["metadata"]["version"]
        for each in json.loads(report.read_text())["install"]
    }
    assert chosen_versions == names
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
    ("fakes", "code", "message"),
    [
        ({"FAKE_PIP": NO_NETWORK}, 69, "cannot reach the package index"),
        ({"FAKE_CPU": NO_NETWORK}, 69, "cannot reach"),
        (
            {"FAKE_CPU": NO_CPU_BUILD, "TORCH": "cpu"},
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
def test_failure_gives_one_line_and_an_exit_code(checkout: Checkout, fakes, code, message):
    completed = checkout.run(**fakes)
    *progress, last = completed.stderr.splitlines()
    assert message in last
    assert last.startswith("samestep: ")
    assert completed.returncode == code
    assert all(line.startswith(("samestep: creating", "samestep: installing")) for line in progress)
    assert completed.stdout == ""


def test_requested_cuda_is_refused_with_an_old_driver(checkout: Checkout):
    checkout.set_driver("550.163.01")
    completed = checkout.run(TORCH="cuda")
    assert completed.returncode == 78
    assert completed.stderr.startswith(
        "samestep: expected NVIDIA's driver 580 or later, found 550.163"
    )
    assert completed.stderr.count("\n") == 1
    assert checkout.logged_commands() == []
