"""Tests that commands, links and generated parts of the documentation match the code."""

from __future__ import annotations

import ast
import os
import re
import shlex
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

import coordinator.cli
import worker.cli
from protocol.spec.run_spec import parse_run_spec_text
from protocol.spec.schema_text import schema_keys

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES_WITH_LINKS = [*PAGES, *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md"))]
CLIS = {"coordinator": coordinator.cli, "worker": worker.cli}
BLOCK = re.compile(r"^ *```([^\n`]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ALTERNATIVES = re.compile(r" \| (?![^\[]*\])")


def command_blocks(page: Path) -> list[str]:
    """Return the blocks without a language after the fence: commands and their output."""
    return [text for language, text in BLOCK.findall(page.read_text()) if not language]


def commands_in(page: Path) -> Iterator[str]:
    """Yield the coordinator and worker commands of a page, each alternative (a | b) separately."""
    for block in command_blocks(page):
        joined_lines = re.sub(r"\n {4,}(?=[-\[])", " ", re.sub(r"\\\n *", "", block))
        lines = joined_lines.splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line for line in lines if line.startswith("$ ")]  # the other lines are output
        for line in lines:
            command_text = re.sub(r"^\s*\$ |\s+#.*", "", line).strip()
            if command := re.match(
                r"(?:[A-Z_]+=\S+ )*((?:coordinator|worker)(?: .*)?)$", command_text
            ):
                first, *other_commands = ALTERNATIVES.split(command[1])
                yield first
                shared_words = re.sub(r"\[.*?\]", "", first).split()[:-1]
                yield from (" ".join([*shared_words, word]) for word in other_commands)


def commands_under(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield a command and all its subcommands with their full names."""
    yield name, command
    for word, subcommand in getattr(command, "commands", {}).items():
        yield from commands_under(f"{name} {word}", subcommand)


def without_options(line: str) -> str:
    """Return the command without its optional parts in brackets."""
    return " ".join(re.sub(r"\[[^]]*\]|\.\.\.$", "", line).split())


def with_options(line: str) -> str:
    """Return the command with its optional parts, the first of each choice."""
    return " ".join(re.sub(r"\[([^]|]*)[^]]*\]", r"\1", line).replace("...", "").split())


PLACEHOLDERS = {"N": "0", "S": "5", "KEY=VALUE": "seed=1", "HOST:PORT": "127.0.0.1:9000"}


def parse(line: str) -> None:
    """Parse the line with the real command line, and run nothing.

    Raises:
        Exception: The command does not accept the line.
    """
    program, *command_text = (PLACEHOLDERS.get(word, word) for word in shlex.split(line))
    root = typer.main.get_command(CLIS[program].app)
    for _, command in commands_under(program, root):
        command.callback = None
    root.main(command_text, prog_name=program, standalone_mode=False)


def test_pages_have_commands():
    assert sum(len(list(commands_in(page))) for page in PAGES) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_page_parse(page):
    for line in commands_in(page):
        for command in {without_options(line), with_options(line)}:
            parse(command)


def test_invalid_commands_fail_to_parse():
    for line in (
        "coordinator stats",
        "coordinator halt --now",
        "worker --gpu 0",
        "worker classify",
    ):
        with pytest.raises(Exception, match=r"."):
            parse(line)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in slugs}


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=lambda page: page.name)
def test_links_have_targets(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_scripts_on_pages_exist():
    for page in PAGES:
        for block in command_blocks(page):
            for script in re.findall(r"\bbash ([\w/.-]+\.sh)", block):
                assert (ROOT / script).is_file(), (page.name, script)


def key_table(sections: Collection[str]) -> str:
    """Return a table of the keys of these sections."""
    rows = [
        "<!-- generated: SAMESTEP_REWRITE=1 python -m pytest tests/test_docs.py -->",
        "| key | type | default | unit | meaning |",
        "|---|---|---|---|---|",
    ]
    for key in schema_keys():
        if key.is_section or key.path.split(".")[0] not in sections:
            continue
        values = [value for value in key.choices.split(" | ") if value]
        quoted = [
            value if value in ("list of text", "mapping") else f"`{value}`" for value in values
        ]
        choices = key.choices if key.type else ", ".join(quoted)
        key_type = ", ".join(filter(None, [key.type, choices]))
        default = f"`{key.default}`" if key.default not in ("required", "-") else key.default
        meaning = "; ".join(filter(None, [key.description, key.variants]))
        cells = (f"`{key.path}`", key_type, default, key.unit, meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def test_the_run_spec_page_has_every_key():
    page = ROOT / "docs" / "run-spec.md"
    documented_sections: list[str] = []

    def insert_table(section: re.Match[str]) -> str:
        documented_sections.extend(section[2].split())
        return f"{section[1]}\n\n{key_table(section[2].split())}\n"

    text = re.sub(
        r"(<!-- keys: (.*?) -->)\n(?:\n<!-- generated.*?\n(?:\|.*\n)+)?",
        insert_table,
        page.read_text(),
    )
    if os.environ.get("SAMESTEP_REWRITE"):
        page.write_text(text)
    assert page.read_text() == text
    assert sorted(documented_sections) == sorted({key.path.split(".")[0] for key in schema_keys()})


QUOTE = re.compile(
    r"<!-- code: (?P<path>\S+) (?P<name>\S+?)(?: from '(?P<first>.*?)')?(?: to '(?P<last>.*?)')?"
    r" -->\n```python\n(?P<code>.*?)```\n",
    re.DOTALL,
)


def source_of(path: str, name: str, first: str | None, last: str | None) -> str:
    """Return the source of a function or class without its docstring, or only its lines from the
    first with `first` to the next with `last`."""
    text = (ROOT / path).read_text()
    node: Any = ast.parse(text)
    for part in name.split("."):
        nodes = [child for child in node.body if getattr(child, "name", None) == part]
        assert nodes, f"{path} has no {name}: docs/one-step.md quotes it"
        node = nodes[0]
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    lines = [
        re.sub(r"  # (?:fmt|noqa|type):.*", "", line)
        for number, line in enumerate(text.splitlines(), 1)
        if node.lineno <= number <= node.end_lineno
        and not (docstring and docstring.lineno <= number <= docstring.end_lineno)
    ]
    start = min((n for n, line in enumerate(lines) if (first or "") in line), default=None)
    assert start is not None, f"{path}: {name} has no line with {first!r}"
    end = len(lines) - 1
    if last is not None:
        end = min((n for n, line in enumerate(lines) if n >= start and last in line), default=-1)
        assert end >= start, f"{path}: {name} has no line with {last!r}"
    return textwrap.dedent("\n".join(lines[start : end + 1])).strip("\n") + "\n"


def test_one_step_quotes_the_source():
    page = ROOT / "docs" / "one-step.md"
    quotes = 0

    def insert_source(quote: re.Match[str]) -> str:
        nonlocal quotes
        quotes += 1
        code = source_of(quote["path"], quote["name"], quote["first"], quote["last"])
        return f"{quote[0].partition('```python')[0]}```python\n{code}```\n"

    text = QUOTE.sub(insert_source, page.read_text())
    if os.environ.get("SAMESTEP_REWRITE"):
        page.write_text(text)
    assert quotes == text.count("<!-- code:") > 10
    assert page.read_text() == text
    assert len(text.splitlines()) <= 150


def table_cell(text: str) -> str:
    """Return a line of help as a table cell: options as code, markup characters escaped."""
    text = re.sub(r"([|*<])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", lambda option: f"`{option[0]}`", text)


def help_tables(name: str, command: Any) -> str:
    """Return a command's `--help` text, with its options and subcommands as tables."""
    context = click.Context(command, info_name=name)
    text = "\n\n".join(table_cell(part) for part in (command.help or "").split("\n\n"))
    parts = [f"## {name}", f"```text\n{context.get_usage().removeprefix('Usage: ')}\n```", text]
    records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [record for record in records if record is not None]
    subcommands = getattr(command, "commands", {}).items()
    subcommand_rows = [
        (word, subcommand.get_short_help_str(500))
        for word, subcommand in subcommands
        if not subcommand.hidden
    ]
    for title, cells in (("option", rows), ("command", subcommand_rows)):
        lines = [
            "| `{}` | {} |".format(names.replace("|", "\\|"), table_cell(meaning))
            for names, meaning in cells
        ]
        if lines:
            parts.append("\n".join([f"| {title} | meaning |", "|---|---|", *lines]))
    return "\n\n".join(part for part in parts if part)


def options_page() -> str:
    """Return the page with the help of every command."""
    parts = [
        "# Every option",
        "<!-- generated: SAMESTEP_REWRITE=1 python -m pytest tests/test_docs.py -->",
        "The `--help` of each command. [Commands](commands.md) shows how to use them.",
    ]
    for root, cli in CLIS.items():
        for name, command in commands_under(root, typer.main.get_command(cli.app)):
            if not command.hidden:
                parts.append(help_tables(name, command))
    return "\n\n".join(parts) + "\n"


def test_the_options_page_has_every_option():
    page = ROOT / "docs" / "cli.md"
    if os.environ.get("SAMESTEP_REWRITE"):
        page.write_text(options_page())
    assert page.read_text() == options_page()


def files_of_page(name: str) -> dict[str, str]:
    """Return the files that a page tells readers to save, by name."""
    text = (ROOT / "docs" / name).read_text()
    return dict(re.findall(r"^cat > (\S+) <<END\n(.*?)^END$", text, re.MULTILINE | re.DOTALL))


def test_run_spec_of_the_tutorial_is_valid():
    assert parse_run_spec_text(files_of_page("tutorial.md")["reviews.yaml"]).steps == 100
