"""The commands of the pages, run: what people are told to type does what is said of it.

What needs cards (`--gpus`, Vulkan) is taken apart by `test_docs` and run where there are any.
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
from tests.processes import ended
from tests.test_docs import PAGES, tutorial_files, typed, with_options, without_options

pytestmark = pytest.mark.slow

FREE = ("--bind", "127.0.0.1:0", "--control", "127.0.0.1:0", "--no-announce")
LOCAL = (*FREE, "--expect-workers", "2", "--local-workers", "2", "--backend", "scripted:1")
RUN = """
task: scripted
steps: 60
batch: {samples: 8, microbatch: 1}
scripted: {blocks: 2, block_bytes: 64, samples: 64}
checkpoint: {every: 20, keep_last: 100}
"""
NEED_CARDS = re.compile(r"--gpus|vulkan")
RUN_ELSEWHERE = re.compile(
    r"sine|reviews|classify|curve|spam-1/adapter|teacher|student|--from (COPIES|tower)|logits"
    r"|replicas|--track|coordinator track|worker (data|merge|export|generate)"
)
"""The tutorial's below; the others have tests of their own."""
ADDRESS = re.compile(r"(0\.0\.0\.0|127\.0\.0\.1|192\.168\.1\.20|HOST):(9000|PORT)")


def plain(line: str) -> str:
    """A line with one name for whatever stands for the same thing."""
    line = ADDRESS.sub("ADDRESS", line).replace("127.0.0.1:9001", "CONTROL")
    line = re.sub(r"runs/sms-spam-1|/var/lib/samestep-coordinator/runs", "DIR", line)
    line = re.sub(r"/etc/credstore/samestep.join.token|(?<=--token-file )FILE", "TOKEN", line)
    return line.replace("deploy/runs/sms-spam.yaml", "RUN.yaml")


def wanted() -> list[str]:
    """Every command of the pages once, without what is optional and with it."""
    lines = (line for page in PAGES for line in typed(page))
    both = (plain(form(line)) for line in lines for form in (without_options, with_options))
    kept = (
        re.sub(r" --gpus \S+", "", line) if line.startswith("worker --co") else line
        for line in both
    )
    return [
        line for line in dict.fromkeys(kept)
        if not NEED_CARDS.search(line) and not RUN_ELSEWHERE.search(line)
    ]  # fmt: skip


class Typist:
    """Types lines of the pages, each once, with what stands for the names in them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.left = wanted()
        self.stands_for = {
            "RUN.yaml": str(directory / "RUN.yaml"), "DIR": str(directory / "DIR"),
            "FILE": str(directory / "report.html"), "TOKEN": str(directory / "join.token"),
            "NAME": "here", "N": "0", "S": "60", "KEY=VALUE": "seed=1", "CONTROL": "127.0.0.1:0",
            "ADDRESS": "127.0.0.1:0",
        }  # fmt: skip
        (directory / "RUN.yaml").write_text(RUN)

    def those(self, pattern: str) -> Iterator[list[str]]:
        """The words of all lines that fit and are left; they count as typed."""
        fitting = [line for line in self.left if re.fullmatch(pattern, line)]
        assert fitting, f"no page has {pattern!r} any more"
        for line in fitting:
            self.left.remove(line)
            yield [self.stands_for.get(word, word) for word in shlex.split(line)]

    def types(self, pattern: str, *more: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run those lines to their ends; what the last one said."""
        said = ""
        for program, *words in self.those(pattern):
            done = ended(program, *words, *more, cwd=self.directory)
            assert done.returncode in codes, (words, done.stdout + done.stderr)
            assert "Traceback" not in done.stderr
            said = done.stdout
        return said


def test_every_command_of_the_pages_does_what_it_says(tmp_path, monkeypatch):
    typist = Typist(tmp_path)
    serves_one_run(typist)
    [*_] = typist.those(
        r"coordinator --expect-workers 2( --bind .*--out DIR --name here| --bind .*NAME)?"
    )
    with Cluster(tmp_path / "served", "--expect-workers", "2", "--name", "here") as cluster:
        monkeypatch.setenv("SAMESTEP_CONTROL", cluster.address["control"])
        monkeypatch.setenv("SAMESTEP_COORDINATOR", cluster.address["data"])
        typist.stands_for |= {"ADDRESS": cluster.address["data"], "NAME": "w0"}
        is_served(typist, cluster)
        assert cluster.wait_for_exit(cluster.coordinator) == 0
    assert typist.left == []


def serves_one_run(typist: Typist) -> None:
    """Runs from a command line, gone on with and looked at afterwards."""
    typist.types(r"coordinator --expect-workers \d .*--run RUN.yaml.*", *LOCAL)
    typist.types(r"coordinator --run RUN.yaml --out DIR --resume", *LOCAL)
    assert "has finished" in typist.types(r"coordinator --out DIR --resume", *FREE)
    again = typist.types(r"coordinator --out DIR --resume --from-step \S+", *LOCAL)
    assert "60 of 60 steps" in again
    assert "sound" in typist.types(r"coordinator audit DIR")
    typist.types(r"coordinator report DIR.*")
    assert "<h1>Run" in (typist.directory / "report.html").read_text()
    assert "optimizer" in typist.types(r"coordinator schema")
    typist.types(r"worker devices( --json)?")
    typist.types(r"coordinator doctor.*", codes=(0, 1))


