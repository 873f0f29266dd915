"""A loaded model as a run trains it: whole, or through low-rank matrices beside its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backends.base.interface import Array, Sums, Trainable
from protocol.spec.manifest import Block, Export
from protocol.spec.run_spec import LoraSpec, ModelSpec
from worker.models import pretrained
from worker.models.blocks import cut_into_blocks
from worker.models.full_export import export_in_full
from worker.models.lora import Lora, TaskType, head_modules


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model, what is trained of it, and how that is cut into blocks."""

    loaded: pretrained.Pretrained
    lora: Lora | None
    blocks: tuple[Block, ...]
    spec: ModelSpec

    @staticmethod
    def of(
        loaded: pretrained.Pretrained,
        model: ModelSpec,
        lora: LoraSpec | None,
        task_type: TaskType,
        seed: int,
    ) -> Tuned:
        """The model whole if `lora` is None; a classifier's head is trained either way.

        Raises:
            DataError: As of `Lora`.
        """
        added = None
        if lora is not None:
            heads = head_modules(loaded.model) if task_type == "SEQ_CLS" else ()
            added = Lora(loaded.model, lora, task_type, heads, seed, adapter=model.adapter)
        module = loaded.model if added is None else added.module
        return Tuned(loaded, added, cut_into_blocks(module), model)

    @property
    def module(self) -> nn.Module:
        return self.loaded.model if self.lora is None else self.lora.module

    @property
    def digests(self) -> dict[str, str]:
        """Of what was loaded, for the manifest."""
        adapter = "" if self.lora is None else self.lora.adapter_digest
        return {
            "base_weights": self.loaded.weights_digest,
            **({"adapter": adapter} if adapter else {}),
        }

    def initial_values(self) -> list[Array]:
        """See `pretrained.initial_values`."""
        return pretrained.initial_values(self.module, self.blocks)

    def export(self, files: Mapping[str, str]) -> Export:
        """PEFT's layout for LoRA, Hugging Face's for a whole model; and these text files."""
        if self.lora is None:
            return export_in_full(self.loaded, dict(files))
        return self.lora.export(self.spec.name or self.spec.source or "", self.blocks, dict(files))

    def trainable(
        self,
        seed: int,
        threads: int,
        loss: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor],
        evaluate: Callable[[nn.Module, Mapping[str, Any]], Sums],
    ) -> Trainable:
        """What a backend compiles: see `Trainable` for what `loss` and `evaluate` give."""
        return Trainable(
            blocks=self.blocks,
            module=self.module,
            loss=loss,
            evaluate=evaluate,
            seed=seed,
            threads=threads,
            precision=self.spec.precision,
            base_dtype=self.spec.base_dtype,
        )
