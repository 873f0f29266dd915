"""A call of a repeated layer within a trace, recorded as a single operator.

A model is traced with its layers *closed*: forward and backward of a layer are one node each, so
the trace hardly grows with depth. The operators of a layer are traced once per *kind* of call. Two
calls are of the same kind if torch runs the same operators with the same shapes and constants,
forward and backward. A layer's computation may depend on anything, such as its index or a call
count, so each call is run on empty tensors to find its kind.
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

from backends.wgpu.capture.attention import AttentionPolicy, never_fuses
from backends.wgpu.capture.rewrites import Rewrites
from backends.wgpu.capture.substitution import named_tensors, substitute_tensors
from backends.wgpu.graph.opaque import LAYER_BACKWARD, LAYER_FORWARD, RegisteredCalls
from protocol.base.errors import SamestepError

_CONSTANT_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)
_HASHED_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's shape and dtype, and whether a gradient flows through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiable: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor."""
        floating = tensor.dtype.is_floating_point
        return TensorSpec(tuple(tensor.shape), tensor.dtype, floating and tensor.requires_grad)

    def fake(self) -> torch.Tensor:
        """Return a new leaf tensor; in a fake mode it has no memory."""
        return torch.empty(self.shape, dtype=self.dtype).requires_grad_(self.is_differentiable)


@dataclass(slots=True, eq=False)
class LayerCall:
    """One call of a layer.

    Attributes:
        number: Number of the call in the trace.
        path: The layer's name in the model.
        forward: The layer's original forward.
        layer: The layer.
        inputs: The layer's parameters and buffers, the tensor arguments, and the seed if it draws.
        names: Input number of each parameter and buffer, by name.
        outputs: Results of forward.
        leaves: Arguments, flat; a tensor is replaced by its input number.
        arguments: The structure of (args, kwargs).
        results: The structure of forward's results.
        has_draws: Whether the call draws random numbers; the last input is then the seed.
        fingerprint: Hash of the operators that forward and backward run.
        outputs_with_grad: For each output, whether it has a gradient in backward; None without
            backward.
        checkpoint: Whether backward recomputes forward.
        fuses: Which attention becomes one operator.
    """

    number: int
    path: str
    layer: nn.Module
    forward: Callable[..., Any]
    inputs: list[TensorSpec]
    names: dict[str, int]
    leaves: list[Any]
    arguments: pytree.TreeSpec
    checkpoint: bool = False
    fuses: AttentionPolicy = never_fuses
    outputs: list[TensorSpec] = field(default_factory=list)
    results: pytree.TreeSpec | None = None
    has_draws: bool = False
    fingerprint: str = ""
    outputs_with_grad: tuple[bool, ...] | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """The kind of the call: calls of equal kind compute the same function."""
        return self.fingerprint, tuple(self.inputs), self.outputs_with_grad, self.checkpoint

    def run(
        self, tensors: Sequence[torch.Tensor], seed: torch.Tensor | None = None
    ) -> tuple[list[Any], Rewrites]:
        """Run forward; return flat results and the rewrites with the draws from the seed, by
        default the last input."""
        by_name = {name: tensors[index] for name, index in self.names.items()}
        leaves = [tensors[x.number] if isinstance(x, _InputNumber) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.arguments)
        seed = tensors[-1] if seed is None else seed
        with substitute_tensors(self.layer, by_name), Rewrites(seed, self.fuses) as rewrites:
            results, self.results = pytree.tree_flatten(self.forward(*args, **kwargs))
        return results, rewrites


@dataclass(frozen=True, slots=True)
class _InputNumber:
    number: int


class NotClosable(Exception):
    """The call has arguments or side effects that a node cannot express; the layer is inlined."""


