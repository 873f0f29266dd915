"""`fit` on several devices: each device has a process that runs the script up to that call."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import samestep
from protocol.base.errors import UsageError
from tests.processes import run_to_end, start
from tests.samestep.scripts import HEAD, close
from tests.samestep.test_scripts import digests, write_script

TWO_FITS = (
    HEAD
    + """
import random
import numpy as np
print("the script runs", flush=True)
first = samestep.fit(task, steps=6, batch=8, device=sys.argv[1])
second = samestep.fit(lambda: task(first.module), steps=4, batch=8, device=sys.argv[1])
for result in (first, second):
    print("loss", len(result.history), "digest", result.digest, flush=True)
unseeded = nn.Linear(1, 1)
unseeded.bias.data += random.random() + np.random.rand()
third = samestep.fit(lambda: task(unseeded), steps=2, batch=8, device=sys.argv[1])
print("the third of", third.steps, "steps")
"""
)
DETECT_DEVICE_PROCESS = """
import os
from samestep.served_device import served_device
is_device_process = served_device() is not None
"""
"""Script code that finds out whether this process serves a device of `fit`."""


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_to_end("tests.plain_script", str(script), *arguments, cwd=script.parent)


@pytest.mark.slow
def test_each_fit_of_a_script_has_the_same_digest_on_one_and_two_devices(tmp_path):
    script = write_script(tmp_path, TWO_FITS)
    expected = digests(run(script, "cpu0").stdout)
    completed = run(script, "cpu0-1")
    assert len(expected) == 2
    assert digests(completed.stdout) == expected
    assert completed.stdout.count("the script runs") == 1
    assert "the third of 2 steps" in completed.stdout, "without a seed, all processes draw alike"
    assert completed.stdout.count("ready on 2 x ") == 3
    assert completed.stderr == ""


def test_error_of_the_script_in_a_device_process_is_reported_with_its_line(tmp_path):
    raise_error = "if is_device_process:\n    raise ValueError('only the main process may')\n"
    fit = "samestep.fit(task, steps=6, batch=8, device='cpu0-1')\n"
    completed = run(write_script(tmp_path, HEAD + DETECT_DEVICE_PROCESS + raise_error + fit))
    assert completed.returncode != 0
    last_line = completed.stderr.splitlines()[-1]
    assert "to reach call 1 of fit in the process of cpu" in last_line
    assert "ValueError: only the main process may in train.py, line 21" in last_line


@pytest.mark.slow
def test_fit_continues_without_a_device_that_cannot_build_the_task(tmp_path):
    fail_once = """
def build():
    if is_device_process:
        try:
            open("failed", "x").close()
        except FileExistsError:
            pass
        else:
            raise RuntimeError("no room for the model")
    return task()
samestep.fit(build, steps=6, batch=8, device="cpu0-1")
"""
    completed = run(write_script(tmp_path, HEAD + DETECT_DEVICE_PROCESS + fail_once))
    assert completed.returncode == 0, completed.stderr
    assert (
        "is left out of the run: build raised RuntimeError: no room for the model"
        in completed.stdout
    )
    assert "finished: 6 of 6 steps" in completed.stdout


@pytest.mark.slow
def test_killed_process_of_a_device_is_replaced_and_the_digest_is_the_same(tmp_path):
    kill_once = """
calls = []
def loss(module, batch):
    calls.append(None)
    if is_device_process and len(calls) == 60 and not os.path.exists("dead"):
        open("dead", "x").close()
        os.kill(os.getpid(), 9)
    return ((module(batch[0]) - batch[1]) ** 2).sum()
torch.manual_seed(0)
killing_task = samestep.Task(module=nn.Linear(1, 1), train=TensorDataset(x, 2 * x), loss=loss)
r = samestep.fit(lambda: killing_task, steps=60, batch=8, device=sys.argv[1])
print("loss", 0, "digest", r.digest)
"""
    script = write_script(tmp_path, HEAD + DETECT_DEVICE_PROCESS + kill_once)
    expected = digests(run(script, "cpu0").stdout)
    assert len(expected) == 1
    assert not (tmp_path / "dead").exists()
    completed = run(script, "cpu0-1")
    assert (tmp_path / "dead").exists(), completed.stderr
    assert digests(completed.stdout) == expected


def test_device_processes_that_still_run_the_script_end_with_the_main_process(tmp_path):
    wait_forever = """
