"""The structure of the product, read from its imports: `python -m tests.house` prints it.

A room is a folder of modules. The table says which rooms a room may import; `test_tidy.py` holds
the tree to it, and to what is pure.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("protocol", "backends", "coordinator", "worker", "samestep")

_PROTOCOL: Final = ("protocol", "protocol.base", "protocol.spec", "protocol.exact", "protocol.wire")
_LOGIC: Final = _PROTOCOL[1:]
_SHELL: Final = (*_PROTOCOL, "protocol.host", "protocol.command")
_KEPT: Final = (
    "coordinator.storage.log", "coordinator.storage.directory", "coordinator.storage.states",
    "coordinator.storage",
)  # fmt: skip

_SHADERS: Final = (
    "backends.wgpu.shaders", "backends.wgpu.shaders.attention", "backends.wgpu.shaders.matmul",
)  # fmt: skip

MAY_IMPORT: Final[dict[str, tuple[str, ...]]] = {
    "protocol": (),
    "protocol.base": (),
    "protocol.spec": ("protocol.base",),
    "protocol.data": ("protocol.base", "protocol.spec"),
    "protocol.exact": ("protocol.base", "protocol.spec"),
    "protocol.wire": ("protocol", "protocol.base", "protocol.spec", "protocol.exact"),
    "protocol.host": ("protocol", "protocol.base"),
    "protocol.command": ("protocol", "protocol.base", "protocol.host"),
    "coordinator.run.outputs": _LOGIC,
    "coordinator.run.exchange": (*_LOGIC, "coordinator.run.outputs"),
    "coordinator.run.workers": (*_LOGIC, "coordinator.run.outputs", "coordinator.run.exchange"),
    "coordinator.run.held_out": (*_LOGIC, "coordinator.run.outputs", "coordinator.run.workers"),
    "coordinator.run": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.run.exchange", "coordinator.run.workers",
        "coordinator.run.held_out",
    ),
    "coordinator.disk": _LOGIC,
    "coordinator.capture": (*_LOGIC, "protocol.data", "coordinator.disk"),
    "coordinator.storage.log": (*_LOGIC, "coordinator.run.outputs", "coordinator.disk"),
    "coordinator.storage.directory": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.disk", "coordinator.storage.log",
    ),
    "coordinator.storage.states": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.disk", "coordinator.storage.directory",
    ),
    "coordinator.storage": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.disk", "coordinator.capture", *_KEPT[:3],
    ),
    "coordinator.members": _SHELL,
    "coordinator.files": (*_LOGIC, "protocol.data", "coordinator.disk"),
    "coordinator.service": (
        *_SHELL, "coordinator.run", "coordinator.run.outputs", "coordinator.run.exchange",
        "coordinator.run.workers", "coordinator.disk", *_KEPT, "coordinator.members",
        "coordinator.files",
    ),
    "coordinator.audit": (
        *_LOGIC, "coordinator.run.outputs", "coordinator.disk", "coordinator.capture", *_KEPT,
    ),
    "coordinator.operator": (
        *_SHELL, "protocol.data", "coordinator.run", "coordinator.run.outputs",
        "coordinator.run.workers", "coordinator.disk", *_KEPT, "coordinator.members",
        "coordinator.files", "coordinator.service", "coordinator.audit",
    ),
    "coordinator.doctor": (
        *_SHELL, "coordinator.disk", *_KEPT, "coordinator.members", "coordinator.service",
    ),
    "coordinator.tracking": (
        *_SHELL, "coordinator.run.outputs", "coordinator.disk", *_KEPT, "coordinator.service",
    ),
    "coordinator": ("*",),
    "worker.logic": (*_LOGIC, "backends.base"),
    "worker.joining": _SHELL,
    "worker.models": (*_LOGIC, "protocol.data", "protocol.host", "backends.base"),
    "worker.data": (*_LOGIC, "protocol.data", "backends.base", "worker.models"),
    "worker.distillation": (*_LOGIC, "protocol.data"),
    "worker.tasks": (
        *_LOGIC, "protocol.data", "backends.base", "worker.models", "worker.data",
        "worker.distillation",
    ),
    "worker.peers": _SHELL,
    "worker.shell": (
        *_SHELL, "backends.base", "worker.logic", "worker.joining", "worker.tasks", "worker.peers",
    ),
    "worker.after": (
        *_LOGIC, "protocol", "protocol.data", "backends.base", "worker.models", "worker.tasks",
    ),
    "worker.ranks": (
        "protocol.base", "protocol.spec", "protocol.exact", "backends.base", "worker.tasks",
        "worker.shell",
    ),
    "worker": ("*",),
    "backends.base": _LOGIC,
    "backends.eager": (*_LOGIC, "protocol.host", "backends.base"),
    "backends.wgpu.graph": ("protocol.base",),
    "backends.wgpu.shaders": ("protocol.base", "backends.base", "backends.wgpu.graph"),
    "backends.wgpu.shaders.attention": ("backends.wgpu.graph", "backends.wgpu.shaders"),
    "backends.wgpu.shaders.matmul": ("backends.wgpu.shaders",),
    "backends.wgpu.capture": (
        "protocol.base", "backends.base", "backends.wgpu.graph", "backends.wgpu.shaders",
        "backends.wgpu.shaders.attention",
    ),
    "backends.wgpu.weights": (
        "protocol.base", "protocol.spec", "backends.base", "backends.wgpu.graph",
        "backends.wgpu.shaders", "backends.wgpu.capture",
    ),
    "backends.wgpu.lowering": (
        "protocol.base", "backends.wgpu.graph", *_SHADERS, "backends.wgpu.capture",
        "backends.wgpu.weights",
    ),
    "backends.wgpu.device": (
        "protocol.base", "protocol.host", "backends.base", "backends.wgpu.graph", *_SHADERS,
        "backends.wgpu.capture", "backends.wgpu.weights", "backends.wgpu.lowering",
    ),
    "backends.wgpu.canonical": (
        "protocol.base", "protocol.host", *_SHADERS, "backends.wgpu.lowering",
        "backends.wgpu.device",
    ),
    "backends.wgpu": (
        "protocol.base", "protocol.spec", "protocol.exact", "protocol.host", "backends.base",
        "backends.wgpu.graph", *_SHADERS, "backends.wgpu.capture", "backends.wgpu.weights",
        "backends.wgpu.lowering", "backends.wgpu.device", "backends.wgpu.canonical",
    ),
    "backends": ("*",),
    "samestep.hf": ("protocol.base", "backends.base", "worker.tasks", "samestep"),
    "samestep": (
        *_SHELL, "backends", "backends.base", "worker.models", "worker.joining", "worker.tasks",
        "worker.shell", "coordinator.members", "coordinator.operator",
    ),
}  # fmt: skip
"""Which rooms a room may import; "*" at the top of a package: all of its own, and those that its
package may."""

PACKAGE_MAY: Final = {
    "protocol": {"protocol"},
    "backends": {"backends", "protocol"},
    "coordinator": {"coordinator", "protocol"},
    "worker": {"worker", "backends", "protocol", "samestep"},
    "samestep": {"samestep", "worker", "backends", "protocol", "coordinator"},
}

PURE: Final = (
    "protocol.exact", "worker.logic", "coordinator.run", "coordinator.run.outputs",
    "coordinator.run.exchange", "coordinator.run.workers", "coordinator.run.held_out",
)  # fmt: skip
"""Rooms whose modules read no clock, socket, file, thread or random source, nor does what they
import."""

PURE_MODULES: Final = (
    "protocol.wire.connection", "protocol.wire.frames", "worker.peers.share",
)  # fmt: skip
"""Likewise, in a room that also does I/O."""


def modules() -> dict[str, Path]:
    """Every module of the product, by dotted name; a package's `__init__` by the package's."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(name: str, path: Path) -> str:
    """The room that a module is in."""
    return name if path.name == "__init__.py" else name.rsplit(".", 1)[0]


