"""Scripts that call `fit`: alone, with joined workers, interrupted, edited, and with two calls."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from protocol.base.errors import DataError, ExitCode, ScriptMissing
from protocol.spec.run_spec import parse_run_spec
from samestep.script import FitTask, Script
from tests.processes import ROOT, run_to_end
from tests.samestep.scripts import HEAD, RunningScript, close, standard_error_of
from tests.samestep.specs import SPEC

EXAMPLE = ROOT / "docs" / "examples" / "sine.py"


def digests(output: str) -> list[str]:
    return re.findall(r"^loss \S+ digest (\w{64})$", output, re.MULTILINE)


def write_script(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(text)
    return path


def test_first_example_has_one_digest_with_one_worker_and_with_a_killed_worker(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) <= 20
    assert EXAMPLE.read_text() in (ROOT / "README.md").read_text()
    single_script = RunningScript(write_script(tmp_path, EXAMPLE.read_text()))
    expected = digests(single_script.wait_for_success())
    assert len(expected) == 1

    script_of_two = RunningScript(
        write_script(tmp_path, EXAMPLE.read_text().replace("batch=64", "batch=64, workers=2"))
    )
    hold, second = script_of_two.start_paused_worker("second", 3)
    hold.wait_until_paused()
    second.kill()
    output = script_of_two.wait_for_success()
    assert digests(output) == expected
    assert "worker second left" in output
    hold.close()
    second.wait()
    close(second)


def test_worker_joins_with_the_same_script_or_with_accept_scripts(tmp_path):
    fit = "r = samestep.fit(task, steps=3, batch=8, workers=2)\n"
    fit += "print('loss', 0, 'digest', r.digest)\n"
    script = write_script(tmp_path, HEAD + fit)
    running_script = RunningScript(script)

    other_directory = tmp_path / "elsewhere"
    other_directory.mkdir()
    other_script = write_script(other_directory, HEAD + fit.replace("=3", "=4"))
    different_worker = running_script.start_worker("different", str(other_script))
    assert different_worker.wait(300) == ExitCode.MISMATCH
    assert "'train.py'" in standard_error_of(different_worker)
    plain_worker = running_script.start_worker("plain")
    assert "worker train.py" in running_script.wait_for("plain cannot take part")
    accepting_worker = running_script.start_worker("accepting", "--accept-scripts")
    output = running_script.wait_for_success()
    assert "accepting" in output
    assert len(digests(output)) == 1
    assert [accepting_worker.wait(300), plain_worker.wait(300)] == [0, 0]
    close(different_worker, accepting_worker, plain_worker)


@pytest.mark.slow
def test_two_fits_in_one_script_are_two_runs_for_all_workers(tmp_path):
    script = write_script(
        tmp_path,
        HEAD
        + """
schedule_free = {"name": "schedule-free", "lr": 0.1}
first = samestep.fit(task, steps=3, batch=8, workers=2, optimizer=schedule_free)
second = samestep.fit(lambda: task(first.module), steps=2, batch=8, workers=2)
for result in (first, second):
    print("loss", len(result.history), "digest", result.digest, flush=True)
""",
    )
    running_script = RunningScript(script)
    second_worker = running_script.start_script_worker("second")
    # The second run uses the port of the first, where a worker looks for it.
    output = running_script.wait_for_success()
    worker_output = second_worker.communicate(timeout=300)[0]
    assert len(digests(output)) == 2
    assert digests(worker_output) == digests(output)


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_drain_has_the_same_result_in_the_script_and_in_a_joined_worker(tmp_path, signal_number):
    fit = "r = samestep.fit(task, steps=1_000_000, batch=8, workers=2)\n"
    fit += "print('outcome', r.outcome, r.steps, r.joined, r.digest, flush=True)\n"
    running_script = RunningScript(write_script(tmp_path, HEAD + fit))
    second_worker = running_script.start_script_worker("second")
    running_script.wait_for("step ")
    running_script.process.send_signal(signal_number)
    outcome = re.search(
        r"^outcome drained (\d+) False (\w{64})$", running_script.wait_for_success(), re.MULTILINE
    )
    worker_output = second_worker.communicate(timeout=300)[0]
    worker_outcome = re.search(
        r"^outcome drained (\d+) True (\w{64})$", worker_output, re.MULTILINE
    )
    assert outcome is not None
    assert worker_outcome is not None
    assert outcome.groups() == worker_outcome.groups()


@pytest.mark.slow
def test_second_interrupt_ends_at_once_and_prints_how_to_continue(tmp_path):
    slow_head = HEAD.replace("lambda module, batch: ", "lambda module, batch: time.sleep(0.2) or ")
    fit = "samestep.fit(task, steps=1000, batch=8, microbatch=1, directory='here')\n"
    running_script = RunningScript(write_script(tmp_path, "import time\n" + slow_head + fit))
    running_script.wait_for("step 1/")  # then the state of step 0 is stored
    running_script.process.send_signal(signal.SIGINT)
    running_script.wait_for("drain")
    running_script.process.send_signal(signal.SIGINT)
    assert running_script.process.wait(60) == 130
    last = standard_error_of(running_script.process).splitlines()[-1]
    assert last.startswith("samestep: interrupted; ended at once; resume from the checkpoint: fit(")
    close(running_script.process)


@pytest.mark.slow
def test_second_interrupt_ends_at_once_although_the_coordinator_is_stopped(tmp_path):
    fit = "samestep.fit(task, steps=1000000, batch=8, directory='here')\n"
    running_script = RunningScript(write_script(tmp_path, HEAD + fit))
    running_script.wait_for("step 1/")
    pid = running_script.process.pid
    (coordinator,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    os.kill(coordinator, signal.SIGSTOP)
    for _ in range(2):
        running_script.process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # the kernel merges equal signals that are pending
    assert running_script.process.wait(60) == 130
    close(running_script.process)


RESUMABLE = """
from pathlib import Path
sys.path.insert(0, str(Path.cwd()))
import part
options = dict(directory="run", resume=Path("run").exists() and how)
def stop(row):
    if row["step"] == 6 and not options["resume"]:
        raise KeyError("stop")
