"""Compute a training step with torch on the CPU, as the reference for a program.

Of the capture only the assignment of seeds to layer calls is used: random numbers come from
`backends.wgpu.graph.reference`, so that dropout masks equal the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from backends.wgpu.capture.attention import never_fuses
from backends.wgpu.capture.capture import Arrays
from backends.wgpu.capture.half_products import half_products
from backends.wgpu.capture.layer_call import LayerCall, repeated_layers
from backends.wgpu.capture.rewrites import Rewrites
from backends.wgpu.capture.substitution import substituted
from backends.wgpu.graph import reference

Loss = Callable[[Any, Arrays], torch.Tensor]


class HostStep:
    """A step on the CPU.

    Args:
        module: The model; it is not changed.
        loss: Returns the summed loss.
        values: The module's tensors, under all their names.
        trained_names: Names of the trainable tensors.
        calls: The layer calls of the step's capture.
        scale: Loss scale of a float16 step; else 0.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        values: Mapping[str, torch.Tensor],
        trained_names: Sequence[str],
        calls: Sequence[LayerCall],
        *,
        scale: float = 0.0,
    ) -> None:
        reference.register()
        self._module = module
        self._loss = loss
        self._trained_names = trained_names
        self._calls = calls
        self._scale = scale
        leaves: dict[int, torch.Tensor] = {}
        trained_ids = {id(values[name]) for name in trained_names}
        for value in values.values():
            leaf = value.detach().requires_grad_(id(value) in trained_ids)
            leaves.setdefault(id(value), leaf)
        self._values = {name: leaves[id(value)] for name, value in values.items()}

    def run(self, arrays: Arrays, seeds: torch.Tensor) -> list[torch.Tensor]:
        """Compute one microbatch.

        Args:
            arrays: Its arrays.
            seeds: (count, 2) int32, as for the program.

        Returns:
            The loss, then each trained tensor's gradient; zeros for unreached tensors.
        """
        parameters = [self._values[name] for name in self._trained_names]
        grads: Sequence[torch.Tensor | None] = [None] * len(parameters)
        with ExitStack() as stack:
            stack.enter_context(_training(self._module))
            stack.enter_context(substituted(self._module, self._values))
            stack.enter_context(half_products(enabled=bool(self._scale)))
            stack.enter_context(self._layers_draw(iter(seeds[1:])))
            stack.enter_context(_Draws(seeds[0]))
            stack.enter_context(torch.enable_grad())
            value = self._loss(self._module, arrays)
            value = value.float() if self._scale else value
            initial_gradient = torch.tensor(self._scale) if self._scale else None
            if value.requires_grad and parameters:
                grads = torch.autograd.grad(value, parameters, initial_gradient, allow_unused=True)
        if self._scale:
            grads = [None if grad is None else grad / self._scale for grad in grads]
        pairs = zip(grads, parameters, strict=True)
        gradients = (torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs)
        return [value.detach(), *(gradient.detach() for gradient in gradients)]

    @contextmanager
    def _layers_draw(self, seeds: Iterator[torch.Tensor]) -> Iterator[None]:
        """Give each closed layer call its own seed within the context."""
        calls = list(self._calls)[::-1]

        def wrap(path: str, layer: nn.Module) -> None:
            forward = layer.forward

            def run(*args: Any, **kwargs: Any) -> Any:
                if not calls or calls[-1].path != path:  # the capture could not close this call
                    return forward(*args, **kwargs)
                if not calls.pop().draws:
                    return forward(*args, **kwargs)
                with _Draws(next(seeds)):
                    return forward(*args, **kwargs)

            layer.forward = run

        layers = dict(repeated_layers(self._module, ""))
        try:
            for path, layer in layers.items():
                wrap(path, layer)
            yield
        finally:
            for layer in layers.values():
                vars(layer).pop("forward", None)


class _Draws(Rewrites):
    """Replace random functions; attention without dropout remains torch's."""

    def __init__(self, seed: torch.Tensor) -> None:
        super().__init__(seed, never_fuses)

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drop = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if drop == 0.0:
            return nn.functional.scaled_dot_product_attention(*args, **kwargs)
        return super()._attention(*args, **kwargs)


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Set training mode, without checkpoints, whose recomputation would draw again."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    flags = [
        submodule
        for submodule in module.modules()
        if getattr(submodule, "gradient_checkpointing", False)
    ]
    try:
        module.train()
        for submodule in flags:
            submodule.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for submodule in flags:
            submodule.gradient_checkpointing = True  # type: ignore[assignment]
        for submodule, mode in modes:
            submodule.training = mode
