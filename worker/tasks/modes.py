"""Which parts of a module stay in evaluation mode while it is trained.

A loop of one's own calls `module.train()` and then, say, `body.eval()`. Here whoever builds a
module says the same: what is in evaluation mode inside of a module in training mode stays so. A
module that is in evaluation mode as a whole, as `from_pretrained` gives it, is trained in training
mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from backends.base.interface import Trainable
from protocol.base.errors import DataError

if TYPE_CHECKING:
    from torch import nn


def with_modes_kept(trainable: Trainable) -> Trainable:
    """The same, whose loss has these parts in evaluation mode; itself where there are none.

    Raises:
        DataError: See `parts_in_evaluation`.
    """
    loss = trainable.loss
    names = [] if trainable.module is None else parts_in_evaluation(trainable.module)
    if not names or loss is None:
        return trainable

    def kept(module: Any, arrays: Mapping[str, Any]) -> Any:
        put_in_evaluation(module, names)
        return loss(module, arrays)

    return replace(trainable, loss=kept, in_evaluation=frozenset(names))


def parts_in_evaluation(module: nn.Module) -> list[str]:
    """Names of the submodules, and perhaps of the module itself, that stay in evaluation mode.

    Raises:
        DataError: Of one that is trained nobody can know, since `from_pretrained` has set its mode.
    """
    if not _trains(module):
        return []
    parts = {id(each) for name, part in _topmost(module, "") for each in _kept(name, part)}
    return [name for name, part in module.named_modules() if id(part) in parts]


def put_in_evaluation(module: nn.Module, names: Sequence[str]) -> None:
    """These parts of the module, or of a copy of it; what stands for it on a device has none."""
    parts = dict(module.named_modules()) if names else {}
    for name in names:
        if name in parts:
            parts[name].training = False


def _topmost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Parts in evaluation mode, inside of none that is."""
    if not module.training:
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _topmost(child, f"{name}.{child_name}" if name else child_name)


def _kept(name: str, part: nn.Module) -> Iterator[nn.Module]:
    if hasattr(type(part), "from_pretrained"):
        if _trains(part):
            return  # layers that were added since, such as adapters: no mode was chosen for it
        if any(parameter.requires_grad for parameter in part.parameters()):
            raise DataError(
                f"expected {name!r}, which is trained, in training mode, got it in evaluation mode "
                "as from_pretrained leaves it: write module.train() in build, and after that "
                "eval() of what is to stay in evaluation mode"
            )
    yield from (each for each in part.modules() if not each.training)


def _trains(module: nn.Module) -> bool:
    return any(each.training for each in module.modules())
