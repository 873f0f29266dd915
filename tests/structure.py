"""The structure of the product, read from its imports: `python -m tests.structure` prints it.

A chapter is a folder of modules. A table lists the chapters that each chapter may import;
`test_tidy.py` checks the imports against it, and checks that pure chapters are pure.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("protocol", "backends", "coordinator", "worker", "samestep")

_SPEC: Final = ("protocol.spec", "protocol.spec.sections", "protocol.spec.files")
_EXACT: Final = ("protocol.exact.reduction", "protocol.exact")
_PROTOCOL: Final = ("protocol", "protocol.base", *_SPEC, *_EXACT, "protocol.wire")
_LOGIC: Final = _PROTOCOL[1:]
_SHELL: Final = (*_PROTOCOL, "protocol.machine", "protocol.cli")
_STORAGE: Final = (
    "coordinator.storage.log", "coordinator.storage.directory", "coordinator.storage.states",
    "coordinator.storage",
)  # fmt: skip

_SHADERS: Final = (
    "backends.wgpu.shaders", "backends.wgpu.shaders.attention", "backends.wgpu.shaders.matmul",
)  # fmt: skip

ALLOWED_CHAPTERS: Final[dict[str, tuple[str, ...]]] = {
    "protocol": (),
    "protocol.base": (),
    "protocol.spec.sections": ("protocol.base",),
    "protocol.spec": ("protocol.base", "protocol.spec.sections"),
    "protocol.spec.files": ("protocol.base", *_SPEC[:2]),
    "protocol.datasets": ("protocol.base", *_SPEC),
    "protocol.exact.kernels": (),
    "protocol.exact.reduction": ("protocol.base", *_SPEC[:2], "protocol.exact.kernels"),
    "protocol.exact": (
        "protocol.base", *_SPEC[:2], "protocol.exact.kernels", "protocol.exact.reduction",
    ),
    "protocol.wire": ("protocol", "protocol.base", *_SPEC[:2], *_EXACT),
    "protocol.machine": ("protocol", "protocol.base", "protocol.exact.kernels"),
    "protocol.cli": ("protocol", "protocol.base", "protocol.exact.kernels", "protocol.machine"),
    "coordinator.run.outputs": _LOGIC,
    "coordinator.run.exchange": (*_LOGIC, "coordinator.run.outputs"),
    "coordinator.run.workers": (*_LOGIC, "coordinator.run.outputs", "coordinator.run.exchange"),
    "coordinator.run": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.run.exchange", "coordinator.run.workers",
    ),
    "coordinator.disk": _LOGIC,
    "coordinator.capture": (*_LOGIC, "protocol.datasets", "coordinator.disk"),
    "coordinator.storage.log": (*_LOGIC, "coordinator.run.outputs", "coordinator.disk"),
    "coordinator.storage.directory": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.disk", "coordinator.storage.log",
    ),
    "coordinator.storage.states": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.disk", "coordinator.storage.directory",
    ),
    "coordinator.storage": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.disk", "coordinator.capture",
        *_STORAGE[:3],
    ),
    "coordinator.members": _SHELL,
    "coordinator.files": (*_LOGIC, "protocol.datasets", "coordinator.disk"),
    "coordinator.service": (
        *_SHELL, "coordinator.run", "coordinator.run.outputs", "coordinator.run.exchange",
        "coordinator.run.workers", "coordinator.disk", *_STORAGE, "coordinator.members",
        "coordinator.files",
    ),
    "coordinator.audit": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.disk", "coordinator.capture", *_STORAGE,
    ),
    "coordinator.operator": (
        *_SHELL, "protocol.datasets", "coordinator.run", "coordinator.run.outputs",
        "coordinator.run.workers", "coordinator.disk", *_STORAGE, "coordinator.members",
        "coordinator.files", "coordinator.service", "coordinator.audit",
    ),
    "coordinator.tracking": (
        *_SHELL, "coordinator.run.outputs", "coordinator.disk", *_STORAGE, "coordinator.service",
    ),
    "coordinator": ("*",),
    "worker.logic": (*_LOGIC, "backends.base"),
    "worker.join": _SHELL,
    "worker.models": (
        *_LOGIC, "protocol.datasets", "protocol.machine", "backends.base",
        "backends.losses", "backends.quantization",
    ),
    "worker.data": (*_LOGIC, "protocol.datasets", "backends.base", "worker.models"),
    "worker.distillation": (*_LOGIC, "protocol.datasets"),
    "worker.tasks.base": (*_LOGIC, "backends.base", "backends.losses", "worker.models"),
    "worker.tasks.checks": (*_LOGIC, "backends.base", "backends.checks", "worker.tasks.base"),
    "worker.tasks.small": (*_LOGIC, "backends.base", "worker.models", "worker.data"),
    "worker.tasks.language": (
        *_LOGIC, "protocol.datasets", "backends.base", "backends.losses", "worker.models",
        "worker.data",
        "worker.distillation", "worker.tasks.base",
    ),
    "worker.tasks.labels": (
        *_LOGIC, "protocol.datasets", "backends.base", "worker.models", "worker.data",
        "worker.tasks.base",
    ),
    "worker.tasks": (
        *_LOGIC, "protocol.datasets", "worker.data", "worker.tasks.base", "worker.tasks.small",
        "worker.tasks.language", "worker.tasks.labels",
    ),
    "worker.peers": (*_SHELL, "worker.logic"),
    "worker.shell": (
        *_SHELL, "protocol.exact.kernels", "backends.base", "backends.losses",
        "worker.logic", "worker.join",
        "worker.tasks.base", "worker.tasks.checks", "worker.peers",
    ),
    "worker.scripts": (
        *_LOGIC, "backends.base", "backends.losses", "backends.checks", "worker.models",
        "worker.join", "worker.tasks.base",
        "worker.tasks.checks", "worker.shell",
    ),
    "worker.results": (
        *_LOGIC, "protocol", "protocol.datasets", "backends.base", "backends.quantization",
        "worker.models",
        "worker.tasks.labels",
    ),
    "worker.torchrun": (
        "protocol.base", *_SPEC[:2], *_EXACT, "backends.base", "worker.tasks.base",
        "worker.shell",
    ),
    "worker": ("*",),
    "backends.base": (*_LOGIC, "protocol.machine"),
    "backends.losses": (*_LOGIC, "backends.base"),
    "backends.quantization": (*_LOGIC, "protocol.machine", "backends.base"),
    "backends.checks": (*_LOGIC, "backends.base"),
    "backends.eager": (
        *_LOGIC, "protocol.machine", "backends.base", "backends.losses",
        "backends.quantization", "backends.checks",
    ),
    "backends.wgpu.graph": ("protocol.base",),
    "backends.wgpu.shaders": ("protocol.base", "backends.quantization", "backends.wgpu.graph"),
    "backends.wgpu.shaders.attention": ("backends.wgpu.graph", "backends.wgpu.shaders"),
    "backends.wgpu.shaders.matmul": ("backends.wgpu.shaders",),
    "backends.wgpu.capture": (
        "protocol.base", "backends.losses", "backends.checks", "backends.wgpu.graph",
        "backends.wgpu.shaders",
        "backends.wgpu.shaders.attention",
    ),
    "backends.wgpu.weights": (
        "protocol.base", *_SPEC[:2], "backends.quantization", "backends.wgpu.graph",
        "backends.wgpu.shaders", "backends.wgpu.capture",
    ),
    "backends.wgpu.lowering": (
        "protocol.base", "backends.wgpu.graph", *_SHADERS, "backends.wgpu.capture",
        "backends.wgpu.weights",
    ),
    "backends.wgpu.device": (
        "protocol.base", "protocol.machine", "backends.base", "backends.quantization",
        "backends.wgpu.graph", *_SHADERS,
        "backends.wgpu.capture", "backends.wgpu.weights", "backends.wgpu.lowering",
    ),
    "backends.wgpu.canonical": (
        "protocol.base", "protocol.machine", *_SHADERS, "backends.wgpu.lowering",
        "backends.wgpu.device",
    ),
    "backends.wgpu": (
        "protocol.base", *_SPEC[:2], *_EXACT, "protocol.machine", "backends.base",
        "backends.losses", "backends.checks",
        "backends.wgpu.graph", *_SHADERS, "backends.wgpu.capture", "backends.wgpu.weights",
        "backends.wgpu.lowering", "backends.wgpu.device", "backends.wgpu.canonical",
    ),
    "backends": ("*",),
    "samestep.hf": (
        "protocol.base", "backends.losses", "backends.checks", "worker.tasks.checks",
        "worker.scripts", "samestep",
    ),
    "samestep": (
        *_SHELL, "backends", "backends.base", "worker", "worker.join", "worker.tasks",
        "worker.tasks.base", "worker.scripts", "worker.shell",
        "coordinator.members", "coordinator.operator",
    ),
}  # fmt: skip
"""The chapters that each chapter may import. "*", for the top of a package, allows all chapters of
the package and of the packages that it may import."""

ALLOWED_PACKAGES: Final = {
    "protocol": {"protocol"},
    "backends": {"backends", "protocol"},
    "coordinator": {"coordinator", "protocol"},
    "worker": {"worker", "backends", "protocol"},
    "samestep": {"samestep", "worker", "backends", "protocol", "coordinator"},
}

PURE_CHAPTERS: Final = (
    "protocol.exact.kernels", *_EXACT, "worker.logic",
    "coordinator.run", "coordinator.run.outputs",
    "coordinator.run.exchange", "coordinator.run.workers",
)  # fmt: skip
"""Chapters whose modules, and everything that they import, use no clock, socket, file, thread or
random source."""

PURE_MODULES: Final = (
    "protocol.wire.connection", "protocol.wire.frames", "worker.peers.gradient_exchange",
)  # fmt: skip
"""Pure modules in chapters that also do I/O."""


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module of the product by dotted name; that of `__init__.py` is the
    package's."""
    path_by_name = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            path_by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return path_by_name


