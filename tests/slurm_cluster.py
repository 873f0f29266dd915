"""A Slurm cluster of three nodes on this machine: munged, slurmctld and three slurmd, no systemd.

The daemons are Debian's, with a temporary directory and free ports. Jobs of the partition `high`
preempt jobs of `low`, which then have a minute to end.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.free_ports import free_ports
from tests.processes import PATIENCE_S, ROOT

NODES: Final = ("node1", "node2", "node3")
_PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_POLL_S: Final = 0.1
_CONFIGURATION: Final = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket,cred_expire=5
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool/%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
InactiveLimit=0
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
_NODE: Final = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1"
)


class SlurmCluster:
    """A running cluster; create it with `slurm_cluster`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "SAMESTEP_VENV": sys.prefix,
            "PYTHONPATH": str(ROOT),
        }
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons and wait until all nodes accept jobs."""
        directory, user = self.directory, getpass.getuser()
        controller_port, *ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        (directory / "munge.key").write_bytes(secrets.token_bytes(1024))
        (directory / "munge.key").chmod(0o600)
        (directory / "state").mkdir()
        nodes = [
            _NODE.format(name=name, host=host, port=port)
            for name, port in zip(NODES, ports, strict=True)
        ]
        configuration = _CONFIGURATION.format(
            at=directory,
            user=user,
            host=host,
            controller_port=controller_port,
            nodes="\n".join(nodes),
        )
        (directory / "slurm.conf").write_text(configuration)
        self._spawn(
            "munged", "--foreground", "--force", f"--socket={directory}/munge.socket",
            f"--key-file={directory}/munge.key", f"--log-file={directory}/munged.log",
            f"--pid-file={directory}/munged.pid", f"--seed-file={directory}/munge.seed",
        )  # fmt: skip
        self.wait_until((directory / "munge.socket").exists)
        self._spawn("slurmctld", "-D")
        for name in NODES:
            (directory / "spool" / name).mkdir(parents=True)
            self._spawn("slurmd", "-D", "-N", name)
        self.wait_until(
            lambda: (
                self.run("sinfo", "-h", "-N", "-t", "idle", check=False).count("idle")
                >= 2 * len(NODES)
            )  # each node is in two partitions
        )

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.run(
            "scancel",
            "--quiet",
            "--full",
            "--signal=KILL",
            "--user",
            getpass.getuser(),
            check=False,
        )
        for daemon in reversed(self.daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()

    def run(self, *command: str, cwd: Path | None = None, check: bool = True) -> str:
        """Run a Slurm command; return its output."""
        completed = subprocess.run(
            command, env=self.environment, cwd=cwd or self.directory, capture_output=True,
            text=True, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
        assert completed.returncode == 0 or not check, (
            f"{command}: {completed.stderr}\n{self.logs()}"
        )
        return completed.stdout

    def submit(self, script: str, *options: str, cwd: Path) -> str:
        """Submit a job with one core per task; return its id."""
        return self.run(
            "sbatch", "--parsable", "--cpus-per-task=1", "--mem=0", *options, script, cwd=cwd
        ).strip()

    def states(self, job: str) -> list[str]:
        """Return the states of a job's array tasks that are pending, running or ending."""
        return self.run("squeue", "-h", "-r", "-o", "%T", "-j", job, check=False).split()

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition.

        Raises:
            AssertionError: The condition did not become true in time; the message has the logs.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(_POLL_S)

    def logs(self) -> str:
        """Return the last lines of every log, for the text of a failed test."""
        logs = sorted([*self.directory.glob("*.log"), *self.directory.glob("*/*.log")])
        return "\n".join(f"== {log}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def _spawn(self, *command: str) -> None:
        program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert program is not None
        with (self.directory / f"{len(self.daemons)}-{command[0]}.out").open("wb") as log_file:
            daemon = subprocess.Popen(
                [program, *command[1:]], env=self.environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
            )  # fmt: skip
            self.daemons.append(daemon)


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Yield a running cluster; skip the test where Slurm is not installed."""
    for program in _PROGRAMS:
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"{program} is missing: apt install munge slurmctld slurmd slurm-client")
    # A socket's path has at most 107 characters, and munged accepts no directory open to others.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        cluster = SlurmCluster(Path(name))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
