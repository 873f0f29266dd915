"""Checks of devices, usable and unusable: kernel files are fakes, torch is real."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from backends.device_checks import LOCKED_CUDA, KernelFiles, device_findings, oldest_driver_for
from backends.registry import devices

torch = pytest.importorskip("torch")

NVIDIA, AMD, INTEL = "0x10de", "0x1002", "0x8086"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\n"


def has(backend: str) -> bool:
    """Whether a device is usable. `skipif` conditions call this in a string, because torch must not
    be imported before the fork (see `tests.fork_server`)."""
    return any(row.backend == backend and row.usable for row in devices())


@pytest.fixture
def machine(tmp_path):
    """Return a function that makes the kernel files of a machine with these display controllers,
    and with an NVIDIA driver unless `driver` is empty."""

    def make(*vendors: str, driver: str = "") -> KernelFiles:
        for number, vendor in enumerate(vendors):
            card = tmp_path / "sys/bus/pci/devices" / f"0000:0{number}:00.0"
            card.mkdir(parents=True)
            (card / "vendor").write_text(vendor + "\n")
            (card / "class").write_text("0x030200\n")
        if driver:
            version = tmp_path / "proc/driver/nvidia/version"
            version.parent.mkdir(parents=True)
            version.write_text(driver)
        return KernelFiles(tmp_path / "dev", tmp_path / "proc", tmp_path / "sys")

    return make


def finding_lines(name: str, machine: KernelFiles, *indices: int) -> list[str]:
    return [finding.line() for finding in device_findings(name, indices or (0,), machine)]


def test_the_cpu_computes(machine):
    (line,) = finding_lines("cpu", machine())
    assert line.startswith("ok       device: cpu 0: ")
    assert line.endswith(", computes")


@pytest.mark.skipif("not has('vulkan')", reason="no Vulkan device here")
def test_a_vulkan_device_computes_and_software_is_used_by_name_only(machine):
    lines = finding_lines("vulkan", machine())
    assert lines
    assert all(line.startswith("ok       device: vulkan ") for line in lines)
    assert all(line.endswith(", computes") for line in lines)
    assert not any("llvmpipe" in line for line in finding_lines("auto", machine()))


def test_a_device_that_computes_wrongly_or_fails_is_reported(machine, monkeypatch):
    monkeypatch.setattr("backends.device_trial._squared_error", lambda m, a: m(a["x"]).sum())
    (finding,) = finding_lines("cpu", machine())
    assert finding.startswith("failure  device: cpu 0: ")
    assert "computes wrongly" in finding

    def run_out_of_memory(*_):
        raise RuntimeError("out of\n memory")

    monkeypatch.setattr("backends.device_trial._squared_error", run_out_of_memory)
    (failure_line,) = finding_lines("cpu", machine())
    assert failure_line.startswith("failure  device: cpu 0: ")
    assert "cannot compute: out of memory" in failure_line


def test_cards_are_counted_by_vendor(machine):
    assert machine(NVIDIA, NVIDIA, AMD, INTEL, "0x1234").cards() == {
        "NVIDIA": 2,
        "AMD": 1,
        "Intel": 1,
    }


@pytest.mark.skipif("has('cuda')", reason="CUDA is usable here")
class TestWithoutCuda:
    def test_missing_card_is_no_failure(self, machine):
        assert not any("cuda" in line for line in finding_lines("auto", machine()))

    def test_card_without_a_driver_gets_advice(self, machine):
        line = next(line for line in finding_lines("auto", machine(NVIDIA)) if "cuda" in line)
        assert line.startswith("warning  device: cuda: ")
        assert "install NVIDIA's driver 580 or later from NVIDIA's repository" in line

    def test_requested_backend_is_checked(self, machine):
        line = finding_lines("cuda", machine(NVIDIA))[-1]
        assert line.startswith("failure  device: cuda: ")

    @pytest.mark.parametrize(
        ("cuda", "loaded", "oldest"),
        [
            (None, "470.57.02", "580"),
            ("13.0", "470.57.02", "580"),
            ("13.2", "550.163.01", "580"),
            ("12.8", "470.57.02", "525"),
        ],
    )
    def test_driver_that_is_too_old_gets_advice(self, machine, monkeypatch, cuda, loaded, oldest):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        line = self.cuda_warning(machine, loaded)
        assert f"NVIDIA's driver {loaded} is loaded, torch" in line
        assert f"needs {oldest} or later: install that from NVIDIA's repository" in line

    @pytest.mark.parametrize(
        ("cuda", "loaded"), [("13.0", "580.65.06"), ("12.8", "535.261.03"), ("99.0", "470.57.02")]
    )
    def test_torch_error_is_reported_if_the_driver_is_new_enough(
        self, machine, monkeypatch, cuda, loaded
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        line = self.cuda_warning(machine, loaded)
        assert f"NVIDIA's driver {loaded} is loaded; torch {torch.__version__} says: " in line

    def test_torch_without_cuda_gets_the_command_for_the_cuda_build(self, machine, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        assert "TORCH=cuda bash deploy/environment.sh" in self.cuda_warning(machine, "580.65.06")

    def test_version_of_the_open_kernel_module_is_read(self, machine):
        version_text = (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        )
        assert machine(NVIDIA, driver=version_text).nvidia_driver() == "580.65.06"

    @staticmethod
    def cuda_warning(machine, loaded: str) -> str:
        lines = finding_lines("auto", machine(NVIDIA, driver=DRIVER.replace("470.57.02", loaded)))
        line = next(line for line in lines if "cuda" in line)
        assert line.startswith("warning  device: cuda: ")
        return line


def test_scripts_require_the_driver_of_the_locked_cuda():
    lock = (Path(__file__).parents[2] / "requirements" / "cuda.txt").read_text()
    (major,) = re.findall(r"^cuda-toolkit==(\d+)[.]", lock, re.MULTILINE)
    assert int(major) == LOCKED_CUDA
    assert re.findall(r"^# Needs NVIDIA's driver (\S+) or later[.]$", lock, re.MULTILINE) == [
        oldest_driver_for(None)
    ]


@pytest.mark.skipif("not has('cuda')", reason="no CUDA device here")
class TestWithCuda:
    def test_each_card_computes(self):
        lines = finding_lines("cuda", KernelFiles())
        assert lines
        assert all(line.startswith("ok       device: cuda ") for line in lines)

    def test_card_number_out_of_range_is_a_failure(self):
        line = finding_lines("cuda", KernelFiles(), 99)[-1]
        assert line.startswith("failure  device: there is no cuda device 99")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_device_files_without_permission_are_listed():
    with tempfile.TemporaryDirectory() as folder:
        node = Path(folder) / "dri" / "renderD128"
        node.parent.mkdir()
        for path in (node.parent.parent, node.parent):
            path.chmod(0o755)
        node.touch(0o660)
        machine = KernelFiles(dev=Path(folder))
        assert machine.inaccessible_files() == []
        # Root may open every file, so a child process checks as another user.
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65_534)
                os._exit(int(machine.inaccessible_files() != [str(node)]))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
