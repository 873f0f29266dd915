"""Refuse modules that a backend cannot train exactly."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.jit._script import RecursiveScriptModule

from protocol.base.errors import SamestepError
from protocol.spec.manifest import Block

_COMPARABLE_DTYPES: Final = {
    1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128
}  # fmt: skip
"""A type that numpy supports, by element size in bytes."""
_OVERLAP_WORK: Final = 100_000
"""Bound on numpy's search for a shared element; beyond it, tensors count as overlapping."""


WHOLE_MICROBATCH: Final = (
    'set unit="microbatch" in samestep.Task (batch.unit in a run spec) to train with the whole '
    "microbatch as the unit"
)
"""The remedy for a loss or layer that depends on a whole microbatch."""


def trained_blocks(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks of trained tensors, without those of buffers and counters."""
    return [block for block in blocks if block.is_trained]


def trained_parameters(
    module: torch.nn.Module, blocks: Sequence[Block]
) -> dict[str, torch.nn.Parameter]:
    """Return the blocks' parameters by name.

    Raises:
        SamestepError: A tensor is missing, has another shape, is not float32, is frozen or shares
            memory with another tensor; or the module is compiled by torch.jit.script.
    """
    refuse_scripted(module)
    parameters = dict(module.named_parameters())
    parameters_by_name = {}
    for tensor in (tensor for block in blocks for tensor in block.tensors):
        parameter = parameters.get(tensor.name)
        if parameter is None or tuple(parameter.shape) != tensor.shape:
            raise SamestepError(
                f"expected a parameter {tensor.name!r} of shape {tensor.shape} in the module, "
                "found none"
            )
        if parameter.dtype != torch.float32:
            raise SamestepError(
                f"expected {tensor.name!r} in float32, got {parameter.dtype}; convert trainable "
                "tensors with .float()"
            )
        if not parameter.requires_grad:
            raise SamestepError(
                f"expected {tensor.name!r}, which is trained, with requires_grad, got it frozen; "
                "call .requires_grad_()"
            )
        parameters_by_name[tensor.name] = parameter
    refuse_shared_memory(module, parameters_by_name)
    return parameters_by_name


def refuse_shared_memory(
    module: torch.nn.Module,
    trained_parameters: Mapping[str, torch.nn.Parameter],
    other_tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Refuse trained tensors that share memory with another tensor.

    Trained tensors move to separate memory, so a tensor that shared memory with them would miss
    their updates; torch would update two parameters in one memory twice. One parameter with several
    names is allowed.

    Args:
        module: The module on the CPU; its parameters and buffers are checked.
        trained_parameters: Trained parameters by name.
        other_tensors: Further tensors that the model's code uses, by the names that errors show.

    Raises:
        SamestepError: A trained tensor shares memory with another, or its elements overlap.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    known_ids = {id(tensor) for tensor in tensors.values()}
    tensors |= {
        name: tensor
        for name, tensor in (other_tensors or {}).items()
        if id(tensor) not in known_ids
    }
    trained_names = {id(parameter): name for name, parameter in trained_parameters.items()}
    tensors_by_name = {
        trained_names.get(id(tensor), name): tensor for name, tensor in tensors.items()
    }
    for name, other in overlapping_pairs(tensors_by_name):
        if name in trained_parameters or other in trained_parameters:
            trained_name, other_name = (
                (name, other) if name in trained_parameters else (other, name)
            )
            _refuse_shared_tensor(trained_name, other_name, tensors_by_name)
    for name, parameter in trained_parameters.items():
        if torch._debug_has_internal_overlap(parameter) == 1:  # noqa: SLF001
            raise SamestepError(
                f"expected distinct memory for each element of {name!r}, which is trained, got "
                "overlapping elements, as from expand(); write .clone()"
            )


def overlapping_pairs(tensors_by_name: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of tensors that share an element; the tensor later in memory comes
    first."""
    open_spans: list[tuple[int, str]] = []
    for start, end, name in sorted(
        span
        for tensor_name, tensor in tensors_by_name.items()
        if (span := _span(tensor_name, tensor))
    ):
        open_spans = [
            (other_end, other_name) for other_end, other_name in open_spans if other_end > start
        ]
        for _, other_name in open_spans:
            if _overlap(tensors_by_name[name], tensors_by_name[other_name]):
                yield name, other_name
        open_spans.append((end, name))


def _span(name: str, tensor: torch.Tensor) -> tuple[int, int, str] | None:
    """Return a tensor's first address, the address after its last byte, and its name; None if the
    tensor has no dense memory on the CPU."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_dense or tensor.is_nested or not tensor.numel():
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last_element = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last_element + 1) * tensor.element_size(), name


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors share an element; disjoint rows or columns of a matrix do not."""
    left_array, right_array = (
        tensor.detach().view(_COMPARABLE_DTYPES[tensor.element_size()]).numpy()
        for tensor in (left, right)
    )
    shares_memory: Any = np.shares_memory  # the type stubs lack integer bounds
    try:
        return bool(shares_memory(left_array, right_array, max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True


def _refuse_shared_tensor(
    trained_name: str, other_name: str, tensors_by_name: Mapping[str, torch.Tensor]
) -> None:
    trained_tensor, other_tensor = tensors_by_name[trained_name], tensors_by_name[other_name]
    if (
        other_tensor.requires_grad
        and isinstance(other_tensor, torch.nn.Parameter)
        and trained_tensor.shape == other_tensor.shape
    ):
        raise SamestepError(
            f"expected {trained_name!r} and {other_name!r} to be one parameter, got two that share "
            "memory, which torch would update twice per step; tie them by assigning the parameter "
            "itself, as in b.weight = a.weight"
        )
    raise SamestepError(
        f"expected {trained_name!r}, which is trained, to share memory with no other tensor, got "
        f"{other_name!r}, which would not follow its updates; compute that in forward, or .clone() "
        "it"
    )


def refuse_scripted(module: torch.nn.Module) -> None:
    """Refuse modules compiled by torch.jit.script, which have no hooks; traced modules have hooks.

    Raises:
        SamestepError: The module, or a trained part of it, is compiled.
    """
    for name, layer in module.named_modules():
        is_trained = any(parameter.requires_grad for parameter in layer.parameters())
        if isinstance(layer, RecursiveScriptModule) and (is_trained or layer is module):
            position = f" as {name!r}" if name else ""
            raise SamestepError(
                f"expected a plain module, got one compiled by torch.jit.script{position}; pass "
                "the nn.Module itself"
            )


def refuse_running_statistics(
    module: torch.nn.Module,
    evaluation_parts: Collection[str] = (),
    exchanged_buffers: Collection[str] = (),
) -> None:
    """Refuse running statistics that replicas do not follow.

    A layer in evaluation mode only reads its statistics.

    Args:
        module: The module.
        evaluation_parts: Names of the parts that stay in evaluation mode during training.
        exchanged_buffers: Names of the buffers whose changes the run exchanges.

    Raises:
        SamestepError: A layer in training mode has running statistics.
    """
    for name, layer in module.named_modules():
        has_statistics = (
            getattr(layer, "track_running_stats", False) and name not in evaluation_parts
        )
        if has_statistics and not {*own_buffers(name, layer)} <= {*exchanged_buffers}:
            raise SamestepError(
                f"{name!r} ({type(layer).__name__}) keeps running statistics, on which replicas "
                "would disagree; use LayerNorm or GroupNorm, or keep the layer in evaluation mode "
                "while the module trains, so that its statistics do not change, or "
                f"{WHOLE_MICROBATCH}"
            )


def own_buffers(name: str, layer: torch.nn.Module) -> list[str]:
    """Return the full names of a submodule's own buffers.

    Args:
        name: The submodule's name in the module.
        layer: The submodule.
    """
    prefix = f"{name}." if name else ""
    return [prefix + buffer_name for buffer_name, _ in layer.named_buffers(recurse=False)]


def refuse_gradients_across_samples(module: torch.nn.Module) -> None:
    """Refuse layers whose gradients do not add up over samples, even if the loss does.

    Raises:
        SamestepError: A layer scales gradients by the content of the microbatch.
    """
    for name, layer in module.named_modules():
        if getattr(layer, "scale_grad_by_freq", False):
            raise SamestepError(
                f"{name!r} ({type(layer).__name__}) divides gradients by how often a row occurs in "
                "the microbatch, so results would depend on its size; remove scale_grad_by_freq"
            )


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Whether the user's code may run on the parameter's gradient in backward."""
    hooks: Any = parameter._backward_hooks  # noqa: SLF001 -- None for most tensors
    return bool(hooks) or hooks_need_backward(parameter)


def hooks_need_backward(parameter: torch.Tensor) -> bool:
    """Whether a hook runs only when gradients accumulate, which `torch.autograd.grad` skips.

    torch does not list hooks on the graph's accumulation node. But hooks die with the node, so code
    that registers a hook keeps a reference to the node, and a further reference means a hook.
    """
    if has_accumulated_hook(parameter):
        return True
    if not (parameter.is_leaf and parameter.requires_grad):
        return False
    with torch.enable_grad():
        return _node_references(parameter) > _node_references(torch.nn.Parameter(torch.zeros(1)))


def has_accumulated_hook(parameter: torch.Tensor) -> bool:
    """Whether a hook runs after the gradient is accumulated."""
    hooks: Any = parameter._post_accumulate_grad_hooks  # noqa: SLF001 -- None for most tensors
    return bool(hooks)


def _node_references(parameter: torch.Tensor) -> int:
    """Count the Python references to the accumulation node; graphs that are alive add none."""
    graph = parameter.view_as(parameter).grad_fn
    assert graph is not None
    return sys.getrefcount(graph.next_functions[0][0])


def refuse_gradient_hooks(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse hooks on parameters, which a captured program could not run.

    Raises:
        SamestepError: A parameter has a hook.
    """
    for name, parameter in parameters.items():
        if has_gradient_hook(parameter):
            raise SamestepError(
                f"{name!r} has a hook on its gradient, which a device of this backend cannot run; "
                "leave it out, or use --backend cpu or cuda"
            )


def refuse_sparse_gradients(module: torch.nn.Module) -> None:
    """Refuse sparse gradients, which a captured program does not support.

    Raises:
        SamestepError: A layer's gradients are sparse.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.sparse:
            raise SamestepError(
                f"{name or 'the model'!r} has sparse gradients, which a device of this backend "
                "cannot compute; leave out sparse=True, or use --backend cpu or cuda"
            )
