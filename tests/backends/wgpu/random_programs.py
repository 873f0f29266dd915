"""Random small torch modules, as the text of a Python file that reproduces a failure.

A program grows one line at a time. Each line applies an operator of `operators.txt` to existing
values, and runs immediately on real tensors. So torch accepts every program, and this module needs
no shape rules.
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

MAX_ELEMENTS: Final = 600
"""Limit on the elements of a value."""
_INTEGER_TYPES: Final = {torch.int64, torch.int32, torch.uint8, torch.int16, torch.int8}


def _sections(text: str) -> Iterator[list[str]]:
    """Yield the operators of each section, repeated by the section's weight."""
    for section in text.split("\n[")[1:]:
        head, *lines = section.splitlines()
        weight = int(head.rstrip("]").rpartition(":")[2])
        yield from [[line for line in lines if line]] * weight


_OPERATOR_GROUPS: Final = [*_sections((Path(__file__).parent / "operators.txt").read_text("utf-8"))]
_NUMBERS: Final = (0.5, -1.5, 2.0, 0.1, -0.3, 3.0)
_PLACEHOLDERS: Final = re.compile(r"\{([a-z])\}")


@dataclass(frozen=True, slots=True)
class ProgramText:
    """The lines of a program, and its options.

    Attributes:
        init: Lines of `__init__`, which create modules and parameters.
        forward: Lines of `forward`.
        results: Names of the values that `forward` returns.
        shape: Shape of the inputs x, n and b.
        seed: Seed of weights and data.
        layers: Number of copies, as layers of a model; 0 for a single module.
        special: A special value in each batch's x, such as "nan"; empty if there is none.
    """

    init: tuple[str, ...]
    forward: tuple[str, ...]
    results: tuple[str, ...]
    shape: tuple[int, ...]
    seed: int
    layers: int = 0
    special: str = ""

    def class_source(self) -> str:
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
            "from tests.backends.wgpu.differential import repeat_comparison\n\n\n"
            f"{self.class_source()}\n\n"
            f"repeat_comparison(Program, {options}, special={self.special!r})\n"
        )


def define_class(source: str) -> type[torch.nn.Module]:
    """Execute a program's source and return the class that it defines."""
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    exec(source, names)
    module_type: type[torch.nn.Module] = names["Program"]
    return module_type


@dataclass(slots=True)
class _PartialProgram:
    """A program under construction: its lines, and its values by name."""

    module: Any
    names: dict[str, Any]
    init: list[str] = field(default_factory=list)
    forward: list[str] = field(default_factory=list)

    def tensor_names(self, dtypes: set[torch.dtype]) -> list[str]:
        return [
            name for name, value in self.names.items()
            if isinstance(value, torch.Tensor) and value.dtype in dtypes
        ]  # fmt: skip

    def tensor(self, name: str) -> torch.Tensor:
        value: torch.Tensor = eval(name, self.names)
        return value

    def add_line(self, line: str, lines: list[str]) -> bool:
        """Run the line and append it to `lines`; return False if torch rejects it."""
        names_before = dict(self.names)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, self.names)
        except Exception:  # noqa: BLE001 -- torch rejects a line with any exception
            self.names.clear()
            self.names.update(names_before)
            return False
        lines.append(line)
        return True


def _fill_template(draw: Any, template: str, partial: _PartialProgram) -> tuple[str, str] | None:
    """Return the first tensor and the line; None if the program lacks a suitable value."""
    texts: dict[str, str] = {}
    floats = partial.tensor_names({torch.float32})
    recent = floats[-3:]
    first = draw(st.sampled_from(recent if draw(st.integers(0, 3)) else floats))

    def fill(match: re.Match[str]) -> str:
        letter = match[1]
        if letter not in texts:
            texts[letter] = str(_draw_value(draw, letter, partial, first))
        return texts[letter]

    try:
        return first, _PLACEHOLDERS.sub(fill, template)
    except LookupError:
        return None


def _draw_value(draw: Any, letter: str, partial: _PartialProgram, first: str) -> object:
    """Draw the value of a placeholder, as `operators.txt` defines its letter.

    Raises:
        LookupError: The program has no value of the required type.
    """
    first_tensor = partial.tensor(first)
    dimensions = max(first_tensor.dim(), 1)
    if letter in "fv":
        return first
    if letter == "g":
        floats = partial.tensor_names({torch.float32})
        candidates = [x for x in floats if _can_broadcast(partial.tensor(x), first_tensor)]
        return draw(st.sampled_from(candidates or floats))
    if letter in "nb":
        existing = partial.tensor_names(_INTEGER_TYPES if letter == "n" else {torch.bool})
        candidates = [x for x in existing if _can_broadcast(partial.tensor(x), first_tensor)]
        if not existing:
            raise LookupError
        return draw(st.sampled_from(candidates or existing))
    if letter in "de":
        return draw(st.integers(-dimensions, dimensions - 1))
    if letter == "w":
        return first_tensor.shape[-1] if first_tensor.dim() else 1
    if letter == "o":
        return first_tensor.shape[0] if first_tensor.dim() else 1
    if letter == "r":
        return _draw_shape(draw, first_tensor.numel())
    if letter in "hi":  # the second dimension, or the second to last
        return first_tensor.shape[1 if letter == "h" else -2]
    strategies: dict[str, Any] = {
        "k": st.integers(1, 3),
        "z": st.integers(0, 2),
        "s": st.integers(-3, 5),
        "c": st.sampled_from(_NUMBERS),
        "p": st.sampled_from((0.1, 0.5, 0.0)),
        "t": st.booleans(),
    }
    return draw(strategies[letter])


