"""The playbook turns two bare machines into a cluster, and a second run changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.booted_machine import INSTALL_DIRECTORY, Machine, booted_machine
from tests.cluster import ROOT
from tests.deploy.built_wheel import build_wheel
from tests.deploy.locked_wheels import DEBIAN_PYTHON, locked_wheels
from tests.network_hosts import network

pytestmark = pytest.mark.xdist_group("booted machine")

HERE = ROOT / "deploy" / "ansible"
RECAP = re.compile(r"^(\w+) +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=0 ", re.MULTILINE)
WHEELS = "/srv/wheels"
SSH = """#!/bin/sh
# Replaces ssh: the last argument is the command for the machine.
for command; do :; done
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \\
    nsenter --target {leader} --all -- /bin/sh -c "$command"
"""


def ansible(command: str) -> str:
    """Return the path of an Ansible command; skip the test where it is missing."""
    command_directory = Path(sys.prefix) / "ansible" / "bin"
    program = shutil.which(command, path=f"{command_directory}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{command} is missing: deploy/test.sh installs it")
    return program


def run_ansible(
    command: str, *arguments: str, home: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    program = ansible(command)
    return subprocess.run(
        [program, *arguments],
        cwd=HERE,
        env={
            "PATH": f"{Path(program).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "LC_ALL": "C.UTF-8",
            "NO_COLOR": "1",
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_HOME": str(home / "ansible"),
            "ANSIBLE_HOST_KEY_CHECKING": "0",
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_SSH_TRANSFER_METHOD": "piped",
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )


# Checks without a machine.


@pytest.mark.slow
def test_ansible_lint_passes(tmp_path):
    completed = run_ansible(
        "ansible-lint", "--offline", "--nocolor", "--profile", "production", ".", home=tmp_path
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Passed: 0 failure(s), 0 warning(s)" in completed.stdout + completed.stderr


def test_the_playbook_and_the_sample_inventory_are_well_formed(tmp_path):
    arguments = ("-i", "inventory.example.yml", "site.yml", "--syntax-check")
    completed = run_ansible("ansible-playbook", *arguments, home=tmp_path)
    assert (completed.returncode, completed.stderr) == (0, "")


# Two machines.


class Cluster:
    """Two booted machines, and the playbook that configures them."""

    def __init__(self, directory: Path, machines: dict[str, Machine], addresses: dict[str, str]):
        self.machines = machines
        self._home = directory / "home"
        self._home.mkdir()
        self._inventory = directory / "inventory.json"
        hosts = {}
        for name, machine in machines.items():
            ssh = directory / f"ssh-{name}"
            ssh.write_text(SSH.format(leader=machine.leader))
            ssh.chmod(0o755)
            hosts[name] = {"ansible_host": addresses[name], "ansible_ssh_executable": str(ssh)}
        variables = {
            "ansible_user": "root",
            "ansible_python_interpreter": "/usr/bin/python3",
            "samestep_environment": "coordinator",  # scripted workers need no torch
            "samestep_devices": ["scripted"],
            "samestep_pip_environment": {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": WHEELS},
        }
        children: dict[str, Any] = {
            "samestep_coordinator": {"hosts": {"desk": {}}},
            "samestep_workers": {"hosts": {"desk": {}, "tower": {}}},
        }
        inventory = {"all": {"hosts": hosts, "vars": variables, "children": children}}
        self._inventory.write_text(json.dumps(inventory))

    def play(self, *arguments: str) -> tuple[dict[str, int], str]:
        """Run the playbook; return the number of changes per machine, and the output."""
        inventory = ("-i", str(self._inventory))
        completed = run_ansible(
            "ansible-playbook", *inventory, "site.yml", *arguments, home=self._home
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        changes = {name: int(count) for name, count in RECAP.findall(completed.stdout)}
        assert changes.keys() == self.machines.keys(), completed.stdout
        return changes, completed.stdout + completed.stderr

    def on_desk(self, *command: str) -> str:
        return self.machines["desk"].run(f"{INSTALL_DIRECTORY}/bin/coordinator", *command)

    def workers(self) -> set[str]:
        """Return the names of joined workers."""
        status = json.loads(self.on_desk("status", "--json"))
        return {worker["name"] for worker in status["workers"]}


@pytest.fixture(scope="module")
def wheels(request) -> Path:
    """Return packages for pip on the test machines, which share this machine's operating system."""
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys, venv, ensurepip; print(*sys.version_info[:2])"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if version.returncode:
        pytest.skip("cannot build a bare machine: Debian's python3 and python3-venv are missing")
    if version.stdout.split() != DEBIAN_PYTHON.split("."):
        pytest.skip(
            f"expected Debian 12's Python, found {version.stdout.strip().replace(' ', '.')}"
        )
    return locked_wheels(request.config.cache)


@pytest.fixture(scope="module")
def cluster(wheels, tmp_path_factory) -> Iterator[Cluster]:
    ansible("ansible-playbook")
    directory = tmp_path_factory.mktemp("cluster")
    names = ("desk", "tower")
    with ExitStack() as stack:
        net = stack.enter_context(network(*names, subnet="10.8.1"))
        machines = {
            name: stack.enter_context(
                booted_machine(
                    directory, name, mounts={wheels: WHEELS}, network=net.namespace(name)
                )
            )
            for name in names
        }
        yield Cluster(directory, machines, {name: net.address(name) for name in names})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_playbook_installs_then_changes_nothing_then_applies_changes(cluster, tmp_path):
    check_first_run(cluster)
    assert cluster.play()[0] == {"desk": 0, "tower": 0}
    assert cluster.play("--check", "--diff")[0] == {"desk": 0, "tower": 0}
    options = {"samestep_wheel": str(build_wheel(tmp_path)), "samestep_devices": ["scripted:1"]}
    arguments = ("-e", json.dumps(options))
    check_changes(cluster, arguments)
    assert cluster.play(*arguments)[0] == {"desk": 0, "tower": 0}


def check_first_run(cluster: Cluster) -> None:
    """Check that the playbook turns two bare machines into a coordinator and two workers."""
    changes, output = cluster.play("-vvv", "--diff")
    assert all(changes.values())
    assert cluster.workers() == {"desk-scripted", "tower-scripted"}

    secret = cluster.on_desk("token", "show").partition(".")[2]
    assert len(secret) == 43
    assert secret not in output
    for machine in cluster.machines.values():
        token = machine.path("/etc/credstore/samestep.join.token")
        assert token.stat().st_mode & 0o7777 == 0o600
        assert token.read_text().strip().endswith(secret)
        for group in ("render", "video"):
            machine.run("getent", "group", group)
    assert (
        cluster.machines["desk"].show("samestep-coordinator.service", "UnitFileState") == "enabled"
    )


def check_changes(cluster: Cluster, arguments: tuple[str, ...]) -> None:
    """Check that the playbook applies a new token, code from a wheel, and other devices."""
    cluster.on_desk("token", "rotate")
    changes, _ = cluster.play(*arguments)
    assert all(changes.values())
    assert cluster.workers() == {"desk-scripted:1", "tower-scripted:1"}
    token = cluster.on_desk("token", "show")
    for machine in cluster.machines.values():
        assert machine.path("/etc/credstore/samestep.join.token").read_text().strip() == token
        for name, value in (("ActiveState", "inactive"), ("UnitFileState", "disabled")):
            assert machine.show("samestep-worker@scripted.service", name) == value
        module_path = machine.run(
            f"{INSTALL_DIRECTORY}/bin/python", "-c", "import protocol; print(protocol.__file__)"
        )
        assert module_path.startswith(INSTALL_DIRECTORY)