def is_served(typist: Typist, cluster: Cluster) -> None:
    """What is typed beside a coordinator that serves, in the order in which it makes sense."""
    token = typist.types(r"coordinator token show")
    (typist.directory / "join.token").touch(mode=0o600)
    (typist.directory / "join.token").write_text(token)
    typist.types(r"worker doctor.*", codes=(0, 1))
    for number, (_, *words) in enumerate(
        typist.those(r"worker( --duty evaluate)?( --coordinator .*)?")
    ):
        cluster.worker(f"w{number}", *words, "--backend", "scripted:20", "--name", f"w{number}")
        cluster.wait_for("worker_connected", worker=f"w{number}")
    first = typist.types(r"coordinator submit RUN.yaml --set .*", "--set", "steps=100000").strip()
    cluster.wait_for("committed")
    assert '"phase": "training"' in typist.types(r"coordinator status --json")
    assert "samples/s" in typist.types(r"coordinator status")
    second = typist.types(r"coordinator submit RUN.yaml").strip()
    typist.types(r"coordinator checkpoint")
    halt_and_continue(typist, cluster)
    give_up_and_resume(typist, cluster, first, second)
    typist.types(r"coordinator token (workers|control|reader)")
    typist.types(r"coordinator token revoke .*")
    cluster.wait_for("worker_disconnected", worker="w0")
    typist.types(r"coordinator token rotate")
    typist.types(r"coordinator drain")


def halt_and_continue(typist: Typist, cluster: Cluster) -> None:
    typist.types(r"coordinator halt")
    cluster.wait_for("halted")
    typist.types(r"coordinator continue")
    cluster.wait_for("continued")
    assert ended("coordinator", "halt").returncode == 0
    cluster.wait_for("halted", nth=2)
    typist.types(r"coordinator continue --skip-step")
    cluster.wait_for("committed", skipped=True)


def give_up_and_resume(typist: Typist, cluster: Cluster, first: str, second: str) -> None:
    """The first run is given up, the second done; it goes on, and again from its beginning."""
    typist.stands_for["RUN"] = first
    typist.types(r"coordinator give-up")
    cluster.wait_for("run_ended", run_id=first)
    typist.types(r"coordinator resume RUN")
    cluster.wait_for("run_ended", run_id=second, outcome="finished")
    cluster.wait_for("run_resumed", run_id=first)
    assert ended("coordinator", "give-up").returncode == 0
    cluster.wait_for("run_ended", nth=2, run_id=first)
    since = cluster.mark()
    typist.types(r"coordinator resume RUN --from-step N")
    assert cluster.wait_for("run_resumed", since=since, run_id=first)["step"] == 0


def of_the_tutorial(word: str) -> list[str]:
    return [line for line in typed(ROOT / "docs" / "tutorial.md") if word in line]


def test_the_tutorial_s_own_data_trains_and_classifies(tmp_path):
    files = tutorial_files()
    head, *rows = files["reviews.csv"].splitlines()
    many = [f"{row.rpartition(',')[0].strip(chr(34))!r} {n}" for n in range(40) for row in rows]
    labels = [row.rpartition(",")[2] for _ in range(40) for row in rows]
    lines = [f'"{text}",{label}' for text, label in zip(many, labels, strict=True)]
    (tmp_path / "reviews.csv").write_text("\n".join([head, *lines]) + "\n")
    spec = files["reviews.yaml"].replace("steps: 100", "steps: 4")
    (tmp_path / "reviews.yaml").write_text(spec.replace("evaluate_every: 25\n", ""))
    commands = of_the_tutorial("reviews")
    assert len(commands) == 2
    for line in commands:
        program, *words = shlex.split(line)
        done = ended(program, *words, *(FREE if program == "coordinator" else ()), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"(good|bad) 0\.\d+", done.stdout)


def test_the_tutorial_s_own_model_learns_its_curve(tmp_path):
    text = (ROOT / "worker" / "tasks" / "base.py").read_text()
    shown = text.partition("sum over samples:")[2].partition("'''")[0]
    code = "\n".join(line.removeprefix("    ") for line in shown.splitlines())
    (tmp_path / "my_package.py").write_text(code)
    (tmp_path / "curve.yaml").write_text(tutorial_files()["curve.yaml"])
    [line] = of_the_tutorial("curve.yaml")
    program, *words = shlex.split(line)
    done = subprocess.run(  # anew: it finds modules where it is started
        [sys.executable, "-m", program, *words, *FREE], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"held-out mse: (\S+)", done.stdout)
    assert found
    assert float(found[1]) < 0.3
