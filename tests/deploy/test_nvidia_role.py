"""The Ansible role for NVIDIA's driver, with files and packages in place of card and driver.

The package repositories are valid for apt. Their packages have the names of Debian's and NVIDIA's
packages, and almost no content.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.booted_machine import booted_machine
from tests.deploy.test_playbook import HERE, SSH, run_ansible

pytestmark = pytest.mark.xdist_group("booted machine")

VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root)\n"
RECAP = re.compile(r"^(\S+) +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=(\d+) ", re.MULTILINE)


def play(tmp_path: Path, tasks: str, hosts: dict[str, Any], *arguments: str) -> tuple[Any, str]:
    """Run one task file of the role; return changed and failed counts by host, and the output."""
    include = {"name": "samestep", "tasks_from": tasks}
    show = {"msg": "devices: {{ samestep_found_devices | default('none') }}"}
    steps = [{"ansible.builtin.include_role": include}, {"ansible.builtin.debug": show}]
    playbook = tmp_path / "play.yml"
    plays = [{"hosts": "all", "gather_subset": ["min"], "tasks": steps}]  # kernel and release
    playbook.write_text(json.dumps(plays))
    inventory = tmp_path / "inventory.json"
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    completed = run_ansible(
        "ansible-playbook", "-i", str(inventory), str(playbook), *arguments,
        home=tmp_path, ANSIBLE_ROLES_PATH=str(HERE / "roles"),
    )  # fmt: skip
    output = completed.stdout + completed.stderr
    recap = {
        name: (int(changes), int(failures)) for name, changes, failures in RECAP.findall(output)
    }
    assert recap.keys() == hosts.keys(), output
    return recap, output


FEW_MACHINES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("new", "580.65.06", {}),
    ("old", "550.163.01", {}),
    ("none", "", {}),
)  # fmt: skip
"""Machines: a name, the loaded driver, and its inventory variables."""
ALL_MACHINES = (
    *FEW_MACHINES,
    ("old-and-only-vulkan", "550.163.01", {"samestep_devices": ["vulkan0"]}),
    ("old-and-only-cpu", "550.163.01", {"samestep_torch": "cpu"}),
    ("none-and-left-to-the-user", "", {"samestep_nvidia_driver": False}),
    ("none-and-only-cpu", "", {"samestep_torch": "cpu"}),
    ("none-and-only-vulkan", "", {"samestep_devices": ["vulkan0"]}),
)


@pytest.mark.parametrize(
    "machines",
    [
        pytest.param(FEW_MACHINES, id="few"),
        pytest.param(ALL_MACHINES, id="all", marks=pytest.mark.slow),
    ],
)
def test_old_driver_is_refused_and_missing_driver_is_installed(tmp_path, machines):
    hosts = {}
    for name, loaded_version, variables in machines:
        driver = tmp_path / f"{name}.driver"
        if loaded_version:
            driver.write_text(VERSION.format(loaded_version))
        local = {"ansible_connection": "local", "samestep_driver_file": str(driver)}
        hosts[name] = local | {"ansible_python_interpreter": "/usr/bin/python3"} | variables
    # The driver file is a constant of the role, which only the command line can change.
    driver_files = "{{ samestep_driver_files[inventory_hostname] }}"
    files = {name: host.pop("samestep_driver_file") for name, host in hosts.items()}
    extra = json.dumps({"samestep_driver_files": files, "samestep_driver_file": driver_files})
    recap, output = play(tmp_path, "nvidia.yml", hosts, "--check", "-e", extra)
    assert recap == {name: (int(name == "none"), int(name == "old")) for name in hosts}, output
    output = " ".join(output.split())
    assert "expected NVIDIA's driver 580 or later, found 550.163.01: remove it" in output
    assert re.search(r"NVIDIA's driver, 580 or later, from https://\S+/debian\d+/x86_64;", output)


class Repositories:
    """Repositories of Debian and NVIDIA, for apt in a machine that mounts this folder as
    /srv/repositories."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        source = "deb [trusted=yes] file:/srv/repositories/nvidia ./\n"
        self._package("nvidia", "cuda-keyring", {"etc/apt/sources.list.d/cuda.list": source})
        (nvidia,) = (folder / "nvidia").iterdir()
        nvidia.rename(nvidia.with_name("cuda-keyring_1.1-1_all.deb"))
        version = VERSION.format("610.57.04")
        devices = "#!/bin/sh\ntouch /dev/nvidia0 /dev/nvidia-uvm\n"
        depends = "Depends: nvidia-support\n"
        files = {"var/lib/driver-version": version}
        entries = [
            self._package("nvidia", "nvidia-driver-cuda", files, depends),
            self._package("nvidia", "nvidia-kernel-open-dkms", {}),
            self._package("nvidia", "nvidia-modprobe", {"usr/bin/nvidia-modprobe": devices}),
        ]
        (folder / "nvidia" / "Packages").write_text("\n".join(entries))
        kernels = [
            self._package("debian", name, {})
            for name in ("linux-image-amd64", "linux-headers-amd64")
        ]
        release = folder / "debian" / "dists" / "bookworm"
        support = [self._package("debian", "nvidia-support", {})]
        for component, packages in (("main", kernels), ("contrib", support)):
            index = release / component / "binary-amd64"
            index.mkdir(parents=True)
            (index / "Packages").write_text("\n".join(packages))
        index_entries = "".join(
            f" {hashlib.sha256(file.read_bytes()).hexdigest()} {file.stat().st_size}"
            f" {file.relative_to(release)}\n"
            for file in sorted(release.glob("*/*/Packages"))
        )
        (release / "Release").write_text(
            "Origin: Debian\nSuite: stable\nCodename: bookworm\nArchitectures: amd64\n"
            f"Components: main contrib\nSHA256:\n{index_entries}"
        )

    def _package(
        self, repository: str, name: str, files: dict[str, str], extra_fields: str = ""
    ) -> str:
        """Build a package; return its entry in the repository's index."""
        tree = self._folder / "trees" / name
        control = (
            f"Package: {name}\nVersion: 1:9999\nArchitecture: all\nMaintainer: nobody\n"
            f"{extra_fields}Description: stands for a package in a test\n"
        )
        for path, text in {"DEBIAN/control": control, **files}.items():
            file = tree / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755 if text.startswith("#!") else 0o644)
        pool = self._folder / repository
        pool.mkdir(exist_ok=True)
        package_file = pool / f"{name}.deb"
        command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(package_file)]
        subprocess.run(command, check=True, capture_output=True)
        digest = hashlib.sha256(package_file.read_bytes()).hexdigest()
        size = package_file.stat().st_size
        return f"{control}Filename: ./{package_file.name}\nSize: {size}\nSHA256: {digest}\n"


