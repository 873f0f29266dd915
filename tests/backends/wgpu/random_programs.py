"""Random small torch modules, as the text of a Python file that reproduces a finding.

A program grows one line at a time. Each line is an operator of `operators.txt` on existing values.
It runs immediately on real tensors. Torch therefore accepts every program, and the shapes of
results need no rules here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from hypothesis import strategies as st

MOST_ELEMENTS: Final = 600
_INTEGERS: Final = {torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8}


def _sections(text: str) -> Iterator[list[str]]:
    """Yield the operators of each section, as often as the section's weight."""
    for section in text.split("\n[")[1:]:
        head, *lines = section.splitlines()
        times = int(head.rstrip("]").rpartition(":")[2])
        yield from [[line for line in lines if line]] * times


_CHOICES: Final = [*_sections((Path(__file__).parent / "operators.txt").read_text("utf-8"))]
_NUMBERS: Final = (0.5, -1.5, 2.0, 0.1, -0.3, 3.0)
_HOLES: Final = re.compile(r"\{([a-z])\}")


@dataclass(frozen=True, slots=True)
class Text:
    """A program.

    Attributes:
        init: Lines of `__init__`, which create modules and parameters.
        forward: Lines of `forward`.
        results: Names of the values that it returns.
        shape: Shape of the inputs x, n and b.
        seed: Seed of weights and data.
        layers: Number of copies, as layers of a model; 0 for a single module.
        special: A value that occurs once in the data; empty without one.
    """

    init: tuple[str, ...]
    forward: tuple[str, ...]
    results: tuple[str, ...]
    shape: tuple[int, ...]
    seed: int
    layers: int = 0
    special: str = ""

    def module(self) -> str:
        """Return the source of the class."""
        lines = ["class Program(nn.Module):", "    def __init__(self, number=0):"]
        lines += ["        super().__init__()", "        self.number = self.layer_idx = number"]
        lines += [f"        {line}" for line in self.init]
        lines += ["", "    def forward(self, x, n, b):"]
        lines += [f"        {line}" for line in self.forward]
        return "\n".join([*lines, f"        return [{', '.join(self.results)}]", ""])

    def __str__(self) -> str:
        options = f"shape={self.shape}, seed={self.seed}, layers={self.layers}"
        return (
            "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
            "from tests.backends.wgpu.differential import repeat\n\n\n"
            f"{self.module()}\n\nrepeat(Program, {options}, special={self.special!r})\n"
        )


def make(text: str) -> type[torch.nn.Module]:
    """Return the class that a program's text defines."""
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    exec(text, names)
    module_type: type[torch.nn.Module] = names["Program"]
    return module_type


@dataclass(slots=True)
class _PartialProgram:
    """An incomplete program: its lines and the values that exist so far."""

    module: Any
    names: dict[str, Any]
    init: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)

    def of(self, dtypes: set[torch.dtype]) -> list[str]:
        return [
            name for name, value in self.names.items()
            if isinstance(value, torch.Tensor) and value.dtype in dtypes
        ]  # fmt: skip

    def tensor(self, name: str) -> torch.Tensor:
        value: torch.Tensor = eval(name, self.names)
        return value

    def run(self, line: str, lines: list[str]) -> bool:
        """Add the line to the program if torch accepts it; return whether it does."""
        before = dict(self.names)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, self.names)
        except Exception:  # noqa: BLE001 -- torch rejects a line with any exception
            self.names.clear()
            self.names.update(before)
            return False
        lines.append(line)
        return True


def _fill_template(draw: Any, template: str, partial: _PartialProgram) -> tuple[str, str] | None:
    names: dict[str, str] = {}
    floats = partial.of({torch.float32})
    recent = floats[-3:]
    first = draw(st.sampled_from(recent if draw(st.integers(0, 3)) else floats))
    like = partial.tensor(first)
    size = max(like.dim(), 1)

    def hole(match: re.Match[str]) -> str:
        kind = match[1]
        if kind not in names:
            names[kind] = str(_hole(draw, kind, partial, first, like, size))
        return names[kind]

    try:
        return first, _HOLES.sub(hole, template)
    except LookupError:
        return None


def _hole(  # noqa: PLR0917
    draw: Any, kind: str, partial: _PartialProgram, first: str, like: torch.Tensor, size: int
) -> object:
    if kind in "fv":
        return first
    if kind == "g":
        floats = partial.of({torch.float32})
        candidates = [x for x in floats if _can_broadcast(partial.tensor(x), like)]
        return draw(st.sampled_from(candidates or floats))
    if kind in "nb":
        existing = partial.of(_INTEGERS if kind == "n" else {torch.bool})
        candidates = [x for x in existing if _can_broadcast(partial.tensor(x), like)]
        if not existing:
            raise LookupError
        return draw(st.sampled_from(candidates or existing))
    if kind in "de":
        return draw(st.integers(-size, size - 1))
    if kind == "w":
        return like.shape[-1] if like.dim() else 1
    if kind == "o":
        return like.shape[0] if like.dim() else 1
    if kind == "r":
        return _draw_shape(draw, like.numel())
    if kind in "hi":  # the second dimension, or the last but one
        return like.shape[1 if kind == "h" else -2]
    simple: dict[str, Any] = {
        "k": st.integers(1, 3),
        "z": st.integers(0, 2),
        "s": st.integers(-3, 5),
        "c": st.sampled_from(_NUMBERS),
        "p": st.sampled_from((0.1, 0.5, 0.0)),
        "t": st.booleans(),
    }
    return draw(simple[kind])