@contextmanager
def close_layers(
    module: nn.Module,
    next_seed: Callable[[], torch.Tensor],
    *,
    checkpoint: bool,
    fuses: AttentionPolicy,
) -> Iterator[list[LayerCall]]:
    """Trace calls of the module's repeated layers as one node each within the context.

    Args:
        module: The model.
        next_seed: Returns a (2,) int32 tensor for each call that draws.
        checkpoint: Whether backward recomputes calls.
        fuses: Which attention becomes one operator.
    """
    layers = dict(repeated_layers(module, ""))
    with RegisteredCalls[LayerCall]() as calls:

        def close(path: str, layer: nn.Module) -> None:
            forward = layer.forward

            def traced_forward(*args: Any, **kwargs: Any) -> Any:
                try:
                    call, tensors = _describe_call(len(calls), path, layer, forward, args, kwargs)
                    call.fuses = fuses
                    _inspect(call)
                except NotClosable:
                    return forward(*args, **kwargs)
                call.checkpoint = checkpoint and torch.is_grad_enabled()
                if call.has_draws:
                    tensors.append(next_seed())
                RegisteredCalls.add(call)
                calls.append(call)
                assert call.results is not None
                return pytree.tree_unflatten(_Closed.apply(call, *tensors), call.results)  # type: ignore[no-untyped-call]

            layer.forward = traced_forward

        for path, layer in layers.items():
            close(path, layer)
        try:
            yield calls
        finally:
            for layer in layers.values():
                del layer.forward


def repeated_layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and layers of the outermost module lists whose layers have one class."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList) and _are_repeated(child):
            yield from ((f"{path}.{number}", layer) for number, layer in enumerate(child))
        else:
            yield from repeated_layers(child, f"{path}.")


def _are_repeated(layers: Iterable[nn.Module]) -> bool:
    modules = list(layers)
    return (
        len(modules) > 1
        and len({type(layer) for layer in modules}) == 1
        and len({id(layer) for layer in modules}) == len(modules)
        and type(modules[0]).forward is not nn.Module.forward
        and all("forward" not in vars(layer) for layer in modules)
    )