ONE_LINE = "deb [trusted=yes] file:/srv/repositories/debian bookworm main\n"
STANZA = """Types: deb
URIs: file:/srv/repositories/debian
Suites: bookworm
Components: main
Trusted: yes
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "source"), [("sources.list", ONE_LINE), ("sources.list.d/debian.sources", STANZA)]
)
def test_machine_with_a_card_and_no_driver_gets_the_driver(tmp_path, file, source):
    if shutil.which("dpkg-deb") is None or not Path("/etc/debian_version").exists():
        pytest.skip("no Debian here to install packages on")
    repositories = tmp_path / "repositories"
    repositories.mkdir()
    Repositories(repositories)
    with booted_machine(tmp_path, "tower", mounts={repositories: "/srv/repositories"}) as machine:
        machine.run("sh", "-c", "rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*")
        machine.write(f"/etc/apt/{file}", source)  # without contrib, which the driver needs
        machine.run("mount", "-t", "tmpfs", "cards", "/sys/bus/pci/devices")
        machine.write("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
        machine.write("/sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
        ssh = tmp_path / "ssh"
        ssh.write_text(SSH.format(leader=machine.leader))
        ssh.chmod(0o755)
        hosts = {
            "ansible_host": "tower",
            "ansible_user": "root",
            "ansible_ssh_executable": str(ssh),
            "ansible_python_interpreter": "/usr/bin/python3",
            "samestep_nvidia_repository": "/srv/repositories/nvidia",
        }
        arguments = ("-e", "samestep_driver_file=/var/lib/driver-version", "--skip-tags", "restart")
        recap, output = play(tmp_path, "devices.yml", {"tower": hosts}, *arguments)
        assert recap["tower"][0] > 0, output
        assert recap["tower"][1] == 0, output
        assert "devices: ['cuda0']" in output
        for name in ("linux-headers-amd64", "nvidia-driver-cuda", "nvidia-kernel-open-dkms"):
            machine.run("dpkg-query", "--show", name)

        recap, output = play(tmp_path, "devices.yml", {"tower": hosts}, *arguments)
        assert recap == {"tower": (0, 0)}, output
        machine.write("/var/lib/driver-version", VERSION.format("550.163.01"))
        recap, output = play(tmp_path, "devices.yml", {"tower": hosts}, *arguments)
        assert recap == {"tower": (0, 1)}, output
        assert "found 550.163.01: remove it" in " ".join(output.split())

        only_cpu = {"tower": hosts | {"samestep_torch": "cpu"}}
        for loaded_version in (VERSION.format("550.163.01"), ""):
            machine.write("/var/lib/driver-version", loaded_version)
            recap, output = play(tmp_path, "devices.yml", only_cpu, *arguments)
            assert recap == {"tower": (0, 0)}, output
            assert "devices: ['cpu']" in output