@lru_cache(1)  # of all modules together they are millions, and whatever collects garbage meets them
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All that a module's text consists of."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def imported(source: str) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """Line, module and names of every absolute import, wherever it stands."""
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.lineno, node.module, tuple(alias.name for alias in node.names)))
    return tuple(found)


def imports_between_modules() -> dict[str, set[str]]:
    """For each module of the product those of the product that it imports."""
    known = modules()
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for _, module, names in imported(path.read_text("utf-8")):
            within = {f"{module}.{each}" for each in names} & known.keys()
            found[name] |= within or ({module} & known.keys())
    return found


def arrows() -> dict[tuple[str, str], set[str]]:
    """From room to room: the modules that import across."""
    known = modules()
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, targets in imports_between_modules().items():
        for target in targets:
            pair = room_of(name, known[name]), room_of(target, known[target])
            if pair[0] != pair[1]:
                found[pair].add(name)
    return found


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """All that `start` leads to, itself included."""
    found, waiting = {start}, [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def cycles() -> list[tuple[str, str]]:
    """Arrows between rooms from whose end the beginning can be reached."""
    graph: dict[str, set[str]] = defaultdict(set)
    for source, target in arrows():
        graph[source].add(target)
    return [(a, b) for a, b in sorted(arrows()) if a in reachable(b, graph)]


def main() -> None:
    """Print rooms with files and lines, the arrows between them, and which run back."""
    files: dict[str, list[int]] = defaultdict(list)
    for name, path in modules().items():
        files[room_of(name, path)].append(path.read_text("utf-8").count("\n"))
    leads: dict[str, set[str]] = defaultdict(set)
    for source, target in arrows():
        leads[source].add(target)
    for room, lines in sorted(files.items()):
        print(f"{room:30} {len(lines) - 1:3} files {sum(lines):6} lines -> ", end="")
        print(" ".join(sorted(leads[room])) or "-")
    print(f"{sum(map(len, files.values()))} files, {sum(map(sum, files.values()))} lines")
    print("arrows that run back:", cycles() or "none")


if __name__ == "__main__":
    main()
