"""One call of a repeated layer within a trace, recorded as a single operator.

A model is traced with its layers closed: forward and backward of each are one node, so the size
of the trace hardly grows with depth. What happens inside is traced once for each *kind* of call.
Two calls are of one kind if torch runs the same operators on tensors of the same shapes with the
same numbers, forward and backward. Each call is run on empty tensors to see that: what a layer
computes may depend on anything, its place among the layers or a count of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from backends.wgpu.capture.attention import Fuses, written_out
from backends.wgpu.capture.rewrites import Rewrites
from backends.wgpu.capture.substitution import named_tensors, substituted
from backends.wgpu.graph.opaque import LAYER_BACKWARD, LAYER_FORWARD, CallsOfTrace
from protocol.base.errors import SamestepError

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_HASHED_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor's shape and type, and whether a gradient flows through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> Like:
        """What this tensor is like."""
        floating = tensor.dtype.is_floating_point
        return Like(tuple(tensor.shape), tensor.dtype, floating and tensor.requires_grad)

    def fake(self) -> torch.Tensor:
        """A new leaf like it; made under a fake mode it holds nothing."""
        return torch.empty(self.shape, dtype=self.dtype).requires_grad_(self.differentiable)


@dataclass(slots=True, eq=False)
class LayerCall:
    """One call.

    Attributes:
        number: Its place in the trace.
        path: The layer's name in the model.
        forward: The layer's own forward.
        layer: The layer.
        inputs: Its parameters, buffers, tensor arguments, and the seed if it draws.
        names: The input that each parameter and buffer is, by name.
        outputs: What forward gives.
        leaves: Arguments, flat; a tensor is the number of its input.
        arguments: The structure of (args, kwargs).
        results: The structure of what forward gives.
        draws: Whether it has dropout; the last input is then the seed.
        fingerprint: Of the operators that forward and backward run.
        tangents: For each output, whether backward came through it; None without backward.
        checkpoint: Whether to compute forward again in backward.
        fuses: Which attention stays in one piece.
    """

    number: int
    path: str
    layer: nn.Module
    forward: Callable[..., Any]
    inputs: list[Like]
    names: dict[str, int]
    leaves: list[Any]
    arguments: pytree.TreeSpec
    checkpoint: bool = False
    fuses: Fuses = written_out
    outputs: list[Like] = field(default_factory=list)
    results: pytree.TreeSpec | None = None
    draws: bool = False
    fingerprint: str = ""
    tangents: tuple[bool, ...] | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Calls of equal kind compute the same."""
        return self.fingerprint, tuple(self.inputs), self.tangents, self.checkpoint

    def run(
        self, tensors: Sequence[torch.Tensor], seed: torch.Tensor | None = None
    ) -> tuple[list[Any], Rewrites]:
        """Forward on these inputs: flat results, and what was drawn from the seed, by default the
        last input."""
        by_name = {name: tensors[place] for name, place in self.names.items()}
        leaves = [tensors[x.place] if isinstance(x, _Place) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.arguments)
        seed = tensors[-1] if seed is None else seed
        with substituted(self.layer, by_name), Rewrites(seed, self.fuses) as rewrites:
            results, self.results = pytree.tree_flatten(self.forward(*args, **kwargs))
        return results, rewrites


@dataclass(frozen=True, slots=True)
class _Place:
    place: int


class NotOpaque(Exception):
    """The call cannot be closed: it has arguments or effects that a node cannot stand for.

    A verdict: the layer is then left open.
    """


