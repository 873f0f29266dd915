"""Compute a training step with torch on the CPU, as the reference for a program.

Of the capture, it uses only the assignment of seeds to layer calls. Random numbers are those of
`backends.wgpu.graph.reference`, so dropout masks equal the device's.
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
from backends.wgpu.capture.substitution import substitute_tensors
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
            arrays: The microbatch's arrays.
            seeds: (count, 2) int32, as for the program.

        Returns:
            The loss, then each trained tensor's gradient; zeros for unreached tensors.
        """
        parameters = [self._values[name] for name in self._trained_names]
        grads: Sequence[torch.Tensor | None] = [None] * len(parameters)
        with ExitStack() as stack:
            stack.enter_context(_training_mode(self._module))
            stack.enter_context(substitute_tensors(self._module, self._values))
            stack.enter_context(half_products(enabled=bool(self._scale)))
            stack.enter_context(self._seed_layer_calls(iter(seeds[1:])))
            stack.enter_context(_RandomRewrites(seeds[0]))
            stack.enter_context(torch.enable_grad())
            loss = self._loss(self._module, arrays)
            loss = loss.float() if self._scale else loss
            initial_gradient = torch.tensor(self._scale) if self._scale else None
            if loss.requires_grad and parameters:
                grads = torch.autograd.grad(loss, parameters, initial_gradient, allow_unused=True)
        if self._scale:
            grads = [None if grad is None else grad / self._scale for grad in grads]
        pairs = zip(grads, parameters, strict=True)
        gradients = (torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs)
        return [loss.detach(), *(gradient.detach() for gradient in gradients)]

    @contextmanager
    def _seed_layer_calls(self, seeds: Iterator[torch.Tensor]) -> Iterator[None]:
        """Seed each layer call that the capture recorded as one node, within the context."""
        calls = list(self._calls)[::-1]

        def wrap(path: str, layer: nn.Module) -> None:
            forward = layer.forward

            def seeded_forward(*args: Any, **kwargs: Any) -> Any:
                if not calls or calls[-1].path != path:  # not recorded as one node
                    return forward(*args, **kwargs)
                if not calls.pop().has_draws:
                    return forward(*args, **kwargs)
                with _RandomRewrites(next(seeds)):
                    return forward(*args, **kwargs)

            layer.forward = seeded_forward

        layers = dict(repeated_layers(self._module, ""))
        try:
            for path, layer in layers.items():
                wrap(path, layer)
            yield
        finally:
            for layer in layers.values():
                vars(layer).pop("forward", None)


class _RandomRewrites(Rewrites):
    """Replaces random functions; attention without dropout remains torch's."""

    def __init__(self, seed: torch.Tensor) -> None:
        super().__init__(seed, never_fuses)

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drop = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if drop == 0.0:
            return nn.functional.scaled_dot_product_attention(*args, **kwargs)
        return super()._attention(*args, **kwargs)


@contextmanager
def _training_mode(module: nn.Module) -> Iterator[None]:
    """Set training mode and disable gradient checkpointing, whose recomputation would draw random
    numbers again."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    checkpointed_modules = [
        submodule
        for submodule in module.modules()
        if getattr(submodule, "gradient_checkpointing", False)
    ]
    try:
        module.train()
        for submodule in checkpointed_modules:
            submodule.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for submodule in checkpointed_modules:
            submodule.gradient_checkpointing = True  # type: ignore[assignment]
        for submodule, mode in modes:
            submodule.training = mode
