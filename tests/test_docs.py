"""What the pages tell people to type is what the commands take; the tutorial does what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import coordinator.cli
import worker.cli
from protocol.spec.run_spec import parse_run_spec_text
from protocol.spec.schema_text import schema_lines

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = {
    name: typer.main.get_command(cli.app)
    for name, cli in (("coordinator", coordinator.cli), ("worker", worker.cli))
}
BLOCK = re.compile(r"^ *```\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def typed(page: Path) -> Iterator[str]:
    """The lines of a page's blocks that call one of the two commands."""
    for block in BLOCK.findall(page.read_text()):
        lines = re.sub(r"\\\n", " ", re.sub(r"\n {4,}(?=[-\[])", " ", block)).splitlines()
        for line in lines:
            words = re.sub(r"^\s*\$ |\s+#.*", "", line).strip()
            if found := re.match(r"(?:[A-Z_]+=\S+ )*((?:coordinator|worker)(?: .*)?)$", words):
                yield found[1]


def unknown(line: str) -> list[str]:
    """Options of a line that none of the commands in it has."""
    words = [word.strip("[]") for word in re.sub(r"[|()]", " ", line).split()]
    root = COMMANDS[words[0]]
    named, inner = [root], root
    for word in words[1:]:
        for within in (inner, root):
            if word in getattr(within, "commands", {}):
                inner = getattr(within, "commands")[word]  # noqa: B009 -- a group's alone
                named.append(inner)
                break
    known = {"--help"}
    for command in named:
        known |= {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    asked = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return sorted(asked - known)


def test_the_pages_hold_commands():
    assert sum(len(list(typed(page))) for page in PAGES) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_type_is_taken(page):
    assert [(line, wrong) for line in typed(page) if (wrong := unknown(line))] == []


def test_the_page_of_keys_is_what_the_command_prints():
    block = (ROOT / "docs" / "run-spec.md").read_text().split("```text\n")[1].split("\n```")[0]
    assert block.splitlines() == [*schema_lines()]


def tutorial_files() -> dict[str, str]:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    return dict(re.findall(r"^cat > (\S+) <<END\n(.*?)^END$", text, re.MULTILINE | re.DOTALL))


def test_the_tutorial_s_run_spec_validates():
    assert parse_run_spec_text(tutorial_files()["reviews.yaml"]).steps == 100


@pytest.mark.slow
def test_the_tutorial_s_own_data_trains_and_classifies(tmp_path):
    files = tutorial_files()
    head, *rows = files["reviews.csv"].splitlines()
    many = [f"{row.rpartition(',')[0].strip(chr(34))!r} {n}" for n in range(40) for row in rows]
    labels = [row.rpartition(",")[2] for _ in range(40) for row in rows]
    lines = [f'"{text}",{label}' for text, label in zip(many, labels, strict=True)]
    (tmp_path / "reviews.csv").write_text("\n".join([head, *lines]) + "\n")
    spec = (
        files["reviews.yaml"].replace("steps: 100", "steps: 4").replace("evaluate_every: 25\n", "")
    )
    (tmp_path / "reviews.yaml").write_text(spec)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SAMESTEP_HOME": str(tmp_path / "home")}
    free = ["--bind", "127.0.0.1:0", "--control", "127.0.0.1:0", "--no-announce"]
    commands = [line for line in typed(ROOT / "docs" / "tutorial.md") if "reviews" in line]
    assert len(commands) == 2
    for line in commands:
        program, *words = shlex.split(line)
        more = free if program == "coordinator" else []
        done = subprocess.run(
            [sys.executable, "-m", program, *words, *more], cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"(good|bad) 0\.\d+", done.stdout)