def chapter_of(name: str, path: Path) -> str:
    """Return the chapter of a module."""
    return name if path.name == "__init__.py" else name.rsplit(".", 1)[0]


@lru_cache(1)  # millions of nodes over all modules would slow down every garbage collection
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's source, like `ast.walk` in half its time."""
    all_nodes: list[ast.AST] = [ast.parse(source)]
    for node in all_nodes:  # the list grows during the loop
        for value in vars(node).values():
            if isinstance(value, list):
                all_nodes += (child for child in value if isinstance(child, ast.AST))
            elif isinstance(value, ast.AST) and value._fields:
                all_nodes.append(value)
    return tuple(all_nodes)


@cache
def imports_of(source: str) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """Return line, module and names of every absolute import of a module, in functions too."""
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            imports += ((node.lineno, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports.append((node.lineno, node.module, tuple(alias.name for alias in node.names)))
    return tuple(imports)


@cache
def imports_between_modules() -> dict[str, set[str]]:
    """Return, for each module of the product, the modules of the product that it imports."""
    path_by_name = modules()
    graph: dict[str, set[str]] = {name: set() for name in path_by_name}
    for name, path in path_by_name.items():
        for _, module, names in imports_of(path.read_text("utf-8")):
            submodules = {f"{module}.{imported}" for imported in names} & path_by_name.keys()
            graph[name] |= submodules or ({module} & path_by_name.keys())
    return graph


@cache
def arrows() -> dict[tuple[str, str], set[str]]:
    """Return the modules of the first chapter that import the second, for each pair of chapters."""
    path_by_name = modules()
    importing_modules: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, targets in imports_between_modules().items():
        for target in targets:
            pair = chapter_of(name, path_by_name[name]), chapter_of(target, path_by_name[target])
            if pair[0] != pair[1]:
                importing_modules[pair].add(name)
    return importing_modules


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Return everything that `start` leads to, including itself."""
    visited, pending = {start}, [start]
    while pending:
        new_targets = graph.get(pending.pop(), set()) - visited
        visited |= new_targets
        pending += new_targets
    return visited


def cycles() -> list[tuple[str, str]]:
    """Return the arrows between chapters that are part of a cycle."""
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target in arrows():
        graph[source].add(target)
    return [(a, b) for a, b in sorted(arrows()) if a in reachable(b, graph)]


def module_cycles() -> list[str]:
    """Return modules that import themselves through others, including imports for type checking."""
    graph = imports_between_modules()
    return [
        name for name, targets in sorted(graph.items())
        if any(name in reachable(target, graph) for target in targets)
    ]  # fmt: skip


def main() -> None:
    """Print chapters with files and lines, the arrows between them, and cycles."""
    files: dict[str, list[int]] = defaultdict(list)
    for name, path in modules().items():
        files[chapter_of(name, path)].append(path.read_text("utf-8").count("\n"))
    targets_by_chapter: dict[str, set[str]] = defaultdict(set)
    for source, target in arrows():
        targets_by_chapter[source].add(target)
    for chapter, lines in sorted(files.items()):
        print(f"{chapter:30} {len(lines) - 1:3} files {sum(lines):6} lines -> ", end="")
        print(" ".join(sorted(targets_by_chapter[chapter])) or "-")
    print(f"{sum(map(len, files.values()))} files, {sum(map(sum, files.values()))} lines")
    print("arrows in cycles:", cycles() or "none")


if __name__ == "__main__":
    main()
