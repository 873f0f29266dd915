"""Rules of the project that no linter checks: allowed imports, purity, names and sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from protocol.base import limits
from tests import structure
from tests.structure import ALLOWED_PACKAGES, PACKAGES, ROOT

HEAVY = {"torch", "transformers", "peft", "sklearn", "scipy", "pandas"}
SHELL_ONLY = {"aiohttp", "prometheus_client", "rich", "structlog", "typer", "uvloop", "zeroconf"}
LAZY_IMPORTS = {"zeroconf"}
"""Packages to import only where they are needed."""
IMPURE = {
    "asyncio",
    "logging",
    "os",
    "random",
    "secrets",
    "socket",
    "structlog",
    "threading",
    "time",
}
UNSAFE = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
VAGUE = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}
MACHINE_PATH_OR_REGISTRY = re.compile(
    r"(?<![\w.])/(?:home|opt|root|tmp|Users|work)/"
    r"|(?:pypi|npmjs)[.](?:org|com)|pythonhosted[.]|download[.]pytorch|deb[.]debian"
)
UNITS = {
    "BLOCKS",
    "BYTES",
    "CHARACTERS",
    "CHUNKS",
    "CONNECTIONS",
    "CONSTANTS",
    "COUNT",
    "DEVICES",
    "ELEMENTS",
    "FACTOR",
    "GROUPS",
    "INVOCATIONS",
    "FILES",
    "LEVELS",
    "MICROBATCHES",
    "MS",
    "PARTS",
    "RUNS",
    "S",
    "SAMPLES",
    "SLICES",
    "SUMS",
    "TENSORS",
    "VALUES",
    "WORKERS",
}
FUNCTION_LINES = 60

Check = Callable[[str, str], Iterable[str]]


def modules_imported(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every absolute import, wherever it occurs."""
    return ((line, name) for line, name, _ in structure.imports_of(source))


def check_import_directions(path: str, source: str) -> Iterator[str]:
    package = path.split("/", maxsplit=1)[0]
    if package not in ALLOWED_PACKAGES:
        return
    forbidden = set(PACKAGES) - ALLOWED_PACKAGES[package]
    forbidden |= {"tests", "benchmarks"}
    if package in {"protocol", "coordinator"}:
        forbidden |= HEAVY
    if package == "protocol":
        forbidden |= SHELL_ONLY - ({"uvloop"} if path.startswith("protocol/machine/") else set())
    for line, name in modules_imported(source):
        if name.split(".")[0] in forbidden:
            yield f"{path}:{line} imports {name}"


def check_safe_loading(path: str, source: str) -> Iterator[str]:
    for line, name in modules_imported(source):
        if name.split(".")[0] in UNSAFE:
            yield f"{path}:{line} imports {name}"
    for node in structure.nodes(source):
        if not isinstance(node, ast.Call):
            continue
        arguments = {
            keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords
        }
        for argument in ("trust_remote_code", "allow_pickle"):
            if arguments.get(argument, False) is not False:
                yield f"{path}:{node.lineno} passes {argument}"
        is_load = isinstance(node.func, ast.Attribute) and node.func.attr == "load"
        is_torch_load = is_load and ast.unparse(node.func) == "torch.load"
        if is_torch_load and arguments.get("weights_only") is not True:
            yield f"{path}:{node.lineno} calls torch.load without weights_only=True"


def check_descriptive_names(path: str, _source: str) -> Iterator[str]:
    words = {word for part in Path(path).with_suffix("").parts for word in part.split("_")}
    if words & VAGUE:
        yield f"{path}: name the file after its subject, not {', '.join(sorted(words & VAGUE))}"


def check_sizes(path: str, source: str) -> Iterator[str]:
    if path.startswith("tests/"):
        return
    for node in structure.nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{path}:{node.lineno} {node.name} has {lines} lines"


def check_interrupts(path: str, source: str) -> Iterator[str]:
    """Find interrupts without the fixture: one that a test does not catch ends all tests of its
    process."""
    # forked_command.py is not a test: it ends by the signal that ended its fork.
    if not path.startswith("tests/") or path in {"tests/conftest.py", "tests/forked_command.py"}:
        return
    if not any(word in source for word in ("getpid", "raise_signal", "KeyboardInterrupt")):
        return
    for node in structure.nodes(source):
        if isinstance(node, ast.Call | ast.Raise) and ast.unparse(node).startswith(
            ("os.kill(os.getpid()", "signal.raise_signal", "raise KeyboardInterrupt")
        ):
            yield f"{path}:{node.lineno} interrupts the test process: use the fixture `interrupt`"


