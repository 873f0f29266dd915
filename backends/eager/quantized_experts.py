"""Quantized frozen experts of a mixture: weights are dequantized one expert at a time.

transformers keeps the experts of a layer as stacks of matrices, (experts, outputs, inputs), which
peft adapts as parameters: it adds the low-rank products of all experts to a whole stack. Here each
expert that receives tokens is computed separately, and its low-rank product is added to the result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from backends.eager.quantized_linear import QuantizedWeight, ScratchBuffer, linear
from backends.quantization.mapped_weights import quantize_tensor
from backends.quantization.quantize import Storage


class QuantizedExperts(nn.Module):
    """A layer of frozen experts: `quantize_experts` makes it a base class of transformers' layer.

    Attributes:
        stacks: By the name of the original parameter: its matrices, one for each expert.
        wrappers: peft's wrapper of each adapted parameter, by the parameter's name.
        scratch: Memory for one dequantized matrix.
    """

    stacks: dict[str, list[QuantizedWeight]]
    wrappers: dict[str, Any]
    scratch: ScratchBuffer

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, (tokens, hidden)."""
        original: Any = self  # has the attributes of transformers' layer
        up_name = "gate_up_proj" if original.has_gate else "up_proj"
        combine = original._apply_gate if original.has_gate else original.act_fn  # noqa: SLF001
        total = torch.zeros_like(hidden_states)
        for expert in range(len(self.stacks["down_proj"])):
            token, choice = torch.where(top_k_index == expert)
            if not len(token):
                continue
            hidden = combine(self._linear(up_name, expert, hidden_states[token]))
            hidden = self._linear("down_proj", expert, hidden)
            hidden = hidden * top_k_weights[token, choice, None]
            total = total.index_add(0, token, hidden.to(total.dtype))
        return total

    def _linear(self, name: str, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        out = linear(hidden, self.stacks[name][expert], None, self.scratch)
        wrapper = self.wrappers.get(name)
        if wrapper is None or wrapper.disable_adapters:
            return out
        for adapter in wrapper.active_adapters:
            input_matrix, output_matrix = (
                wrapper.lora_A[adapter].weight,
                wrapper.lora_B[adapter].weight,
            )
            input_matrix = input_matrix.reshape(wrapper.num_experts, -1, input_matrix.shape[-1])[
                expert
            ]  # (rank, inputs)
            output_matrix = output_matrix.reshape(output_matrix.shape[0], -1, wrapper.num_experts)[
                :, :, expert
            ]  # (outputs, rank)
            low_rank = nn.functional.linear(
                nn.functional.linear(hidden, input_matrix), output_matrix
            )
            out = out + low_rank * wrapper.scaling[adapter]
        return out


def quantize_experts(
    module: nn.Module,
    layer: nn.Module,
    storage: Storage,
    device: torch.device,
    scratch: ScratchBuffer,
) -> None:
    """Quantize the stacks of a layer of experts.

    Args:
        module: The module that contains the layer, adapted by peft or not.
        layer: One of `backends.quantization.frozen_base.expert_layers`.
        storage: Any storage type except f32.
        device: The device that stores and dequantizes the stacks.
        scratch: Memory for one dequantized matrix; all layers share it.
    """
    stacks: dict[str, list[QuantizedWeight]] = {}
    for name, stack in [*layer.named_parameters(recurse=False)]:
        stacks[name] = [
            QuantizedWeight(quantize_tensor(matrix, storage), device) for matrix in stack.detach()
        ]
        del layer._parameters[name], stack  # noqa: SLF001 -- the quantized stack replaces it
    layer_class = type(layer)
    layer.__class__ = type(f"Quantized{layer_class.__name__}", (QuantizedExperts, layer_class), {})
    any_layer: Any = layer
    any_layer.stacks, any_layer.wrappers, any_layer.scratch = stacks, {}, scratch
    for wrapper in module.modules():
        if hasattr(wrapper, "parameter_name") and _base_of(wrapper) is layer:
            any_layer.wrappers[wrapper.parameter_name] = wrapper
            wrapper.forward = partial(_forward_to_base, wrapper)


def _base_of(wrapper: Any) -> Any:
    return wrapper.get_base_layer()


def _forward_to_base(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the layer without peft's change of the parameter, which is gone; `_linear` adapts."""
    return wrapper.base_layer(*args, **kwargs)