if is_device_process:
    with open("pids", "a") as file:
        print(os.getpid(), file=file, flush=True)
    import threading
    threading.Event().wait()
samestep.fit(task, steps=6, batch=8, device='cpu0-1')
"""
    script = write_script(tmp_path, HEAD + DETECT_DEVICE_PROCESS + wait_forever)
    process = start("tests.plain_script", str(script), cwd=tmp_path)
    pids = tmp_path / "pids"
    while not pids.exists() or pids.read_text().count("\n") < 2:
        time.sleep(0.05)
    descriptors = [os.pidfd_open(int(pid)) for pid in pids.read_text().split()]
    process.kill()
    process.wait()
    for descriptor in descriptors:  # readable once the process has ended
        assert select.select([descriptor], [], [], 60)[0]
        os.close(descriptor)
    close(process)


def test_output_of_a_script_and_its_build_is_shown_once(tmp_path):
    print_lines = """
print("script to stdout")
print("script to stderr", file=sys.stderr)
os.system("echo a command >&2")
def build():
    print("build to stderr", file=sys.stderr)
    return task()
samestep.fit(build, steps=2, batch=8, device="cpu0-1")
"""
    completed = run(write_script(tmp_path, HEAD + DETECT_DEVICE_PROCESS + print_lines))
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("script to stdout") == 1
    assert completed.stderr.count("script to stderr") == 1
    assert completed.stderr.count("a command") == 1
    assert completed.stderr.count("build to stderr") == 1


def test_whole_output_of_a_process_that_exits_before_fit_is_shown(tmp_path):
    exit_early = """
print("some progress")
if is_device_process:
    print("the last words", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(3)
samestep.fit(task, steps=2, batch=8, device="cpu0-1")
"""
    completed = run(write_script(tmp_path, HEAD + DETECT_DEVICE_PROCESS + exit_early))
    assert completed.returncode != 0
    for device in ("cpu0", "cpu1"):
        assert f"samestep: output of the script in the process of {device}:" in completed.stderr
    assert "the last words\nsome progress\n" in completed.stderr
    assert "has ended with exit code 3" in completed.stdout


BLOCKING_SCRIPT = """
from protocol.base import limits
from samestep import script_devices
limits.SCRIPT_TIMEOUT_S, limits.SCRIPT_REPORT_INTERVAL_S = 20.0, 3.0
script_devices._TIMES_SLOWER = 0
if is_device_process and str(served_device().device) in sys.argv[1:]:
    print("waiting for a lock", file=sys.stderr, flush=True)
    import threading
    threading.Event().wait()
samestep.fit(task, steps=6, batch=8, device="cpu0-1")
"""


@pytest.mark.parametrize("blocked", [("1",), pytest.param(("0", "1"), marks=pytest.mark.slow)])
def test_a_device_whose_script_does_not_reach_fit_is_named(tmp_path, blocked):
    completed = run(
        write_script(tmp_path, HEAD + DETECT_DEVICE_PROCESS + BLOCKING_SCRIPT), *blocked
    )
    assert completed.returncode != 0
    warning = r"the script has not reached call 1 of fit after [3-5] s in the process of cpu1"
    assert re.search(warning, completed.stderr)
    assert "waiting for a lock" in completed.stderr
    assert re.search(
        r"'cpu\d' is not usable here: the script has not reached call 1 of fit after \d+ s in "
        r"this device's process.*"
        "it must not wait there for input",
        completed.stderr.splitlines()[-1],
    )


def test_notebook_with_several_devices_is_refused_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    cell: dict[str, Any] = {}
    exec(HEAD, cell)
    with pytest.raises(
        UsageError, match="got a notebook: write the model to a script, or name one device"
    ):
        samestep.fit(cell["task"], steps=6, batch=8, device="cpu0-1")
