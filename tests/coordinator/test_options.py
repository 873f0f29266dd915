"""The printed command line parses back to the same options."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import coordinator.main as coordinator_main
from coordinator.cli import app
from coordinator.options import CoordinatorOptions, resume_command


@pytest.mark.parametrize(
    "changes",
    [
        "--local-workers 2 --backend cpu",
        "--expect-workers 2 --bind 0.0.0.0:9000 --name box",
        "--expect-workers 2 --no-announce",
        "--expect-workers 3 --bind 0.0.0.0:9100 --control 127.0.0.1:9101 --plaintext",
        "--local-workers 2 --gpus 0,1 --expect-workers 4 --bind [::1]:9000",
    ],
)
def test_printed_line_parses_to_the_same_options(changes, monkeypatch):
    calls: list[CoordinatorOptions] = []

    def record_options(options: CoordinatorOptions) -> int:
        calls.append(options)
        return 0

    monkeypatch.setattr(coordinator_main, "main", record_options)
    assert CliRunner().invoke(app, shlex.split(f"{changes} -o 'a dir'")).exit_code == 0
    line = resume_command(calls[0], calls[0].bind, Path("a dir"), control=calls[0].control)
    arguments = shlex.split(line)
    assert arguments[:4] == ["coordinator", "--resume", "--out", "a dir"]
    assert CliRunner().invoke(app, arguments[1:]).exit_code == 0
    for name in ("name", "bind", "control", "plaintext", "expect_workers", "out", "local_workers",
                 "local_devices"):  # fmt: skip
        assert getattr(calls[1], name) == getattr(calls[0], name), name
    assert not calls[0].local_workers or calls[1].local_backend == calls[0].local_backend
