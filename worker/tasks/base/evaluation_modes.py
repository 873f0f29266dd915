"""Keep parts of a module in evaluation mode during training.

A training loop calls `module.train()` and then, for example, `body.eval()`. A task builds its
module in the same state: submodules in evaluation mode, inside a module in training mode, stay in
evaluation mode. A module that is in evaluation mode as a whole, as `from_pretrained` returns it, is
trained in training mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from backends.base.interface import Trainable
from protocol.base.errors import DataError

if TYPE_CHECKING:
    from torch import nn


def keep_evaluation_modes(trainable: Trainable) -> Trainable:
    """Return a trainable whose loss keeps these submodules in evaluation mode.

    If no submodule is in evaluation mode, the trainable itself is returned.

    Raises:
        DataError: See `parts_in_evaluation`.
    """
    loss = trainable.loss
    names = [] if trainable.module is None else parts_in_evaluation(trainable.module)
    if not names or loss is None:
        return trainable

    def loss_in_modes(module: Any, arrays: Mapping[str, Any]) -> Any:
        put_in_evaluation(module, names)
        return loss(module, arrays)

    coupled = trainable.coupled
    if coupled is not None:
        embed = coupled.embed

        def embed_in_modes(module: Any, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
            put_in_evaluation(module, names)
            return embed(module, arrays)

        coupled = replace(coupled, embed=embed_in_modes)
    return replace(
        trainable, loss=loss_in_modes, coupled=coupled, evaluation_parts=frozenset(names)
    )


def parts_in_evaluation(module: nn.Module) -> list[str]:
    """Return the names of the submodules (perhaps the module itself) that stay in evaluation mode.

    Raises:
        DataError: `from_pretrained` set the mode of a trained submodule, so the intent is unknown.
    """
    if not _has_training_part(module):
        return []
    parts = {
        id(submodule)
        for name, topmost_part in _topmost(module, "")
        for submodule in _parts_to_keep(name, topmost_part)
    }
    return [name for name, submodule in module.named_modules() if id(submodule) in parts]


def put_in_evaluation(module: nn.Module, names: Sequence[str]) -> None:
    """Put these submodules of a module, or of its copy on a device, into evaluation mode."""
    parts = dict(module.named_modules()) if names else {}
    for name in names:
        if name in parts:
            parts[name].training = False


def _topmost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost submodules in evaluation mode."""
    if not module.training:
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _topmost(child, f"{name}.{child_name}" if name else child_name)


def _parts_to_keep(name: str, part: nn.Module) -> Iterator[nn.Module]:
    if hasattr(type(part), "from_pretrained"):
        if _has_training_part(part):
            return  # layers such as adapters were added: the user did not choose its mode
        if any(parameter.requires_grad for parameter in part.parameters()):
            raise DataError(
                f"expected {name!r}, which is trained, in training mode, got it in evaluation mode "
                "as from_pretrained leaves it: call module.train() in build, then eval() on the "
                "submodules that must stay in evaluation mode"
            )
    yield from (submodule for submodule in part.modules() if not submodule.training)


def _has_training_part(module: nn.Module) -> bool:
    return any(submodule.training for submodule in module.modules())
