"""What no backend can train exactly, and so refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.jit._script import RecursiveScriptModule

from protocol.base.errors import SamestepError
from protocol.spec.manifest import Block


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
    return found


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


def refuse_running_statistics(module: torch.nn.Module) -> None:
    """No replica could follow them.

    Raises:
        SamestepError: A layer keeps some.
    """
    for name, layer in module.named_modules():
        if getattr(layer, "track_running_stats", False):
            raise SamestepError(
                f"{name!r} ({type(layer).__name__}) keeps running statistics, which no replica "
                "could follow; use LayerNorm or GroupNorm"
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


def refuse_gradient_hooks(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """A captured program has no moment at which a parameter's hook could run.

    Raises:
        SamestepError: A parameter has one.
    """
    for name, parameter in parameters.items():
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks  # noqa: SLF001
        if hooks:
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
