"""What no backend can train exactly, and so refuses."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.jit._script import RecursiveScriptModule

from protocol.base.errors import SamestepError
from protocol.spec.manifest import Block

_WHOLE: Final = {
    1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128
}  # fmt: skip
"""A type that numpy has, by the bytes of an element."""
_OVERLAP_WORK: Final = 100_000
"""How long numpy looks for an element that two tensors share; beyond it they count as sharing."""


def trained_parameters(
    module: torch.nn.Module, blocks: Sequence[Block]
) -> dict[str, torch.nn.Parameter]:
    """The blocks' parameters by name.

    Raises:
        SamestepError: A tensor is missing, of another shape, not float32, or frozen; or the
            module is compiled.
    """
    refuse_scripted(module)
    held = dict(module.named_parameters())
    found = {}
    for tensor in (tensor for block in blocks for tensor in block.tensors):
        parameter = held.get(tensor.name)
        if parameter is None or tuple(parameter.shape) != tensor.shape:
            raise SamestepError(f"the module has no {tensor.name!r} of shape {tensor.shape}")
        if parameter.dtype != torch.float32:
            raise SamestepError(
                f"expected {tensor.name!r} in float32, got {parameter.dtype}; trainable tensors "
                "are float32"
            )
        if not parameter.requires_grad:
            raise SamestepError(f"expected {tensor.name!r} not frozen: it is in a block")
        found[tensor.name] = parameter
    refuse_shared_memory(module, found)
    return found


def refuse_shared_memory(
    module: torch.nn.Module,
    trained: Mapping[str, torch.nn.Parameter],
    others: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """What is trained gets memory of its own, so nothing else may lie in the memory it has.

    One parameter by several names is one; two that lie in one memory are updated twice by torch.

    Args:
        module: On the CPU; its parameters and buffers are looked at.
        trained: By name.
        others: More tensors that code of the model reaches, by what to call them.

    Raises:
        SamestepError: A trained tensor shares memory with another, or its elements with each other.
    """
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    known = {id(each) for each in held.values()}
    held |= {name: each for name, each in (others or {}).items() if id(each) not in known}
    own = {id(parameter): name for name, parameter in trained.items()}
    named = {own.get(id(each), name): each for name, each in held.items()}
    for name, other in overlapping(named):
        if name in trained or other in trained:
            first, second = (name, other) if name in trained else (other, name)
            _refuse_one_memory(first, second, named)
    for name, parameter in trained.items():
        if torch._debug_has_internal_overlap(parameter) == 1:  # noqa: SLF001
            raise SamestepError(
                f"expected memory for each element of {name!r}, which is trained, got elements "
                "that share it, as expand() gives them: write .clone()"
            )


def overlapping(named: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of tensors that have an element in common; by name, the one that begins later first."""
    near: list[tuple[int, str]] = []
    for start, end, name in sorted(s for n, each in named.items() if (s := _span(n, each))):
        near = [(reach, other) for reach, other in near if reach > start]
        for _, other in near:
            if _overlap(named[name], named[other]):
                yield name, other
        near.append((end, name))