@contextmanager
def closed_layers(
    module: nn.Module, seeds: Callable[[], torch.Tensor], *, checkpoint: bool, fuses: Fuses
) -> Iterator[list[LayerCall]]:
    """While it is entered, calls of the module's repeated layers are traced as one node each.

    Args:
        module: The model.
        seeds: Gives a (2,) int32 tensor for each call that draws.
        checkpoint: Whether calls shall be computed again in backward.
        fuses: Which attention stays in one piece.
    """
    layers = dict(repeated_layers(module, ""))
    with CallsOfTrace[LayerCall]() as calls:

        def close(path: str, layer: nn.Module) -> None:
            forward = layer.forward

            def stand_in(*args: Any, **kwargs: Any) -> Any:
                try:
                    call, tensors = _described(len(calls), path, layer, forward, args, kwargs)
                    call.fuses = fuses
                    _look(call)
                except NotOpaque:
                    return forward(*args, **kwargs)
                call.checkpoint = checkpoint and torch.is_grad_enabled()
                if call.draws:
                    tensors.append(seeds())
                CallsOfTrace.add(call)
                calls.append(call)
                assert call.results is not None
                return pytree.tree_unflatten(_Closed.apply(call, *tensors), call.results)  # type: ignore[no-untyped-call]

            layer.forward = stand_in

        for path, layer in layers.items():
            close(path, layer)
        try:
            yield calls
        finally:
            for layer in layers.values():
                del layer.forward


def repeated_layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists of like layers, by their names."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList) and _alike(child):
            yield from ((f"{path}.{number}", layer) for number, layer in enumerate(child))
        else:
            yield from repeated_layers(child, f"{path}.")


def _alike(layers: Iterable[nn.Module]) -> bool:
    every = list(layers)
    return (
        len(every) > 1
        and len({type(layer) for layer in every}) == 1
        and len({id(layer) for layer in every}) == len(every)
        and type(every[0]).forward is not nn.Module.forward
        and all("forward" not in vars(layer) for layer in every)
    )