class _Closed(torch.autograd.Function):
    """The operators of a closed call and of its backward."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = LAYER_FORWARD(list(tensors), call.number)
        pairs = zip(results, call.outputs, strict=True)
        ctx.mark_non_differentiable(*(x for x, spec in pairs if not spec.is_differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        call: LayerCall = ctx.call
        call.outputs_with_grad = tuple(t is not None for t in grad_outputs)
        grads = iter(LAYER_BACKWARD([t for t in grad_outputs if t is not None], call.number))
        return None, *(next(grads) if spec.is_differentiable else None for spec in call.inputs)


def _describe_call(  # noqa: PLR0917
    number: int,
    path: str,
    layer: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[LayerCall, list[torch.Tensor]]:
    """Return the call and its input tensors."""
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def number_of(tensor: torch.Tensor) -> int:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return numbers[id(tensor)]

    names = {name: number_of(tensor) for name, tensor in named_tensors(layer).items()}
    flat, arguments = pytree.tree_flatten((args, dict(kwargs)))
    leaves: list[Any] = []
    for leaf in flat:
        if isinstance(leaf, torch.Tensor):
            leaves.append(_InputNumber(number_of(leaf)))
        elif isinstance(leaf, _CONSTANT_TYPES):
            leaves.append(leaf)
        else:
            raise NotClosable
    inputs = [TensorSpec.of(tensor) for tensor in tensors]
    return LayerCall(number, path, layer, forward, inputs, names, leaves, arguments), tensors


def _inspect(call: LayerCall) -> None:
    """Determine outputs, draws and fingerprint by running the call on empty tensors."""
    with disable_proxy_modes_tracing():
        results, rewrites, call.fingerprint = _run_empty(call)
    call.outputs = [TensorSpec.of(x) for x in results]
    if rewrites.draws.sites:
        call.has_draws = True
        call.inputs = [*call.inputs, TensorSpec((2,), torch.int32)]


def refuse_changed_call(call: LayerCall) -> None:
    """Refuse a call whose computation has changed since its first run.

    Raises:
        SamestepError: The computation has changed, for example because forward counts calls.
    """
    try:
        fingerprint = _run_empty(call)[2]
    except NotClosable:
        fingerprint = ""
    if fingerprint != call.fingerprint:
        raise SamestepError(
            f"expected {call.path} to compute the same function in each call, got a layer with "
            "internal state, which the vulkan backend cannot capture; use a cpu or cuda worker"
        )


def _run_empty(call: LayerCall) -> tuple[list[torch.Tensor], Rewrites, str]:
    """Run a call on empty tensors; return results, rewrites and the fingerprint.

    Raises:
        NotClosable: A node cannot express the call.
    """
    specs = call.inputs[:-1] if call.has_draws else call.inputs
    fake_inputs = [spec.fake() for spec in specs]
    with _Fingerprint(fake_inputs) as fingerprint:
        results, rewrites = call.run(fake_inputs, torch.empty(2, dtype=torch.int32))
        if not results or not all(isinstance(x, torch.Tensor) for x in results):
            raise NotClosable
        fingerprint.add("results", [fingerprint.number(x) for x in results], call.results)
        fingerprint.add("backward", *_backward(results, fingerprint))
        fingerprint.add("gradients", _gradients(results, fake_inputs, fingerprint))
    return results, rewrites, fingerprint.digest()


def _nodes(results: Sequence[torch.Tensor]) -> dict[Any, int]:
    """Number the nodes of the autograd graph in traversal order."""
    numbers: dict[Any, int] = {}
    pending: list[Any] = [x.grad_fn for x in results]
    while pending:
        node = pending.pop()
        if node is not None and node not in numbers:
            numbers[node] = len(numbers)
            pending += [source for source, _ in node.next_functions]
    return numbers


def _backward(results: Sequence[torch.Tensor], fingerprint: _Fingerprint) -> Iterator[object]:
    """Yield each autograd node's name and the nodes that it passes gradients to.

    The computation of torch's nodes follows from the forward operators, which are hashed as they
    run.
    """
    numbers = _nodes(results)
    yield [numbers.get(x.grad_fn) for x in results]
    for node in numbers:
        leaf = getattr(node, "variable", None)
        yield node.name(), None if leaf is None else fingerprint.number(leaf)
        yield [
            (numbers.get(source), output_number) for source, output_number in node.next_functions
        ]


def _gradients(
    results: Sequence[torch.Tensor], fake_inputs: Sequence[torch.Tensor], fingerprint: _Fingerprint
) -> list[int | None]:
    """Run backward, so that it is hashed, if the layer has custom autograd functions; return the
    gradients' tensor numbers."""
    if not any(isinstance(node, BackwardCFunction) for node in _nodes(results)):
        return []
    differentiable_results = [x for x in results if x.requires_grad]
    targets = [x for x in fake_inputs if x.requires_grad]
    grad_outputs = [torch.empty_like(x) for x in differentiable_results]
    grads: Sequence[torch.Tensor | None]
    grads = [*torch.autograd.grad(differentiable_results, targets, grad_outputs, allow_unused=True)]
    return [None if x is None else fingerprint.number(x) for x in grads]


class _Fingerprint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that hashes the operators that run, with tensors numbered in order of appearance."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hash = blake3()
        self._numbers: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []  # kept alive, so that no id is reused
        self._inputs = len(inputs)
        for tensor in inputs:
            self.number(tensor)

    def number(self, tensor: torch.Tensor) -> int:
        """Return the tensor's number; a new tensor gets the next one."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._tensors.append(tensor)
        return self._numbers[id(tensor)]

    def add(self, *values: object) -> None:
        """Hash values."""
        self._hash.update(repr(values).encode())

    def digest(self) -> str:
        """Return the hash of all operators that ran."""
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
        is_known = id(value) in self._numbers
        number = self.number(value)
        if number < self._inputs and func._schema.is_mutable:  # noqa: SLF001
            raise NotClosable
        if is_known:
            return number
        if isinstance(value, torch._subclasses.FakeTensor):  # noqa: SLF001
            raise NotClosable  # a tensor of the surrounding model that is not an input
        if value.numel() > _HASHED_ELEMENTS:
            raise NotClosable
        # A constant of forward, whose values the fake mode would hide.
        with unset_fake_temporarily():
            return number, value.detach().cpu().numpy().tobytes(), str(value.dtype)