def _span(name: str, tensor: torch.Tensor) -> tuple[int, int, str] | None:
    """First byte, and the one behind the last; None of what has no memory here."""
    dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not dense or tensor.is_nested or not tensor.numel():
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size(), name


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether an element is in both; rows or columns of one matrix share none."""
    first, second = (each.detach().view(_WHOLE[each.element_size()]).numpy() for each in (one, two))
    shares: Any = np.shares_memory  # its stubs know two bounds alone
    try:
        return bool(shares(first, second, max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True


def _refuse_one_memory(trained: str, other: str, named: Mapping[str, torch.Tensor]) -> None:
    one, two = named[trained], named[other]
    if two.requires_grad and isinstance(two, torch.nn.Parameter) and one.shape == two.shape:
        raise SamestepError(
            f"expected {trained!r} and {other!r} to be one parameter, got two in one memory, which "
            "torch would update twice in a step: tie them by assigning the parameter itself, as in "
            "b.weight = a.weight"
        )
    raise SamestepError(
        f"expected memory of its own for {trained!r}, which is trained, got {other!r} in the same "
        "memory, which would not follow it: compute that in forward, or give it a .clone()"
    )


def refuse_scripted(module: torch.nn.Module) -> None:
    """Nothing can be hooked to what torch.jit.script has compiled; to what is traced it can.

    Raises:
        SamestepError: The module is, or a part of it that is trained.
    """
    for name, layer in module.named_modules():
        trained = any(parameter.requires_grad for parameter in layer.parameters())
        if isinstance(layer, RecursiveScriptModule) and (trained or layer is module):
            which = f" as {name!r}" if name else ""
            raise SamestepError(
                f"expected a plain module, got one that torch.jit.script has compiled{which}: give "
                "the nn.Module itself"
            )


def refuse_running_statistics(module: torch.nn.Module, in_evaluation: Collection[str] = ()) -> None:
    """No replica could follow them. A layer that stays in evaluation mode only reads its own.

    Args:
        module: What is trained.
        in_evaluation: Names of the parts that stay in evaluation mode while it is.

    Raises:
        SamestepError: A layer in training mode keeps some.
    """
    for name, layer in module.named_modules():
        if getattr(layer, "track_running_stats", False) and name not in in_evaluation:
            raise SamestepError(
                f"{name!r} ({type(layer).__name__}) keeps running statistics, which no replica "
                "could follow; use LayerNorm or GroupNorm, or leave it in evaluation mode inside "
                "of a module in training mode, where its statistics stay as they are"
            )


def refuse_gradients_across_samples(module: torch.nn.Module) -> None:
    """A loss may add up over samples, and its gradients not.

    Raises:
        SamestepError: A layer divides gradients by what else is in the microbatch.
    """
    for name, layer in module.named_modules():
        if getattr(layer, "scale_grad_by_freq", False):
            raise SamestepError(
                f"{name!r} ({type(layer).__name__}) divides gradients by how often a row is in the "
                "microbatch, so the result would hang on its size; leave out scale_grad_by_freq"
            )


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Whether code of the user's may act on its gradient, or on what holds it, in backward."""
    hooks: Any = parameter._backward_hooks  # noqa: SLF001 -- None of most
    return bool(hooks) or hooks_need_backward(parameter)


def hooks_need_backward(parameter: torch.Tensor) -> bool:
    """Whether some act only where gradients are accumulated, as `torch.autograd.grad` does not.

    Of hooks on the graph's node that accumulates torch gives no list; such a node is held by
    whoever has hooked one, for they end with it.
    """
    if has_accumulated_hook(parameter):
        return True
    if not (parameter.is_leaf and parameter.requires_grad):
        return False
    with torch.enable_grad():
        return _holders(parameter) > _holders(torch.nn.Parameter(torch.zeros(1)))


def has_accumulated_hook(parameter: torch.Tensor) -> bool:
    """Whether code runs once its gradient is accumulated."""
    hooks: Any = parameter._post_accumulate_grad_hooks  # noqa: SLF001 -- None of most
    return bool(hooks)


def _holders(parameter: torch.Tensor) -> int:
    """Of the node that accumulates; graphs that are kept count no more than this one."""
    graph = parameter.view_as(parameter).grad_fn
    assert graph is not None
    return sys.getrefcount(graph.next_functions[0][0])


def refuse_gradient_hooks(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """A captured program has no moment at which a parameter's hook could run.

    Raises:
        SamestepError: A parameter has one.
    """
    for name, parameter in parameters.items():
        if has_gradient_hook(parameter):
            raise SamestepError(
                f"{name!r} has a hook on its gradient, which a device of this backend cannot run; "
                "leave it out, or have it computed by cpu or cuda"
            )


def refuse_sparse_gradients(module: torch.nn.Module) -> None:
    """A captured program has dense arrays alone.

    Raises:
        SamestepError: A layer's gradients are sparse.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.sparse:
            raise SamestepError(
                f"{name or 'the model'!r} has sparse gradients, which a device of this backend "
                "cannot compute; leave out sparse=True, or have it computed by cpu or cuda"
            )
