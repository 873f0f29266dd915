"""What the pages tell people to type is what the commands take; the tutorial does what it says."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import coordinator.cli
import worker.cli
from protocol.spec.run_spec import parse_run_spec_text
from protocol.spec.schema_text import schema_lines
from tests.commands import called

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md"))]
CLIS = {"coordinator": coordinator.cli, "worker": worker.cli}
BLOCK = re.compile(r"^ *```([^\n`]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


ALTERNATIVES = re.compile(r" \| (?![^\[]*\])")


def blocks(page: Path) -> list[str]:
    """What is to be typed, and answers: what is of another kind says so after its fence."""
    return [text for kind, text in BLOCK.findall(page.read_text()) if not kind]


def typed(page: Path) -> Iterator[str]:
    """The commands of a page's blocks, one of the two each; of a choice (a | b) each alone."""
    for block in blocks(page):
        joined = re.sub(r"\n {4,}(?=[-\[])", " ", re.sub(r"\\\n *", "", block))
        lines = joined.splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line for line in lines if line.startswith("$ ")]  # the others are answers
        for line in lines:
            words = re.sub(r"^\s*\$ |\s+#.*", "", line).strip()
            if found := re.match(r"(?:[A-Z_]+=\S+ )*((?:coordinator|worker)(?: .*)?)$", words):
                first, *others = ALTERNATIVES.split(found[1])
                yield first
                before = re.sub(r"\[.*?\]", "", first).split()[:-1]
                yield from (" ".join([*before, other]) for other in others)


def commands_under(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command and all below it, with what is typed for each."""
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands_under(f"{name} {word}", inner)


def without_options(line: str) -> str:
    """As it is typed without what is in brackets."""
    return " ".join(re.sub(r"\[[^]]*\]|\.\.\.$", "", line).split())


def with_options(line: str) -> str:
    """As it is typed with what is in brackets, of each choice the first."""
    return " ".join(re.sub(r"\[([^]|]*)[^]]*\]", r"\1", line).replace("...", "").split())


STANDS_FOR = {"N": "0", "S": "5", "KEY=VALUE": "seed=1", "HOST:PORT": "127.0.0.1:9000"}


def parsed(line: str) -> None:
    """Have the real command take the line apart, and do nothing.

    Raises:
        Exception: It does not take it.
    """
    program, *words = (STANDS_FOR.get(word, word) for word in shlex.split(line))
    root = typer.main.get_command(CLIS[program].app)
    for _, command in commands_under(program, root):
        command.callback = None
    root.main(words, prog_name=program, standalone_mode=False)


def test_the_pages_hold_commands():
    assert sum(len(list(typed(page))) for page in PAGES) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_tells_to_type_is_taken(page):
    for line in typed(page):
        for said in {without_options(line), with_options(line)}:
            parsed(said)


def test_what_is_not_taken_is_noticed():
    for line in (
        "coordinator stats",
        "coordinator halt --now",
        "worker --gpu 0",
        "worker classify",
    ):
        with pytest.raises(Exception, match=r"."):
            parsed(line)


def anchors(page: Path) -> set[str]:
    """What a link into the page can name: its headings, as GitHub and the site write them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_scripts_that_pages_name_are_there():
    for page in PAGES:
        for block in blocks(page):
            for script in re.findall(r"\bbash ([\w/.-]+\.sh)", block):
                assert (ROOT / script).is_file(), (page.name, script)


def test_the_page_of_keys_is_what_the_command_prints():
    block = (ROOT / "docs" / "run-spec.md").read_text().split("```text\n")[1].split("\n```")[0]
    assert block.splitlines() == [*schema_lines()]


def options_page() -> str:
    """Every command's help, as it is printed in a window of 100 columns."""
    said = [
        "# Every option",
        "What `--help` prints after each command. [Commands](commands.md) tells what they are for.",
    ]
    for root, cli in CLIS.items():
        for name, command in commands_under(root, typer.main.get_command(cli.app)):
            if command.hidden:
                continue
            told = called(*name.split(), "--help", environment={"COLUMNS": "100"}).stdout
            said.append(f"## {name}\n\n```text\n{told.strip()}\n```")
    return "\n\n".join(said) + "\n"


def test_the_page_of_options_is_what_help_prints():
    page = ROOT / "docs" / "cli.md"
    if os.environ.get("SAMESTEP_REWRITE"):
        page.write_text(options_page())
    assert page.read_text() == options_page()


def tutorial_files() -> dict[str, str]:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    return dict(re.findall(r"^cat > (\S+) <<END\n(.*?)^END$", text, re.MULTILINE | re.DOTALL))


def test_the_tutorial_s_run_spec_validates():
    assert parse_run_spec_text(tutorial_files()["reviews.yaml"]).steps == 100
