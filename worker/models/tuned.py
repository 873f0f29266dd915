"""A loaded model as a run trains it: whole, or through low-rank matrices beside its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backends.base.interface import Array, Sums, Trainable
from protocol.base import limits
from protocol.base.fields import cut_text
from protocol.spec.manifest import Block, Export
from protocol.spec.run_spec import LoraSpec, ModelSpec
from worker.models import pretrained
from worker.models.blocks import cut_into_blocks
from worker.models.full_export import export_in_full
from worker.models.lora import Lora, TaskType, head_modules, modules_drawn, owner_of


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model, what is trained of it, and how that is cut into blocks.

    Attributes:
        loaded: The model.
        lora: What is added to it; None if it is trained whole.
        blocks: Of what is trained.
        spec: What the run spec says of it.
        new: Modules that the checkpoint lacks, beside a classifier's head.
    """

    loaded: pretrained.Pretrained
    lora: Lora | None
    blocks: tuple[Block, ...]
    spec: ModelSpec
    new: tuple[str, ...]

    @staticmethod
    def of(
        loaded: pretrained.Pretrained,
        model: ModelSpec,
        lora: LoraSpec | None,
        task_type: TaskType,
        seed: int,
        *,
        heads: Sequence[str] | None = None,
    ) -> Tuned:
        """The model whole if `lora` is None; else low-rank matrices, and what is trained in full
        beside them: a classifier's head, and whatever the checkpoint lacks.

        Args:
            loaded: The model.
            model: What the run spec says of it.
            lora: Rank, scale and targets.
            task_type: What an adapter is for, in peft's words.
            seed: The run's.
            heads: What an adapter of before trained in full.

        Raises:
            DataError: As of `Lora`.
        """
        usual = head_modules(loaded.model) if task_type == "SEQ_CLS" else []
        new = modules_drawn(loaded.drawn, usual)
        if lora is None:
            told = () if usual else new
            return Tuned(loaded, None, cut_into_blocks(loaded.model), model, told)
        heads = [*usual, *new] if heads is None else heads
        added = Lora(loaded.model, lora, task_type, heads, seed, adapter=model.adapter)
        return Tuned(loaded, added, cut_into_blocks(added.module), model, new)

    @property
    def notes(self) -> dict[str, int]:
        """Which modules were drawn, for the manifest, and how many parameters of each.

        Not a classifier's head, which nobody expects in a checkpoint.
        """
        drawn = self.loaded.drawn
        return {
            cut_text(f"drawn_as_the_checkpoint_lacks[{owner}]", limits.NAME_CHARACTERS): sum(
                elements for name, elements in drawn.items() if owner_of(name) == owner
            )
            for owner in self.new
        }

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
