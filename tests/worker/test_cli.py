"""The `worker` command in a separate process, as users see it."""

import os
import re
import subprocess
import sys

import pytest

from protocol import __version__
from protocol.base.errors import ExitCode
from tests import processes
from tests.cluster import PATIENCE_S, ROOT
from tests.commands import run_command

PRINT_IMPORTS = """
import atexit, sys
heavy = {"torch", "transformers"}
atexit.register(lambda: print("IMPORTED", *heavy & set(sys.modules)))
from worker.cli import main
main()
"""


def run_worker(*arguments, **environment):
    completed = processes.run_to_end("worker", *arguments, environment=environment)
    return completed.returncode, completed.stdout, completed.stderr


@pytest.mark.parametrize(
    ("argument", "code"),
    [("--help", 0), ("--version", 0), ("devices --help", 0), ("classify nowhere text", 2)],
)
def test_informational_commands_import_neither_torch_nor_transformers(argument, code):
    completed = subprocess.run(
        [sys.executable, "-c", PRINT_IMPORTS, *argument.split()], cwd=ROOT, capture_output=True,
        text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert completed.returncode == code
    assert completed.stdout.splitlines()[-1] == "IMPORTED"


def test_version_is_that_of_the_package():
    completed = run_command("worker", "--version")
    assert (completed.returncode, completed.stdout) == (0, f"samestep worker {__version__}\n")


def test_help_names_every_option():
    out = run_command("worker", "--help").stdout
    for option in ("--coordinator", "--backend", "--gpus", "--name", "--retry-for", "devices"):
        assert option in out


def test_devices_lists_each_device_with_its_reason():
    code, out, _ = run_worker("devices", CUDA_VISIBLE_DEVICES="")
    assert code == 0
    lines = out.splitlines()
    assert any(line.startswith("cuda 0: ") and ": not usable: " in line for line in lines)
    assert any(line.startswith("cpu 0: ") and line.endswith("usable") for line in lines)
    assert all(": usable" in line or ": not usable: " in line for line in lines if line[0] != " ")
    assert re.fullmatch(
        r"  fits with LoRA: a base of about \S+ billion parameters in float32, "
        r"\S+ in bfloat16 or float16, \S+ in int8, \S+ in int4 or nf4, \S+ in q8_0, \S+ in q4_0",
        lines[-1],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0,-"], "--gpus"),
        (["--gpus", "1,1"], "--gpus"),
        (["--coordinator", "no.where:"], "--coordinator"),
        (["--coordinator", "host:notaport"], "--coordinator"),
        (["--backend", "abacus"], "abacus"),
        (["--backend", "abacus0"], "abacus0"),
        (["--backend", "cuda0", "--gpus", "1"], "cuda0"),
        (["--no-such-option"], "--no-such-option"),
        (["--retry-for", "-1"], "retry-for"),
        (["--backend", "vulkan", "doctor"], "options of 'worker doctor' after it, got --backend"),
        (["--quiet", "devices"], "--quiet before it"),
        (["--backend", "cpu", "--gpus", "0,1", "some.py"], "worker --accept-scripts --gpus 0,1"),
        (["--trace", "trace.json", "some.py"], "--trace"),
    ],
)
def test_unusable_options_are_one_line_and_exit_2(arguments, message):
    completed = run_command("worker", *arguments)
    assert completed.returncode == 2
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr


def test_worker_without_a_coordinator_exits_with_69():
    code, out, err = run_worker("--coordinator", "127.0.0.1:9", "--retry-for", "0")
    assert code == 69
    assert "127.0.0.1:9" in out + err
    assert len(err.strip().splitlines()) == 1


def test_worker_option_after_the_script_is_reported(tmp_path):
    (tmp_path / "plain.py").write_text("")
    script = str(tmp_path / "plain.py")
    args = ("--retry-for", "0", script, "--lr", "1", "--coordinator=box:9000")
    # scripts may join from here on
    first, *_ = processes.run_to_end("worker", *args).stderr.splitlines()
    assert first.endswith(
        "put options of the worker before the script: worker --coordinator ... SCRIPT.py"
    )


def test_name_without_a_device_is_refused_before_the_search_for_a_coordinator():
    code, _, stderr = run_worker("--gpus", "0,no-such-card", "--coordinator", "127.0.0.1:1")
    assert code == ExitCode.UNREACHABLE
    assert "no-such-card was asked for, and is not there" in stderr
    assert "127.0.0.1:1" not in stderr


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("input()", "expected a script that does not read standard input, got 'reader.py'"),
        ("raise EOFError('truncated')", "the script 'reader.py' raised EOFError: truncated"),
    ],
)
def test_script_at_the_end_of_its_input_ends_with_one_line(tmp_path, statement, message):
    script = tmp_path / "reader.py"
    script.write_text(statement)
    completed = subprocess.run(
        [sys.executable, "-m", "worker", str(script)], cwd=ROOT, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert message in completed.stderr
    assert "Aborted" not in completed.stderr
    assert len(completed.stderr.splitlines()) == 1


def test_address_from_torchrun_variables():
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "SAMESTEP_COORDINATOR": ""}
    code, _, err = run_worker("--retry-for", "0", **environment)
    assert code == 69
    assert "127.0.0.1:9" in err


def test_torchrun_without_sharding_suggests_several_devices():
    code, _, err = run_worker("--retry-for", "0", TORCHELASTIC_RUN_ID="1", RANK="0", WORLD_SIZE="2")
    assert code == 2
    assert err.startswith("worker: expected --shard under torchrun, got none: ")
    assert "use several devices without torchrun: worker --gpus 0,1" in err


def test_uninstalled_checkout_runs_from_any_folder(tmp_path):
    for decoy in ("worker.py", "protocol.py"):
        (tmp_path / decoy).write_text("raise SystemExit('a file of the user ran')")
    begin = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from worker.cli import main; main()"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    completed = subprocess.run(
        [sys.executable, "-P", "-c", begin, "--gpus", "0,1", "--backend", "scripted",
         "--coordinator", "127.0.0.1:9", "--retry-for", "0"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )  # fmt: skip
    assert completed.returncode == 69
    assert "no coordinator at 127.0.0.1:9" in completed.stderr
    assert "a file of the user ran" not in completed.stderr
