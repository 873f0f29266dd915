"""Run the commands of the documentation and check their effects.

Commands that need cards (`--gpus`, Vulkan) are only parsed, by `test_docs`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import ROOT, Cluster
from tests.processes import run_to_end
from tests.test_docs import PAGES, commands_in, files_of_page, with_options, without_options

pytestmark = pytest.mark.slow

LOOPBACK = ("--bind", "127.0.0.1:0", "--control", "127.0.0.1:0", "--no-announce")
LOCAL_WORKERS = (
    *LOOPBACK,
    "--expect-workers",
    "2",
    "--local-workers",
    "2",
    "--backend",
    "scripted:1",
)
RUN = """
task: scripted
steps: 60
batch: {samples: 8, microbatch: 1}
scripted: {blocks: 2, block_bytes: 64, samples: 64}
checkpoint: {every: 20, keep_last: 100}
"""
NEEDS_CARDS = re.compile(r"--gpus|vulkan")
TESTED_ELSEWHERE = re.compile(
    r"sine|reviews|classify|curve|spam-1/adapter|teacher|student|--from (COPIES|tower)|logits"
    r"|replicas|--track|coordinator track|worker (data|merge|export|generate)"
)
"""Commands of the tutorial, which separate tests below run, and commands that other files test."""
ADDRESS = re.compile(r"(0\.0\.0\.0|127\.0\.0\.1|192\.168\.1\.20|HOST):(9000|PORT)")


def normalize(line: str) -> str:
    """Return the line with equivalent values replaced by one placeholder."""
    line = ADDRESS.sub("ADDRESS", line).replace("127.0.0.1:9001", "CONTROL")
    line = re.sub(r"runs/sms-spam-1|/var/lib/samestep-coordinator/runs", "DIR", line)
    line = re.sub(r"(?<=coordinator audit) run\b|(?<=coordinator report) run\b", " DIR", line)
    line = re.sub(r"/etc/credstore/samestep.join.token|(?<=--token-file )FILE", "TOKEN", line)
    return line.replace("deploy/runs/sms-spam.yaml", "RUN.yaml")


def commands_to_run() -> list[str]:
    """Return every command of the pages once, with and without its optional parts."""
    lines = (line for page in PAGES for line in commands_in(page))
    variants = (normalize(form(line)) for line in lines for form in (without_options, with_options))
    commands = (
        re.sub(r" --gpus \S+", "", line) if line.startswith("worker --co") else line
        for line in variants
    )
    return [
        line for line in dict.fromkeys(commands)
        if not NEEDS_CARDS.search(line) and not TESTED_ELSEWHERE.search(line)
    ]  # fmt: skip


class PageCommands:
    """The commands of the pages, each to run once, with values for its placeholders."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.remaining = commands_to_run()
        self.values = {
            "RUN.yaml": str(directory / "RUN.yaml"), "DIR": str(directory / "DIR"),
            "FILE": str(directory / "report.html"), "TOKEN": str(directory / "join.token"),
            "NAME": "here", "N": "0", "S": "60", "KEY=VALUE": "seed=1", "CONTROL": "127.0.0.1:0",
            "ADDRESS": "127.0.0.1:0",
        }  # fmt: skip
        (directory / "RUN.yaml").write_text(RUN)

    def take_matching(self, pattern: str) -> Iterator[list[str]]:
        """Yield the arguments of all remaining commands that match, and mark them as run."""
        candidates = [line for line in self.remaining if re.fullmatch(pattern, line)]
        assert candidates, f"no page has {pattern!r}"
        for line in candidates:
            self.remaining.remove(line)
            yield [self.values.get(word, word) for word in shlex.split(line)]

    def run(self, pattern: str, *extra_arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run the matching commands to their end and return the last one's output."""
        output = ""
        for program, *words in self.take_matching(pattern):
            completed = run_to_end(program, *words, *extra_arguments, cwd=self.directory)
            assert completed.returncode in codes, (words, completed.stdout + completed.stderr)
            assert "Traceback" not in completed.stderr
            output = completed.stdout
        return output


def test_every_command_of_the_pages_runs(tmp_path, monkeypatch):
    commands = PageCommands(tmp_path)
    run_and_resume(commands)
    [*_] = commands.take_matching(
        r"coordinator --expect-workers 2( --bind .*--out DIR --name here| --bind .*NAME)?"
    )
    with Cluster(tmp_path / "served", "--expect-workers", "2", "--name", "here") as cluster:
        monkeypatch.setenv("SAMESTEP_CONTROL", cluster.address["control"])
        monkeypatch.setenv("SAMESTEP_COORDINATOR", cluster.address["data"])
        commands.values |= {"ADDRESS": cluster.address["data"], "NAME": "w0"}
        control_a_coordinator(commands, cluster)
        assert cluster.wait_for_exit(cluster.coordinator) == 0
    assert commands.remaining == []


def run_and_resume(commands: PageCommands) -> None:
    """Start a run from the command line; then resume and inspect it."""
    commands.run(r"coordinator --expect-workers \d .*--run RUN.yaml.*", *LOCAL_WORKERS)
    commands.run(r"coordinator --run RUN.yaml --out DIR --resume", *LOCAL_WORKERS)
    assert "has finished" in commands.run(r"coordinator --out DIR --resume", *LOOPBACK)
    replay_output = commands.run(r"coordinator --out DIR --resume --from-step \S+", *LOCAL_WORKERS)
    assert "60 of 60 steps" in replay_output
    commands.values |= {"steps=N": "steps=62", "steps=400": "steps=64"}
    assert "62 of 62 steps" in commands.run(
        r"coordinator --out DIR --resume --set steps=N", *LOCAL_WORKERS
    )
    commands.run(r"coordinator --out DIR --resume --set steps=400", *LOCAL_WORKERS)
    commands.values["steps=400"] = "steps=66"
    commands.run(r"coordinator --out DIR --resume --set steps=400 --set .*", *LOCAL_WORKERS)
    assert "sound" in commands.run(r"coordinator audit DIR")
    commands.run(r"coordinator report DIR.*")
    assert "<h1>Run" in (commands.directory / "report.html").read_text()
    assert "optimizer" in commands.run(r"coordinator schema")
    commands.run(r"worker devices( --json)?")
    commands.run(r"coordinator doctor.*", codes=(0, 1))


def control_a_coordinator(commands: PageCommands, cluster: Cluster) -> None:
    """Run the commands for a coordinator that is running, in an order in which all succeed."""
    token = commands.run(r"coordinator token show")
    (commands.directory / "join.token").touch(mode=0o600)
    (commands.directory / "join.token").write_text(token)
    commands.run(r"worker doctor.*", codes=(0, 1))
    for number, (_, *words) in enumerate(
        commands.take_matching(r"worker( --duty evaluate)?( --coordinator .*)?")
    ):
        cluster.start_worker(
            f"w{number}", *words, "--backend", "scripted:20", "--name", f"w{number}"
        )
        cluster.wait_for("worker_connected", worker=f"w{number}")
    first = commands.run(r"coordinator submit RUN.yaml --set .*", "--set", "steps=100000").strip()
    cluster.wait_for("committed")
    assert '"phase": "training"' in commands.run(r"coordinator status --json")
    assert "samples/s" in commands.run(r"coordinator status")
    second = commands.run(r"coordinator submit RUN.yaml").strip()
    commands.run(r"coordinator checkpoint")
    halt_and_continue(commands, cluster)
    give_up_and_resume(commands, cluster, first, second)
    commands.run(r"coordinator token (workers|control|reader)")
    commands.run(r"coordinator token revoke .*")
    cluster.wait_for("worker_disconnected", worker="w0")
    commands.run(r"coordinator token rotate")
    commands.run(r"coordinator drain")


def halt_and_continue(commands: PageCommands, cluster: Cluster) -> None:
    commands.run(r"coordinator halt")
    cluster.wait_for("halted")
    commands.run(r"coordinator continue")
    cluster.wait_for("continued")
    assert run_to_end("coordinator", "halt").returncode == 0
    cluster.wait_for("halted", nth=2)
    commands.run(r"coordinator continue --skip-step")
    cluster.wait_for("committed", skipped=True)


def give_up_and_resume(commands: PageCommands, cluster: Cluster, first: str, second: str) -> None:
    """Give up the first run and finish the second; resume the first, then again from step 0."""
    commands.values["RUN"] = first
    commands.run(r"coordinator give-up")
    cluster.wait_for("run_ended", run_id=first)
    commands.run(r"coordinator resume RUN")
    cluster.wait_for("run_ended", run_id=second, outcome="finished")
    cluster.wait_for("run_resumed", run_id=first)
    assert run_to_end("coordinator", "give-up").returncode == 0
    cluster.wait_for("run_ended", nth=2, run_id=first)
    start = cluster.event_count()
    commands.values["KEY=VALUE"] = "steps=200000"
    commands.run(r"coordinator resume RUN --set KEY=VALUE")
    cluster.wait_for("run_resumed", start=start, run_id=first)
    assert run_to_end("coordinator", "give-up").returncode == 0
    cluster.wait_for("run_ended", nth=3, run_id=first)
    start = cluster.event_count()
    commands.run(r"coordinator resume RUN --from-step N")
    assert cluster.wait_for("run_resumed", start=start, run_id=first)["step"] == 0


def commands_of_page(name: str, word: str) -> list[str]:
    return [line for line in commands_in(ROOT / "docs" / name) if word in line]


def test_the_tutorials_data_trains_and_classifies(tmp_path):
    files = files_of_page("tutorial.md")
    head, *rows = files["reviews.csv"].splitlines()
    sample_rows = [
        f"{row.rpartition(',')[0].strip(chr(34))!r} {n}" for n in range(40) for row in rows
    ]
    labels = [row.rpartition(",")[2] for _ in range(40) for row in rows]
    lines = [f'"{text}",{label}' for text, label in zip(sample_rows, labels, strict=True)]
    (tmp_path / "reviews.csv").write_text("\n".join([head, *lines]) + "\n")
    spec = files["reviews.yaml"].replace("steps: 100", "steps: 4")
    (tmp_path / "reviews.yaml").write_text(spec.replace("evaluate_every: 25\n", ""))
    commands = commands_of_page("tutorial.md", "reviews")
    assert len(commands) == 2
    for line in commands:
        program, *words = shlex.split(line)
        completed = run_to_end(
            program, *words, *(LOOPBACK if program == "coordinator" else ()), cwd=tmp_path
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
    assert re.match(r"(good|bad) 0\.\d+", completed.stdout)


def test_the_example_task_learns_its_curve(tmp_path):
    text = (ROOT / "worker" / "tasks" / "base" / "task.py").read_text()
    example = text.partition("sum over samples:")[2].partition("'''")[0]
    code = "\n".join(line.removeprefix("    ") for line in example.splitlines())
    (tmp_path / "my_package.py").write_text(code)
    (tmp_path / "curve.yaml").write_text(files_of_page("runs.md")["curve.yaml"])
    [line] = commands_of_page("runs.md", "curve.yaml")
    program, *words = shlex.split(line)
    completed = subprocess.run(  # a fresh process, to import from its directory
        [sys.executable, "-m", program, *words, *LOOPBACK], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    printed = re.search(r"held-out mse: (\S+)", completed.stdout)
    assert printed
    assert float(printed[1]) < 0.3
