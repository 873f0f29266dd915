"""A loaded model as a run trains it: in full, or through low-rank matrices beside its layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backends.base.interface import Array, Sums, Trainable
from protocol.base import limits
from protocol.base.fields import cut_text
from protocol.spec.manifest import Block, Export
from protocol.spec.sections.model import LoraSpec, ModelSpec
from worker.models import pretrained
from worker.models.blocks import cut_into_blocks
from worker.models.lora import Lora, TaskType, head_modules, modules_drawn, owner_of


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model, its trained parameters, and their division into blocks.

    Attributes:
        loaded: The model.
        lora: The low-rank adapter; None if the model is trained in full.
        blocks: Blocks of the trained parameters.
        spec: The section `model` of the run spec.
        new: Modules that the checkpoint lacks, without a classifier's head.
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
    ) -> TrainableModel:
        """Train the model in full if `lora` is None, else through low-rank matrices.

        A classifier's head and modules that the checkpoint lacks are trained in full as well.

        Args:
            loaded: The model.
            model: The section `model` of the run spec.
            lora: Rank, scale and targets.
            task_type: The adapter's task type in peft.
            seed: The run's seed.
            heads: Modules that an earlier adapter, to be continued, trained in full.

        Raises:
            DataError: See `Lora`.
        """
        usual = head_modules(loaded.model) if task_type in ("SEQ_CLS", "TOKEN_CLS") else []
        new = modules_drawn(loaded.drawn, usual)
        if lora is None:
            told = () if usual else new
            return TrainableModel(loaded, None, cut_into_blocks(loaded.model), model, told)
        heads = [*usual, *new] if heads is None else heads
        added = Lora(
            loaded.model, lora, task_type, heads, seed,
            adapter=model.adapter, added_tokens=loaded.added_tokens, base_dtype=model.base_dtype,
        )  # fmt: skip
        return TrainableModel(loaded, added, cut_into_blocks(added.module), model, new)

    @property
    def notes(self) -> dict[str, int]:
        """Number of tokens added, and of parameters drawn for each module that the checkpoint
        lacks, for the manifest.

        Without a classifier's head, which a checkpoint is not expected to have.
        """
        drawn, added = self.loaded.drawn, len(self.loaded.added_tokens)
        counts = {
            cut_text(f"drawn_as_the_checkpoint_lacks[{owner}]", limits.NAME_CHARACTERS): sum(
                elements for name, elements in drawn.items() if owner_of(name) == owner
            )
            for owner in self.new
        }
        return {"tokens_added": added, **counts} if added else counts

    @property
    def module(self) -> nn.Module:
        return self.loaded.model if self.lora is None else self.lora.module

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the loaded weights, for the manifest."""
        adapter = "" if self.lora is None else self.lora.adapter_digest
        return {
            "base_weights": self.loaded.weights_digest,
            **({"adapter": adapter} if adapter else {}),
        }

    def initial_values(self) -> list[Array]:
        """See `pretrained.initial_values`."""
        return pretrained.initial_values(self.module, self.blocks)

    def export(self, files: Mapping[str, str]) -> Export:
        """What to export: PEFT's layout for LoRA, else Hugging Face's, with these text files."""
        if self.lora is None:
            return _full_export(self.loaded, dict(files))
        return self.lora.export(self.spec.name or self.spec.source or "", self.blocks, dict(files))

    def trainable(
        self,
        seed: int,
        threads: int,
        loss: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor] | None,
        evaluate: Callable[[nn.Module, Mapping[str, Any]], Sums],
    ) -> Trainable:
        """The `Trainable` for a backend; see there for `loss` and `evaluate`."""
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


def _full_export(loaded: pretrained.Pretrained, files: dict[str, str]) -> Export:
    """The whole model in Hugging Face's layout, which `from_pretrained` loads.

    Tied tensors are saved once; the configuration says that they are tied.
    """
    config = loaded.config.to_diff_dict()
    for key in ("transformers_version", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(loaded.model).__name__]
    document = json.dumps(config, indent=2, sort_keys=True, default=str) + "\n"
    return Export(files={"config.json": document, **files})