def _can_broadcast(first: torch.Tensor, second: torch.Tensor) -> bool:
    try:
        torch.broadcast_shapes(first.shape, second.shape)
    except RuntimeError:
        return False
    return True


def _draw_shape(draw: Any, elements: int) -> tuple[int, ...]:
    factors = [k for k in range(1, elements + 1) if elements % k == 0] or [1]
    factor = draw(st.sampled_from(factors))
    if draw(st.booleans()):
        return (factor, elements // factor)
    return (elements // factor, 1, factor)


def _draw_call(
    draw: Any, name: str, constructor: str, first: str, partial: _PartialProgram
) -> str | None:
    """Draw a call of a module; return None if no value suits the module."""
    if constructor.startswith("nn.Embedding"):
        integers = partial.tensor_names({torch.int64})
        if not integers:
            return None
        return f"{name}({draw(st.sampled_from(integers))}.clamp(0, 3))"
    if constructor.startswith("nn.MultiheadAttention"):
        return f"{name}({first}, {first}, {first})[0]"
    if constructor.startswith("nn.Bilinear"):
        return f"{name}({first}, {first})"
    selector = "[0]" if constructor.startswith(("nn.LSTM", "nn.GRU", "nn.RNN(")) else ""
    return f"{name}({first}){selector}"


def _add_operator(draw: Any, partial: _PartialProgram, number: int) -> None:
    """Draw one operator, and add its lines to the program if torch accepts them."""
    group = draw(st.sampled_from(_OPERATOR_GROUPS))
    template = draw(st.sampled_from(group))
    new_name = f"v{number}"
    first_and_line = _fill_template(draw, template, partial)
    if first_and_line is None:
        return
    first, line = first_and_line
    if line.startswith("nn."):
        name = f"self.m{number}"
        if not partial.add_line(f"{name} = {line}", partial.init):
            return
        call = _draw_call(draw, name, line, first, partial)
        if call is None or not partial.add_line(f"{new_name} = {call}", partial.forward):
            partial.init.pop()
            delattr(partial.module, f"m{number}")
    elif "{v}" in template:
        target = line.split(".", 1)[0].split("[", 1)[0]
        if target[0] != "v" or draw(st.booleans()):
            partial.add_line(f"{new_name} = {target} * 1", partial.forward)
            line = re.sub(rf"\b{target}\b", new_name, line, count=1)
        partial.add_line(line, partial.forward)
    else:
        partial.add_line(f"{new_name} = {line}", partial.forward)
    value = partial.names.get(new_name)
    if value is not None and (
        not isinstance(value, torch.Tensor) or not 0 < value.numel() <= MAX_ELEMENTS
    ):
        del partial.names[new_name]
        partial.forward.pop()


def random_inputs(shape: tuple[int, ...], seed: int, special: str = "") -> dict[str, torch.Tensor]:
    """Return a random batch: floats x with one special value, integers n in 0 to 3, booleans b."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 1.5
    if special:
        x.view(-1)[x.numel() // 2] = float(special)
    n = torch.randint(0, 4, shape, generator=generator)
    return {"x": x, "n": n, "b": torch.rand(shape, generator=generator) > 0.4}


@st.composite
def programs(draw: Any, max_lines: int = 8) -> ProgramText:
    """Draw a program that torch accepts."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    seed = draw(st.integers(0, 9999))
    layers = draw(st.sampled_from((0, 0, 0, 0, 3)))
    special = draw(st.sampled_from(("",) * 12 + ("nan", "inf", "-inf", "1e30", "-0.0")))
    torch.manual_seed(seed)
    module = torch.nn.Module()
    module.number = module.layer_idx = 0  # type: ignore[assignment]
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    partial = _PartialProgram(
        module, names | {"self": module} | random_inputs(shape, seed, special)
    )
    for number in range(draw(st.integers(1, 2))):
        sizes = shape[draw(st.integers(0, len(shape) - 1)) :]
        partial.add_line(f"self.p{number} = nn.Parameter(torch.randn{sizes})", partial.init)
        partial.add_line(f"w{number} = self.p{number}", partial.forward)
    partial.add_line("v0 = x * w0", partial.forward)
    lines = draw(st.integers(1, max_lines))
    for number in range(1, 3 * lines + 1):
        if len(partial.forward) > lines + 2:
            break
        _add_operator(draw, partial, number)
    floats = [name for name in partial.tensor_names({torch.float32}) if name.startswith("v")]
    results = tuple(floats[-3:])
    if not any(partial.tensor(name).requires_grad for name in results):
        results = (*results, next(n for n in floats[::-1] if partial.tensor(n).requires_grad))
    init, forward = tuple(partial.init), tuple(partial.forward)
    return ProgramText(init, forward, results, shape, seed, layers, special)


def shrink(program: ProgramText, fails: Callable[[ProgramText], bool]) -> ProgramText:
    """Remove options, results and lines as long as the program still fails."""
    for smaller in _smaller_programs(program):
        if fails(smaller):
            return shrink(smaller, fails)
    return program


def _smaller_programs(program: ProgramText) -> Iterator[ProgramText]:
    if program.layers:
        yield replace(program, layers=0)
    if program.special:
        yield replace(program, special="")
    for name in program.results:
        if len(program.results) > 1:
            yield replace(program, results=(name,))
    for method in ("forward", "init"):
        lines = getattr(program, method)
        for number in reversed(range(len(lines))):
            yield replace(program, **{method: lines[:number] + lines[number + 1 :]})
