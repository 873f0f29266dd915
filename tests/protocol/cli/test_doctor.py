"""Checks that both doctors share; each fault is real where possible."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import __version__
from protocol.base import limits
from protocol.base.errors import ExitCode
from protocol.cli.doctor import (
    check_clock,
    check_directory,
    check_memory,
    check_open_files,
    failure,
    ok,
    report_findings,
    warning,
)
from tests.durable_run import small_disk

ROOT = Path(__file__).parents[3]
SHOW_PACKAGES = """
import sys
from protocol.cli.doctor import check_packages, check_release
for finding in (check_release(), *check_packages(sys.argv[1].split(), ("hf",))):
    print(finding.line())
"""


def write_distribution(folder: Path, *requires: str, version: str = __version__) -> Path:
    """Make a folder in which samestep is installed with these requirements."""
    metadata_directory = folder / f"samestep-{version}.dist-info"
    metadata_directory.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: samestep", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (metadata_directory / "METADATA").write_text("\n".join(lines) + "\n")
    return folder


def package_findings(folder: Path, extras: str = "") -> list[str]:
    completed = subprocess.run(
        [sys.executable, "-c", SHOW_PACKAGES, extras],
        cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
    )  # fmt: skip
    return completed.stdout.splitlines()


def test_matching_packages_are_ok(tmp_path):
    base = ("numpy>=2.0", "no-such-package>=1; extra == 'hf'", "numpy>=99; extra == 'other'")
    release, packages = package_findings(write_distribution(tmp_path, *base))
    assert release.startswith(f"ok       release: samestep {__version__}, protocol version ")
    assert packages == "ok       packages: all installed"


def test_mismatched_packages_are_a_failure(tmp_path):
    requirements = (
        "numpy>=99.0",
        "no-such-package>=1; extra == 'worker'",
        "blake3>=99; extra == 'hf'",
    )
    line = package_findings(write_distribution(tmp_path, *requirements), "worker")[1]
    assert line.startswith("failure  packages: numpy is ")
    for text in (
        "expected >=99.0",
        "no-such-package is missing",
        "blake3 is ",
        "[worker]",
    ):
        assert text in line


def test_another_installed_release_is_a_failure(tmp_path):
    line = package_findings(write_distribution(tmp_path, version="9.9.9"))[0]
    assert line.startswith("failure  release: ")
    assert "the package installed is 9.9.9" in line


def test_low_open_file_limit_is_reported():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        findings = [check_open_files(count, 300) for count in (100, 250)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [finding.outcome for finding in findings] == ["warning", "failure"]
    assert "LimitNOFILE=300" in findings[0].line()
    assert check_open_files(1, 2).outcome == "ok"


def test_unsynchronized_or_early_clock_is_reported():
    assert "before this release" in check_clock(86_400.0, synchronized=True).line()
    assert "timedatectl" in check_clock(4e9, synchronized=False).line()
    assert check_clock(4e9, synchronized=True).outcome == "ok"
    assert check_clock().outcome in {"ok", "warning"}


def test_little_machine_memory_is_a_warning():
    assert check_memory(1).outcome == "ok"
    assert check_memory(2**60).outcome == "warning"


def test_memory_limit_of_a_control_group_is_reported(tmp_path):
    group = tmp_path / "groups" / "slice"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (tmp_path / "self" / "cgroup").write_text("4:memory:/old\n0::/slice\n")
    (group / "memory.current").write_text(f"{300 * limits.MIB}\n")
    (group / "memory.max").write_text(f"{800 * limits.MIB}\n")
    finding = check_memory(1024 * limits.MIB, tmp_path, tmp_path / "groups")
    assert finding.outcome == "warning"
    assert "500.0 MiB free in its control group" in finding.observation
    (group / "memory.max").write_text("max\n")
    assert "this machine" in check_memory(1, tmp_path, tmp_path / "groups").observation


def test_missing_directory_is_not_created(tmp_path):
    (finding,) = check_directory("cache", tmp_path / "a" / "b", 1, "CACHE=DIR")
    assert finding.outcome == "ok"
    assert "(not created yet)" in finding.observation
    assert list(tmp_path.iterdir()) == []


def test_little_free_space_is_a_warning(tmp_path):
    (finding,) = check_directory("cache", tmp_path, 2**62, "CACHE=DIR")
    assert finding.outcome == "warning"
    assert "CACHE=DIR" in finding.advice


def test_file_instead_of_a_directory_is_a_failure(tmp_path):
    (tmp_path / "cache").write_text("")
    (finding,) = check_directory("cache", tmp_path / "cache" / "below", 1, "CACHE=DIR")
    assert finding.outcome == "failure"


def test_full_and_in_memory_disks_are_reported(tmp_path):
    with small_disk(tmp_path / "disk", 256) as disk:
        (empty,) = check_directory("cache", disk, 1, "CACHE=DIR")
        assert empty.outcome == "warning"
        assert "in memory" in empty.observation
        with (disk / "filler").open("wb", buffering=0) as filler:
            filler.write(bytes(256 * 1024))
        (full,) = check_directory("cache", disk, 1, "CACHE=DIR")
        assert full.outcome == "failure"
        assert "No space left" in full.observation


def test_findings_are_printed_as_lines_or_as_json():
    findings = [ok("a", "fine"), warning("b", "odd", "look at it")]
    lines: list[str] = []
    assert report_findings(findings, lines.append, as_json=False) == ExitCode.OK
    assert lines == ["ok       a: fine", "warning  b: odd; look at it"]
    lines.clear()
    findings.append(failure("c", "broken"))
    assert report_findings(findings, lines.append, as_json=True) == ExitCode.FAILED
    document = json.loads("".join(lines))
    assert not document["ok"]
    assert document["checks"][2] == {
        "check": "c",
        "outcome": "failure",
        "found": "broken",
        "advice": "",
    }


@pytest.mark.parametrize("outcome", ["ok", "warning", "failure"])
def test_each_finding_is_printed_at_once(outcome):
    lines: list[str] = []

    def findings():
        yield {"ok": ok("a", "x"), "warning": warning("a", "x", "y"), "failure": failure("a", "x")}[
            outcome
        ]
        assert len(lines) == 1

    report_findings(findings(), lines.append, as_json=False)