class _Closed(torch.autograd.Function):
    """The node of a call, and of its backward."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = LAYER_FORWARD(list(tensors), call.number)
        pairs = zip(results, call.outputs, strict=True)
        ctx.mark_non_differentiable(*(x for x, like in pairs if not like.differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        call: LayerCall = ctx.call
        call.tangents = tuple(t is not None for t in tangents)
        grads = iter(LAYER_BACKWARD([t for t in tangents if t is not None], call.number))
        return None, *(next(grads) if like.differentiable else None for like in call.inputs)


def _described(  # noqa: PLR0917
    number: int,
    path: str,
    layer: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[LayerCall, list[torch.Tensor]]:
    """The call, and its inputs."""
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}

    def place(tensor: torch.Tensor) -> int:
        if id(tensor) not in places:
            places[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return places[id(tensor)]

    names = {name: place(tensor) for name, tensor in named_tensors(layer).items()}
    flat, arguments = pytree.tree_flatten((args, dict(kwargs)))
    leaves: list[Any] = []
    for leaf in flat:
        if isinstance(leaf, torch.Tensor):
            leaves.append(_Place(place(leaf)))
        elif isinstance(leaf, _PLAIN):
            leaves.append(leaf)
        else:
            raise NotOpaque
    inputs = [Like.of(tensor) for tensor in tensors]
    return LayerCall(number, path, layer, forward, inputs, names, leaves, arguments), tensors


def _look(call: LayerCall) -> None:
    """See what the call does, forward and backward, by running it on empty tensors."""
    with disable_proxy_modes_tracing():
        results, rewrites, call.fingerprint = _run_empty(call)
    call.outputs = [Like.of(x) for x in results]
    if rewrites.draws.sites:
        call.draws = True
        call.inputs = [*call.inputs, Like((2,), torch.int32)]


def refuse_changed(call: LayerCall) -> None:
    """A call computes the same when it is traced as when it was first seen.

    Raises:
        SamestepError: It does not: its forward counts calls, say.
    """
    try:
        now = _run_empty(call)[2]
    except NotOpaque:
        now = ""
    if now != call.fingerprint:
        raise SamestepError(
            f"{call.path} computes something else each time it is called, by a state of its own; "
            "the vulkan backend cannot capture it: use a cpu or cuda worker for this model"
        )


def _run_empty(call: LayerCall) -> tuple[list[torch.Tensor], Rewrites, str]:
    """What it gives, what it drew, and the fingerprint of all that ran.

    Raises:
        NotOpaque: No node can stand for it.
    """
    likes = call.inputs[:-1] if call.draws else call.inputs
    fakes = [like.fake() for like in likes]
    with _Fingerprint(fakes) as fingerprint:
        results, rewrites = call.run(fakes, torch.empty(2, dtype=torch.int32))
        if not results or not all(isinstance(x, torch.Tensor) for x in results):
            raise NotOpaque
        fingerprint.add("results", [fingerprint.number(x) for x in results], call.results)
        fingerprint.add("backward", *_backward(results, fingerprint))
        fingerprint.add("gradients", _gradients(results, fakes, fingerprint))
    return results, rewrites, fingerprint.digest()


def _nodes(results: Sequence[torch.Tensor]) -> dict[Any, int]:
    """Of the graph by which gradients will flow, numbered as they are reached."""
    numbers: dict[Any, int] = {}
    waiting: list[Any] = [x.grad_fn for x in results]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in numbers:
            numbers[node] = len(numbers)
            waiting += [source_of for source_of, _ in node.next_functions]
    return numbers


def _backward(results: Sequence[torch.Tensor], fingerprint: _Fingerprint) -> Iterator[object]:
    """What each node is and what it passes gradients to.

    What a node of torch's own computes is told by its operator, which is hashed where it ran.
    """
    numbers = _nodes(results)
    yield [numbers.get(x.grad_fn) for x in results]
    for node in numbers:
        leaf = getattr(node, "variable", None)
        yield node.name(), None if leaf is None else fingerprint.number(leaf)
        yield [(numbers.get(source_of), place) for source_of, place in node.next_functions]


def _gradients(
    results: Sequence[torch.Tensor], fakes: Sequence[torch.Tensor], fingerprint: _Fingerprint
) -> list[int | None]:
    """Run backward too, where a function of the model's own says what it computes."""
    if not any(isinstance(node, BackwardCFunction) for node in _nodes(results)):
        return []
    reached = [x for x in results if x.requires_grad]
    wanted = [x for x in fakes if x.requires_grad]
    tangents = [torch.empty_like(x) for x in reached]
    grads: Sequence[torch.Tensor | None]
    grads = [*torch.autograd.grad(reached, wanted, tangents, allow_unused=True)]
    return [None if x is None else fingerprint.number(x) for x in grads]


class _Fingerprint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hashes the operators that run, with tensors numbered as they appear."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hash = blake3()
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # so that no id is used twice
        self._inputs = len(inputs)
        for tensor in inputs:
            self.number(tensor)

    def number(self, tensor: torch.Tensor) -> int:
        """The tensor's own; a new one for a tensor not seen before."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._kept.append(tensor)
        return self._numbers[id(tensor)]

    def add(self, *facts: object) -> None:
        """Hash these."""
        self._hash.update(repr(facts).encode())

    def digest(self) -> str:
        """Of all that ran."""
        return self._hash.hexdigest()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Hash one operator and run it."""
        del types
        result = func(*args, **(kwargs or {}))
        flat, structure = pytree.tree_flatten((args, dict(kwargs or {})))
        self.add(str(func), [self._argument(func, x) for x in flat], str(structure))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(self.number(tensor), tuple(tensor.shape), tensor.dtype)
        return result

    def _argument(self, func: Any, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        known = id(value) in self._numbers
        number = self.number(value)
        if number < self._inputs and func._schema.is_mutable:  # noqa: SLF001
            raise NotOpaque
        if known:
            return number
        if isinstance(value, torch._subclasses.FakeTensor):  # noqa: SLF001
            raise NotOpaque  # of the model around it, which no input stands for
        if value.numel() > _HASHED_ELEMENTS:
            raise NotOpaque
        with unset_fake_temporarily():  # a constant of forward: the mode would hide its values
            return number, value.detach().cpu().numpy().tobytes(), str(value.dtype)
