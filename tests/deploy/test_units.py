"""The systemd units as text: valid by systemd's own tools, and consistent with the daemons."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from protocol.base.errors import ExitCode
from tests.booted_machine import INSTALL_DIRECTORY
from tests.cluster import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
EXPOSURE = re.compile(r"Overall exposure level for \S+: ([0-9.]+)")

needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing"
)


def analyze(*arguments):
    return subprocess.run(
        ["systemd-analyze", *arguments],
        env={**os.environ, "LC_ALL": "C", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
    )


def verification_errors(unit: Path, directory: Path, old: str = "", new: str = "") -> str:
    """Return the errors that `systemd-analyze verify` prints for a unit whose commands exist; its
    exit code is not informative."""
    for command in ("coordinator", "worker"):
        shutil.copy("/bin/true", directory / command)
    copy = directory / unit.name
    text = unit.read_text().replace(f"{INSTALL_DIRECTORY}/bin", str(directory))
    assert old in text
    copy.write_text(text.replace(old, new))
    completed = analyze("verify", "--man=no", str(copy))
    return completed.stdout + completed.stderr


@needs_systemd_analyze
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_analyze_accepts_the_units(unit, tmp_path):
    assert verification_errors(unit, tmp_path) == ""


@needs_systemd_analyze
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_misspelled_key_is_reported(unit, tmp_path):
    assert "ProtectHomes" in verification_errors(unit, tmp_path, "ProtectHome=", "ProtectHomes=")


@needs_systemd_analyze
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_have_a_low_exposure_score(unit):
    completed = analyze("security", "--offline=yes", str(unit))
    score = EXPOSURE.search(completed.stdout)
    assert score is not None, completed.stderr
    assert float(score[1]) <= 2.0


def test_each_daemon_has_a_unit():
    assert [unit.name for unit in UNITS] == [
        "samestep-coordinator.service",
        "samestep-worker@.service",
    ]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_errors_that_need_an_operator_do_not_restart(unit):
    line = re.search(r"^RestartPreventExitStatus=(.*)$", unit.read_text(), re.MULTILINE)
    assert line is not None
    permanent_failures = {ExitCode.USAGE, ExitCode.NOT_AUTHORIZED, ExitCode.MISMATCH}
    assert {int(code) for code in line[1].split()} == permanent_failures


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Return the keys of the section Service, each with all its values."""
    settings: dict[str, list[str]] = {}
    service = unit.read_text().partition("[Service]\n")[2].partition("\n[")[0]
    for key, value in re.findall(r"^(\w+)=(.*)$", service, re.MULTILINE):
        settings.setdefault(key, []).append(value)
    return settings


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_stop_drains_and_a_hung_daemon_is_restarted_with_its_stacks(unit):
    """The daemons' part is tested in test_restart.py, test_commands.py and test_systemd.py, and
    with systemd itself in test_booted_units.py, which is slow."""
    settings = settings_of(unit)
    assert settings["Type"] == ["notify"]
    assert settings["KillMode"] == ["mixed"]  # SIGTERM, which drains, goes to the daemon only
    assert not {"KillSignal", "SendSIGKILL", "RestartKillSignal", "WatchdogSignal"} & {*settings}
    assert re.fullmatch(r"[2-9]min", settings["TimeoutStopSec"][0]), "a step can take long"
    assert int(settings["WatchdogSec"][0]) >= 30
    assert settings["Restart"][0] in {"always", "on-failure"}
    assert "PYTHONFAULTHANDLER=1" in settings["Environment"]


def test_only_workers_have_the_devices_of_their_backends():
    coordinator, worker = (settings_of(unit) for unit in UNITS)
    assert worker["DevicePolicy"] == coordinator["DevicePolicy"] == ["closed"]
    assert {"char-nvidia rw", "char-nvidia-uvm rw", "char-drm rw", "char-kfd rw"} <= {
        *worker["DeviceAllow"]
    }
    assert worker["SupplementaryGroups"] == ["render video"]
    assert "PrivateDevices" not in worker
    assert coordinator["PrivateDevices"] == ["yes"]
    assert "DeviceAllow" not in coordinator
