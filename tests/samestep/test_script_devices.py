"""`fit` on several devices: each has a process that runs the script as far as that call."""

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
for each in (first, second):
    print("loss", len(each.history), "digest", each.digest, flush=True)
unseeded = nn.Linear(1, 1)
unseeded.bias.data += random.random() + np.random.rand()
third = samestep.fit(lambda: task(unseeded), steps=2, batch=8, device=sys.argv[1])
print("the third of", third.steps, "steps")
"""
)
SERVES = """
import os
from samestep.served_device import served_device
serves = served_device() is not None
"""


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_to_end("tests.plain_script", str(script), *arguments, cwd=script.parent)


@pytest.mark.slow
def test_two_devices_give_the_digests_of_one_in_every_fit_of_a_script(tmp_path):
    script = write_script(tmp_path, TWO_FITS)
    expected = digests(run(script, "cpu0").stdout)
    two = run(script, "cpu0-1")
    assert len(expected) == 2
    assert digests(two.stdout) == expected
    assert two.stdout.count("the script runs") == 1
    assert "the third of 2 steps" in two.stdout, "all processes draw the same without a seed"
    assert two.stdout.count("ready on 2 x ") == 3
    assert two.stderr == ""


def test_a_script_that_fails_in_the_process_of_a_device_is_told_with_its_line(tmp_path):
    fails = "if serves:\n    raise ValueError('only the first of us may')\n"
    fit = "samestep.fit(task, steps=6, batch=8, device='cpu0-1')\n"
    done = run(write_script(tmp_path, HEAD + SERVES + fails + fit))
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "to reach call 1 of fit in the process of cpu" in last
    assert "ValueError: only the first of us may in train.py, line 21" in last


@pytest.mark.slow
def test_fit_continues_without_a_device_that_cannot_build_the_task(tmp_path):
    fails_once = """
def build():
    if serves:
        try:
            open("failed", "x").close()
        except FileExistsError:
            pass
        else:
            raise RuntimeError("no room for the model")
    return task()
samestep.fit(build, steps=6, batch=8, device="cpu0-1")
"""
    done = run(write_script(tmp_path, HEAD + SERVES + fails_once))
    assert done.returncode == 0, done.stderr
    assert "is left out of the run: build raised RuntimeError: no room for the model" in done.stdout
    assert "finished: 6 of 6 steps" in done.stdout


@pytest.mark.slow
def test_a_device_whose_process_is_killed_gets_another_and_the_digest_is_the_same(tmp_path):
    dies = """
calls = []
def loss(module, batch):
    calls.append(None)
    if serves and len(calls) == 60 and not os.path.exists("dead"):
        open("dead", "x").close()
        os.kill(os.getpid(), 9)
    return ((module(batch[0]) - batch[1]) ** 2).sum()
torch.manual_seed(0)
one = samestep.Task(module=nn.Linear(1, 1), train=TensorDataset(x, 2 * x), loss=loss)
r = samestep.fit(lambda: one, steps=60, batch=8, device=sys.argv[1])
print("loss", 0, "digest", r.digest)
"""
    script = write_script(tmp_path, HEAD + SERVES + dies)
    expected = digests(run(script, "cpu0").stdout)
    assert len(expected) == 1
    assert not (tmp_path / "dead").exists()
    two = run(script, "cpu0-1")
    assert (tmp_path / "dead").exists(), two.stderr
    assert digests(two.stdout) == expected


def test_a_process_that_still_runs_the_script_ends_with_the_one_that_wants_it(tmp_path):
    waits = """
if serves:
    with open("pids", "a") as file:
        print(os.getpid(), file=file, flush=True)
    import threading
    threading.Event().wait()
samestep.fit(task, steps=6, batch=8, device='cpu0-1')
"""
    script = write_script(tmp_path, HEAD + SERVES + waits)
    process = start("tests.plain_script", str(script), cwd=tmp_path)
    pids = tmp_path / "pids"
    while not pids.exists() or pids.read_text().count("\n") < 2:
        time.sleep(0.05)
    descriptors = [os.pidfd_open(int(pid)) for pid in pids.read_text().split()]
    process.kill()
    process.wait()
    for each in descriptors:
        assert select.select([each], [], [], 60)[0]
        os.close(each)
    close(process)


def test_what_a_script_and_its_build_print_is_shown_as_with_one_device(tmp_path):
    prints = """
print("script to stdout")
print("script to stderr", file=sys.stderr)
os.system("echo a command >&2")
def build():
    print("build to stderr", file=sys.stderr)
    return task()
samestep.fit(build, steps=2, batch=8, device="cpu0-1")
"""
    done = run(write_script(tmp_path, HEAD + SERVES + prints))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("script to stdout") == 1
    assert done.stderr.count("script to stderr") == 1
    assert done.stderr.count("a command") == 1
    assert done.stderr.count("build to stderr") == 1


def test_output_of_a_process_that_dies_before_fit_is_shown_whole(tmp_path):
    dies = """
print("some progress")
if serves:
    print("the last words", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(3)
samestep.fit(task, steps=2, batch=8, device="cpu0-1")
"""
    done = run(write_script(tmp_path, HEAD + SERVES + dies))
    assert done.returncode != 0
    for device in ("cpu0", "cpu1"):
        assert f"samestep: output of the script in the process of {device}:" in done.stderr
    assert "the last words\nsome progress\n" in done.stderr
    assert "has ended with exit code 3" in done.stdout


BLOCKS = """
from protocol.base import limits
from samestep import script_devices
limits.SCRIPT_TIMEOUT_S, limits.SCRIPT_REPORT_INTERVAL_S = 20.0, 3.0
script_devices._TIMES_SLOWER = 0
if serves and str(served_device().device) in sys.argv[1:]:
    print("waiting for a lock", file=sys.stderr, flush=True)
    import threading
    threading.Event().wait()
samestep.fit(task, steps=6, batch=8, device="cpu0-1")
"""


@pytest.mark.parametrize("blocked", [("1",), pytest.param(("0", "1"), marks=pytest.mark.slow)])
def test_a_device_whose_script_does_not_reach_fit_is_named(tmp_path, blocked):
    done = run(write_script(tmp_path, HEAD + SERVES + BLOCKS), *blocked)
    assert done.returncode != 0
    after_s = r"the script has not reached call 1 of fit after [3-5] s in the process of cpu1"
    assert re.search(after_s, done.stderr)
    assert "waiting for a lock" in done.stderr
    assert re.search(
        r"'cpu\d' is not usable here: the script has not reached call 1 of fit after \d+ s in "
        r"this device's process.*"
        "it must not wait there for input",
        done.stderr.splitlines()[-1],
    )


def test_a_notebook_is_told_to_become_a_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    cell: dict[str, Any] = {}
    exec(HEAD, cell)
    with pytest.raises(
        UsageError, match="got a notebook: write the model to a script, or name one device"
    ):
        samestep.fit(cell["task"], steps=6, batch=8, device="cpu0-1")