r = samestep.fit(task, steps=12, batch=8, on_log=stop, **options)
print("loss", 0, "digest", r.digest)
"""
"""The end of a script whose first start stops at step 6; the next one resumes with `how`."""


@pytest.mark.slow
def test_edited_script_resumes_its_run_only_if_the_code_is_the_same(tmp_path):
    (tmp_path / "part.py").write_text("value = 1\n")

    def run(head: str, directory: str = "run") -> subprocess.CompletedProcess[str]:
        text = head + HEAD + RESUMABLE.replace('"run"', repr(directory))
        return run_to_end("tests.plain_script", str(write_script(tmp_path, text)), cwd=tmp_path)

    uninterrupted = run("how = True\n", "whole").stderr
    assert "KeyError: 'stop'" in uninterrupted
    expected = digests(run("how = True\n", "whole").stdout)
    assert len(expected) == 1

    assert "KeyError: 'stop'" in run("how = True\n").stderr
    copy = tmp_path / "run" / "script" / "train.py"
    refusal = run("how = True\nprint('more')\n")
    line = refusal.stderr.splitlines()[-1]
    assert "got one that was edited: line 2 is now \"print('more')\"; restore it with" in line
    assert f'cp {copy} {tmp_path / "train.py"}, write resume="edited" if nothing' in line
    commented = run("how = True  # a comment changes no code\n")
    assert digests(commented.stdout) == expected, commented.stderr
    assert "continues with the edited script, whose code is the same" in commented.stdout


@pytest.mark.slow
def test_moved_run_resumes_with_its_copy_of_the_script(tmp_path):
    homes = [tmp_path / name for name in ("first", "second")]
    for home in homes:
        home.mkdir()
        (home / "part.py").write_text("value = 1\n")
        script = write_script(home, "how = True\n" + HEAD + RESUMABLE)
        assert "KeyError: 'stop'" in run_to_end("tests.plain_script", str(script), cwd=home).stderr
    expected = digests(run_to_end("tests.plain_script", str(script), cwd=home).stdout)
    assert len(expected) == 1

    moved = homes[0].rename(tmp_path / "moved")
    copy = moved / "run" / "script" / "train.py"
    shutil.copy(copy, tmp_path / "copy.py")
    copy.write_text("# another script\n")
    refusal = run_to_end("tests.plain_script", str(moved / "train.py"), cwd=moved).stderr
    assert "or in 'run/script', got no such file: put the script back" in refusal
    shutil.copy(tmp_path / "copy.py", copy)
    resumed = run_to_end("tests.plain_script", str(moved / "train.py"), cwd=moved)
    assert digests(resumed.stdout) == expected, resumed.stderr


@pytest.mark.slow
def test_resuming_with_an_edited_script_is_exact_only_if_gradients_are_unchanged(tmp_path):
    (tmp_path / "part.py").write_text("value = 1\n")

    def run(head: str, *, loss: str = "** 2") -> subprocess.CompletedProcess[str]:
        text = head + HEAD.replace("** 2", loss) + RESUMABLE
        return run_to_end("tests.plain_script", str(write_script(tmp_path, text)), cwd=tmp_path)

    assert "KeyError: 'stop'" in run("how = True\n").stderr
    shutil.copytree(tmp_path / "run", tmp_path / "run-before")
    (tmp_path / "part.py").write_text("value = 2\n")
    refusal = run("how = True\n").stderr.splitlines()[-1]
    assert "expected the modules beside the script that the run in 'run' began with" in refusal
    assert refusal.endswith(
        'write resume="edited" if nothing that is trained changes, or use another directory'
    )
    unchanged = run("# a comment\nhow = 'edited'\nprint('more')\n")
    (line,) = unchanged.stderr.splitlines()
    assert (
        "an edit of its script: line 1 was 'how = True', is \"how = 'edited'\", and of the " in line
    )
    assert "modules beside its script; that it changes nothing that is trained is your word" in line
    assert "(exact: " in unchanged.stdout

    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run-before").rename(tmp_path / "run")
    changed = run("how = 'edited'\n", loss="** 4")
    assert "(mixed: " in changed.stdout, changed.stderr
    message = r"samestep: from step \d+ on, the gradients are not computed as before"
    assert re.search(message, changed.stderr)


def submitted_task(script: Script, call: int) -> dict[str, Any]:
    """Return the run spec of a call of `fit` in a script that the coordinator sends."""
    return {
        **SPEC.model_dump(mode="json", exclude_defaults=True),
        "options": {
            "script": {"name": script.name, "digest": script.digest, "call": call},
        },
        "data": {"train": str(script.path)},
    }  # fmt: skip


def test_submitted_script_that_exits_before_its_fit_is_reported(tmp_path, monkeypatch):
    script = Script.at(write_script(tmp_path, "import sys\nsys.exit(0)\n"))
    monkeypatch.setattr("samestep.script.accepts_scripts", lambda: True)
    with pytest.raises(DataError, match=r"in the script 'train\.py', which ended without one"):
        FitTask(parse_run_spec(submitted_task(script, 1)))


@pytest.mark.parametrize(
    ("text", "call", "message"),
    [
        ("raise AssertionError\n", 2, r"expected the first fit of .*, got its fit number 2"),
        ("import absent_module\n", 1, r"got none named 'absent_module': install it here"),
    ],
)
def test_only_this_worker_refuses_a_submitted_script(tmp_path, monkeypatch, text, call, message):
    script = Script.at(write_script(tmp_path, text))
    monkeypatch.setattr("samestep.script.accepts_scripts", lambda: True)
    with pytest.raises(ScriptMissing, match=message):
        FitTask(parse_run_spec(submitted_task(script, call)))


READS_ENVIRONMENT = """
import os
STRENGTH = float(os.environ.get("SAMESTEP_STRENGTH", "1"))
def loss(module, batch):
    power = float(os.environ.get("SAMESTEP_POWER", "2"))
    return STRENGTH * ((module(batch[0]) - batch[1]).abs() ** power).sum()
