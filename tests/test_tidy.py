"""House rules that no linter checks: allowed imports, purity, names and sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from protocol.base import limits
from tests import house
from tests.house import PACKAGES, ROOT

MAY_IMPORT = house.PACKAGE_MAY
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
    return ((line, name) for line, name, _ in house.imports_of(source))


def import_directions(path: str, source: str) -> Iterator[str]:
    package = path.split("/", maxsplit=1)[0]
    if package not in MAY_IMPORT:
        return
    forbidden = set(PACKAGES) - MAY_IMPORT[package]
    forbidden |= {"tests", "benchmarks"}
    if package in {"protocol", "coordinator"}:
        forbidden |= HEAVY
    if package == "protocol":
        forbidden |= SHELL_ONLY - ({"uvloop"} if path.startswith("protocol/machine/") else set())
    for line, name in modules_imported(source):
        if name.split(".")[0] in forbidden:
            yield f"{path}:{line} imports {name}"


def no_unsafe_loading(path: str, source: str) -> Iterator[str]:
    for line, name in modules_imported(source):
        if name.split(".")[0] in UNSAFE:
            yield f"{path}:{line} imports {name}"
    for node in house.nodes(source):
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


def descriptive_names(path: str, _source: str) -> Iterator[str]:
    words = {word for part in Path(path).with_suffix("").parts for word in part.split("_")}
    if words & VAGUE:
        yield f"{path}: name it by its concept"


def sizes(path: str, source: str) -> Iterator[str]:
    if path.startswith("tests/"):
        return
    for node in house.nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{path}:{node.lineno} {node.name} has {lines} lines"


def interrupts_only_by_fixture(path: str, source: str) -> Iterator[str]:
    """An interrupt by other means ends all tests of its process if the test does not catch it."""
    # forked_command.py is no test: it ends by the signal that ended its fork.
    if not path.startswith("tests/") or path in {"tests/conftest.py", "tests/forked_command.py"}:
        return
    if not any(word in source for word in ("getpid", "raise_signal", "KeyboardInterrupt")):
        return
    for node in house.nodes(source):
        if isinstance(node, ast.Call | ast.Raise) and ast.unparse(node).startswith(
            ("os.kill(os.getpid()", "signal.raise_signal", "raise KeyboardInterrupt")
        ):
            yield f"{path}:{node.lineno} interrupts the test process: use the fixture `interrupt`"


def no_machine_paths(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := MACHINE_PATH_OR_REGISTRY.search(line):
            yield f"{path}:{number} names {match.group()!r}"


PYTHON_CHECKS: tuple[Check, ...] = (
    import_directions,
    no_unsafe_loading,
    descriptive_names,
    sizes,
    interrupts_only_by_fixture,
)


def project_files() -> list[Path]:
    """Return every text file that is or will be tracked."""
    folders = (*PACKAGES, "tests", "benchmarks", "deploy", "requirements", ".ci")
    files_inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    top = (path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"})
    hidden = {"__pycache__"}
    return sorted(p for p in (*files_inside, *top) if p.is_file() and not hidden & {*p.parts})


def complaints(checks: Iterable[Check], *suffixes: str) -> list[str]:
    messages: list[str] = []
    for path in project_files():
        if not suffixes or path.suffix in suffixes:
            text = path.read_text(encoding="utf-8", errors="replace")
            for check in checks:  # each file is parsed once for all checks
                messages += check(path.relative_to(ROOT).as_posix(), text)
    return messages


def test_python_files_keep_the_rules():
    assert complaints(PYTHON_CHECKS, ".py") == []


def test_no_machine_paths_and_no_registry_hosts():
    assert complaints([no_machine_paths]) == []


def test_every_chapter_is_in_the_table_and_has_a_docstring():
    path_by_name = house.modules()
    chapters = {house.chapter_of(name, path) for name, path in path_by_name.items()}
    assert chapters == set(house.MAY_IMPORT)
    undocumented = [
        chapter
        for chapter in chapters
        if not ast.get_docstring(ast.parse(path_by_name[chapter].read_text()))
    ]
    assert undocumented == []


def test_chapters_import_only_what_the_table_allows():
    def allowed(source: str, target: str) -> bool:
        may = house.MAY_IMPORT[source]
        package, other = source.split(".", maxsplit=1)[0], target.split(".", maxsplit=1)[0]
        return other in MAY_IMPORT[package] and (target in may or may == ("*",))

    between = house.arrows().items()
    assert [(pair, sorted(by)) for pair, by in between if not allowed(*pair)] == []


def test_imports_have_no_cycles():
    assert house.cycles() == []
    # `protocol.spec` imports `RunSpec` for type checking in what `RunSpec` calls.
    assert [m for m in house.module_cycles() if not m.startswith("protocol.spec.")] == []


@pytest.mark.parametrize("chapter", [*house.PURE, *house.PURE_MODULES])
def test_pure_chapters_import_only_pure_code(chapter):
    graph, path_by_name = house.imports_between_modules(), house.modules()
    files_inside = [
        name
        for name in path_by_name
        if name == chapter or house.chapter_of(name, path_by_name[name]) == chapter
    ]
    assert files_inside
    reachable_modules = set().union(*(house.reachable(name, graph) for name in files_inside))
    impure = [
        f"{name}:{line} imports {module}"
        for name in sorted(reachable_modules)
        for line, module in modules_imported(path_by_name[name].read_text("utf-8"))
        if module.split(".")[0] in IMPURE
    ]
    assert impure == []


def test_no_two_public_classes_of_a_package_share_a_name():
    """Different packages may: a `Session` of the worker is not one of the coordinator."""
    modules_by_class: dict[tuple[str, str], list[str]] = {}
    for name, path in house.modules().items():
        for class_name in re.findall(
            r"^class ([A-Za-z]\w*)", path.read_text("utf-8"), re.MULTILINE
        ):
            modules_by_class.setdefault((name.split(".")[0], class_name), []).append(name)
    assert {name: found for name, found in modules_by_class.items() if len(found) > 1} == {}


def test_every_limit_ends_in_its_unit():
    names = [name for name in vars(limits) if name.isupper() and name not in {"KIB", "MIB"}]
    assert names
    assert [n for n in names if re.sub("_PER_.*", "", n).split("_")[-1] not in UNITS] == []


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
    files = [file for (file,) in paths_by_step]  # one per line
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len(set(files)) == len(files) <= limit


def test_answers_name_existing_files():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = re.findall(r"^[|] (.*[?]) [|] (.*) [|]$", text, re.MULTILINE)
    assert len(rows) >= 20
    answers = [re.findall(r"`([a-z_/]+[.]py)`", answer) for _, answer in rows]
    assert all(answers)
    assert [file for answer in answers for file in answer if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (import_directions, "coordinator/x.py", "import torch"),
        (import_directions, "coordinator/x.py", "def f():\n    from backends import cpu"),
        (import_directions, "protocol/x.py", "import structlog"),
        (import_directions, "backends/x.py", "import worker.tasks"),
        (no_unsafe_loading, "worker/x.py", "import pickle"),
        (no_unsafe_loading, "worker/x.py", "load(name, trust_remote_code=True)"),
        (no_unsafe_loading, "worker/x.py", "np.load(name, allow_pickle=flag)"),
        (no_unsafe_loading, "worker/x.py", "torch.load(name)"),
        (descriptive_names, "worker/string_utils.py", ""),
        (sizes, "worker/x.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES),
        (interrupts_only_by_fixture, "tests/test_x.py", "os.kill(os.getpid(), 2)"),
        (no_machine_paths, "README.md", "see /" + "tmp/out"),
        (no_machine_paths, "deploy/x.sh", "https://pypi" + ".org/simple"),
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