def check_machine_paths(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := MACHINE_PATH_OR_REGISTRY.search(line):
            yield f"{path}:{number} names {match.group()!r}"


PYTHON_CHECKS: tuple[Check, ...] = (
    check_import_directions,
    check_safe_loading,
    check_descriptive_names,
    check_sizes,
    check_interrupts,
)


def project_files() -> list[Path]:
    """Return every text file that is or will be tracked."""
    folders = (*PACKAGES, "tests", "benchmarks", "deploy", "requirements", ".ci")
    files_inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    top = (path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"})
    hidden = {"__pycache__"}
    return sorted(p for p in (*files_inside, *top) if p.is_file() and not hidden & {*p.parts})


def violations(checks: Iterable[Check], *suffixes: str) -> list[str]:
    messages: list[str] = []
    for path in project_files():
        if not suffixes or path.suffix in suffixes:
            text = path.read_text(encoding="utf-8", errors="replace")
            for check in checks:  # file by file: `structure.nodes` caches one parsed file
                messages += check(path.relative_to(ROOT).as_posix(), text)
    return messages


def test_python_files_keep_the_rules():
    assert violations(PYTHON_CHECKS, ".py") == []


def test_no_machine_paths_and_no_registry_hosts():
    assert violations([check_machine_paths]) == []


def test_every_chapter_is_in_the_table_and_has_a_docstring():
    path_by_name = structure.modules()
    chapters = {structure.chapter_of(name, path) for name, path in path_by_name.items()}
    assert chapters == set(structure.ALLOWED_CHAPTERS)
    undocumented = [
        chapter
        for chapter in chapters
        if not ast.get_docstring(ast.parse(path_by_name[chapter].read_text()))
    ]
    assert undocumented == []


def test_chapters_import_only_what_the_table_allows():
    def is_allowed(source: str, target: str) -> bool:
        chapters = structure.ALLOWED_CHAPTERS[source]
        packages = ALLOWED_PACKAGES[source.split(".", maxsplit=1)[0]]
        is_in_table = target in chapters or chapters == ("*",)
        return is_in_table and target.split(".", maxsplit=1)[0] in packages

    arrows = structure.arrows().items()
    assert [(pair, sorted(names)) for pair, names in arrows if not is_allowed(*pair)] == []


def test_imports_have_no_cycles():
    assert structure.cycles() == []
    # Modules of `protocol.spec` that `RunSpec` calls import `RunSpec` for type checking.
    names = structure.module_cycles()
    assert [name for name in names if not name.startswith("protocol.spec.")] == []


@pytest.mark.parametrize("chapter", [*structure.PURE_CHAPTERS, *structure.PURE_MODULES])
def test_pure_chapters_import_only_pure_code(chapter):
    graph, path_by_name = structure.imports_between_modules(), structure.modules()
    files_inside = [
        name
        for name in path_by_name
        if name == chapter or structure.chapter_of(name, path_by_name[name]) == chapter
    ]
    assert files_inside
    reachable_modules = set().union(*(structure.reachable(name, graph) for name in files_inside))
    impure = [
        f"{name}:{line} imports {module}"
        for name in sorted(reachable_modules)
        for line, module in modules_imported(path_by_name[name].read_text("utf-8"))
        if module.split(".")[0] in IMPURE
    ]
    assert impure == []


def test_no_two_public_classes_of_a_package_share_a_name():
    """Two packages may share a name: the worker's `Session` is not the coordinator's."""
    modules_by_class: dict[tuple[str, str], list[str]] = {}
    for name, path in structure.modules().items():
        for class_name in re.findall(
            r"^class ([A-Za-z]\w*)", path.read_text("utf-8"), re.MULTILINE
        ):
            modules_by_class.setdefault((name.split(".")[0], class_name), []).append(name)
    assert {name: files for name, files in modules_by_class.items() if len(files) > 1} == {}


def test_every_limit_ends_in_its_unit():
    names = [name for name in vars(limits) if name.isupper() and name not in {"KIB", "MIB"}]
    assert names
    assert [name for name in names if re.sub("_PER_.*", "", name).split("_")[-1] not in UNITS] == []


@pytest.mark.parametrize(
    ("walk", "limit"),
    [
        ("A gradient, from backward to commit and back", 20),
        ("A submitted run, to its first step", 10),
        ("A worker that comes back", 13),
    ],
)
def test_a_walk_names_existing_files_in_order(walk, limit):
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    steps = re.findall(
        r"^ ?(\d+)[.] (.*)$", text.split(f"**{walk}**\n")[1].split("\n**")[0], re.MULTILINE
    )
    steps = [(int(number), line) for number, line in steps]
    assert [number for number, _ in steps] == list(range(1, len(steps) + 1))
    paths_by_step = [re.findall(r"`([a-z_/]+[.]py)`", line) for _, line in steps]
    files = [file for (file,) in paths_by_step]  # exactly one per line
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len(set(files)) == len(files) <= limit


def test_answers_of_contributing_name_existing_files():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^[|] (.*[?]) [|] (.*) [|]$", text, re.MULTILINE)
    assert len(rows) >= 20
    answers = [re.findall(r"`([a-z_/]+[.]py)`", answer) for _, answer in rows]
    assert all(answers)
    assert [file for answer in answers for file in answer if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (check_import_directions, "coordinator/x.py", "import torch"),
        (check_import_directions, "coordinator/x.py", "def f():\n    from backends import cpu"),
        (check_import_directions, "protocol/x.py", "import structlog"),
        (check_import_directions, "backends/x.py", "import worker.tasks"),
        (check_safe_loading, "worker/x.py", "import pickle"),
        (check_safe_loading, "worker/x.py", "load(name, trust_remote_code=True)"),
        (check_safe_loading, "worker/x.py", "np.load(name, allow_pickle=flag)"),
        (check_safe_loading, "worker/x.py", "torch.load(name)"),
        (check_descriptive_names, "worker/string_utils.py", ""),
        (check_sizes, "worker/x.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES),
        (check_interrupts, "tests/test_x.py", "os.kill(os.getpid(), 2)"),
        (check_machine_paths, "README.md", "see /" + "tmp/out"),
        (check_machine_paths, "deploy/x.sh", "https://pypi" + ".org/simple"),
    ],
)
def test_each_check_finds_its_violation(check, path, source):
    assert list(check(path, source))


@pytest.mark.parametrize("command", ["coordinator", "worker"])
def test_a_command_starts_without_heavy_imports(command):
    program = f"import sys, {command}.cli, {command}.main; print(*sys.modules)"
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(completed.stdout.split()) & (HEAVY | LAZY_IMPORTS) == set()