def _can_broadcast(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        torch.broadcast_shapes(one.shape, other.shape)
    except RuntimeError:
        return False
    return True


def _draw_shape(draw: Any, elements: int) -> tuple[int, ...]:
    factors = [k for k in range(1, elements + 1) if elements % k == 0] or [1]
    one = draw(st.sampled_from(factors))
    return (one, elements // one) if draw(st.booleans()) else (elements // one, 1, one)


def _draw_call(draw: Any, name: str, part: str, like: str, partial: _PartialProgram) -> str | None:
    """Draw a call of a module; return None if no value suits it."""
    if part.startswith("nn.Embedding"):
        numbers = partial.of({torch.int64})
        if not numbers:
            return None
        return f"{name}({draw(st.sampled_from(numbers))}.clamp(0, 3))"
    if part.startswith("nn.MultiheadAttention"):
        return f"{name}({like}, {like}, {like})[0]"
    if part.startswith("nn.Bilinear"):
        return f"{name}({like}, {like})"
    selector = "[0]" if part.startswith(("nn.LSTM", "nn.GRU", "nn.RNN(")) else ""
    return f"{name}({like}){selector}"


def _add_operator(draw: Any, partial: _PartialProgram, number: int) -> None:
    """Draw one operator, and add its lines to the program if torch accepts them."""
    group = draw(st.sampled_from(_CHOICES))
    template = draw(st.sampled_from(group))
    new = f"v{number}"
    filled = _fill_template(draw, template, partial)
    if filled is None:
        return
    like, line = filled
    if line.startswith("nn."):
        name = f"self.m{number}"
        if not partial.run(f"{name} = {line}", partial.init):
            return
        call = _draw_call(draw, name, line, like, partial)
        if call is None or not partial.run(f"{new} = {call}", partial.forward):
            partial.init.pop()
            delattr(partial.module, f"m{number}")
    elif "{v}" in template:
        target = line.split(".", 1)[0].split("[", 1)[0]
        if target[0] != "v" or draw(st.booleans()):
            partial.run(f"{new} = {target} * 1", partial.forward)
            line = re.sub(rf"\b{target}\b", new, line, count=1)
        partial.run(line, partial.forward)
    else:
        partial.run(f"{new} = {line}", partial.forward)
    value = partial.names.get(new)
    if value is not None and (
        not isinstance(value, torch.Tensor) or not 0 < value.numel() <= MOST_ELEMENTS
    ):
        del partial.names[new]
        partial.forward.pop()


def data_of(shape: tuple[int, ...], seed: int, special: str = "") -> dict[str, torch.Tensor]:
    """Draw a microbatch: floats, small integers, booleans."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draws) * 1.5
    if special:
        x.view(-1)[x.numel() // 2] = float(special)
    n = torch.randint(0, 4, shape, generator=draws)
    return {"x": x, "n": n, "b": torch.rand(shape, generator=draws) > 0.4}


@st.composite
def programs(draw: Any, most_lines: int = 8) -> Text:
    """Draw a program whose forward torch accepts."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    seed = draw(st.integers(0, 9999))
    layers = draw(st.sampled_from((0, 0, 0, 0, 3)))
    special = draw(st.sampled_from(("",) * 12 + ("nan", "inf", "-inf", "1e30", "-0.0")))
    torch.manual_seed(seed)
    module = torch.nn.Module()
    module.number = module.layer_idx = 0  # type: ignore[assignment]
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    partial = _PartialProgram(module, names | {"self": module} | data_of(shape, seed, special))
    for number in range(draw(st.integers(1, 2))):
        sizes = shape[draw(st.integers(0, len(shape) - 1)) :]
        partial.run(f"self.p{number} = nn.Parameter(torch.randn{sizes})", partial.init)
        partial.run(f"w{number} = self.p{number}", partial.forward)
    partial.run("v0 = x * w0", partial.forward)
    lines = draw(st.integers(1, most_lines))
    for number in range(1, 3 * lines + 1):
        if len(partial.forward) > lines + 2:
            break
        _add_operator(draw, partial, number)
    floats = [name for name in partial.of({torch.float32}) if name.startswith("v")]
    results = tuple(floats[-3:])
    if not any(partial.tensor(name).requires_grad for name in results):
        results = (*results, next(n for n in floats[::-1] if partial.tensor(n).requires_grad))
    return Text(tuple(partial.init), tuple(partial.forward), results, shape, seed, layers, special)


def shrunk(text: Text, fails: Callable[[Text], bool]) -> Text:
    """Remove results and lines while `fails` holds of the smaller program."""
    for smaller in _smaller(text):
        if fails(smaller):
            return shrunk(smaller, fails)
    return text


def _smaller(text: Text) -> Iterator[Text]:
    if text.layers:
        yield replace(text, layers=0)
    if text.special:
        yield replace(text, special="")
    for name in text.results:
        if len(text.results) > 1:
            yield replace(text, results=(name,))
    for kind in ("forward", "init"):
        lines = getattr(text, kind)
        for number in reversed(range(len(lines))):
            yield replace(text, **{kind: lines[:number] + lines[number + 1 :]})