def strong():
    return samestep.Task(module=nn.Linear(1, 1), train=TensorDataset(x, 2 * x), loss=loss)
def stop(row):
    if "SAMESTEP_STOP" in os.environ and row["step"] == 2:
        raise KeyError("stop")
r = samestep.fit(
    strong, steps=4, batch=8, directory="run", workers=int(os.environ.get("SAMESTEP_WORKERS", 1)),
    on_log=stop,
    resume={"yes": True, "edited": "edited"}.get(os.environ.get("SAMESTEP_RESUME"), False),
)
print("loss", 0, "digest", r.digest)
"""


def test_worker_whose_environment_changes_the_loss_is_refused(tmp_path):
    script = write_script(tmp_path, HEAD + READS_ENVIRONMENT)
    running_script = RunningScript(script, {"SAMESTEP_WORKERS": "2"})
    constant_worker = running_script.start_script_worker("constant", {"SAMESTEP_STRENGTH": "3"})
    assert constant_worker.wait(300) == ExitCode.MISMATCH
    assert (
        "expected STRENGTH = 1 as on the run's first worker, got 3: the script reads it"
    ) in standard_error_of(constant_worker)
    loss_worker = running_script.start_script_worker("loss", {"SAMESTEP_POWER": "4"})
    assert loss_worker.wait(300) == ExitCode.MISMATCH
    assert "for the first samples as on the run's first worker, got" in standard_error_of(
        loss_worker
    )
    equal_worker = running_script.start_script_worker("equal")
    assert len(digests(running_script.wait_for_success())) == 1
    assert equal_worker.wait(300) == 0
    close(constant_worker, loss_worker, equal_worker)


@pytest.mark.slow
def test_resumed_script_must_read_the_constants_of_the_run(tmp_path):
    script = str(write_script(tmp_path, HEAD + READS_ENVIRONMENT))

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return run_to_end("tests.plain_script", script, cwd=tmp_path, environment=environment)

    assert "KeyError: 'stop'" in run(SAMESTEP_STOP="1").stderr
    refusal = run(SAMESTEP_RESUME="yes", SAMESTEP_STRENGTH="3").stderr.splitlines()[-1]
    assert "resume: expected STRENGTH = 1 as when the run in 'run' started, got 3" in refusal
    assert refusal.endswith('write resume="edited" if you mean to change it')
    assert "for the first samples" in run(SAMESTEP_RESUME="yes", SAMESTEP_POWER="4").stderr
    changed = run(SAMESTEP_RESUME="edited", SAMESTEP_STRENGTH="3")
    assert len(digests(changed.stdout)) == 1, changed.stderr
    assert "continues with an edit of STRENGTH (1, now 3); that it changes" in changed.stderr
    assert "the gradients are not computed as before" in changed.stderr
