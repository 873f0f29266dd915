"""The model that a run trains, in full or with LoRA."""

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
from worker.models.lora import Lora, TaskType, head_modules, list_new_modules, owner_of


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model, its trained parameters, and their division into blocks.

    Attributes:
        loaded: The model.
        lora: The low-rank adapter; None if the model is trained in full.
        blocks: Blocks of the trained parameters.
        spec: The section `model` of the run spec.
        new_modules: Modules that the checkpoint lacks, except a classifier's head; empty for a
            classifier that is trained in full.
    """

    loaded: pretrained.Pretrained
    lora: Lora | None
    blocks: tuple[Block, ...]
    spec: ModelSpec
    new_modules: tuple[str, ...]

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
        """Prepare a model for training: in full if `lora` is None, else with low-rank matrices.

        With low-rank matrices, a classifier's head and modules that the checkpoint lacks are still
        trained in full.

        Args:
            loaded: The model.
            model: The section `model` of the run spec.
            lora: Rank, scale and targets.
            task_type: The adapter's task type in peft.
            seed: The run's seed.
            heads: Modules to train in full, of the adapter that the run continues; None to choose
                them here.

        Raises:
            DataError: See `Lora`.
        """
        classifier_heads = (
            head_modules(loaded.model) if task_type in ("SEQ_CLS", "TOKEN_CLS") else []
        )
        new_modules = list_new_modules(loaded.drawn_parameters, classifier_heads)
        if lora is None:
            reported_modules = () if classifier_heads else new_modules
            return TrainableModel(
                loaded, None, cut_into_blocks(loaded.model), model, reported_modules
            )
        heads = [*classifier_heads, *new_modules] if heads is None else heads
        adapter = Lora(
            loaded.model, lora, task_type, heads, seed,
            adapter=model.adapter, added_tokens=loaded.added_tokens, base_dtype=model.base_dtype,
        )  # fmt: skip
        return TrainableModel(loaded, adapter, cut_into_blocks(adapter.module), model, new_modules)

    @property
    def notes(self) -> dict[str, int]:
        """Return counts for the manifest.

        They are the number of added tokens, and the number of drawn parameters of each new module.
        A classifier's head is not counted, because a checkpoint is not expected to have it.
        """
        drawn_parameters, added_count = self.loaded.drawn_parameters, len(self.loaded.added_tokens)
        counts = {
            cut_text(f"drawn_as_the_checkpoint_lacks[{owner}]", limits.NAME_CHARACTERS): sum(
                elements for name, elements in drawn_parameters.items() if owner_of(name) == owner
            )
            for owner in self.new_modules
        }
        return {"tokens_added": added_count, **counts} if added_count else counts

    @property
    def module(self) -> nn.Module:
        """Return the module to train: the model, or its wrapper with low-rank matrices."""
        return self.loaded.model if self.lora is None else self.lora.module

    @property
    def digests(self) -> dict[str, str]:
        """Return the digests of the loaded weights, for the manifest."""
        adapter = "" if self.lora is None else self.lora.adapter_digest
        return {
            "base_weights": self.loaded.weights_digest,
            **({"adapter": adapter} if adapter else {}),
        }

    def initial_values(self) -> list[Array]:
        """See `pretrained.initial_values`."""
        return pretrained.initial_values(self.module, self.blocks)

    def export(self, files: Mapping[str, str]) -> Export:
        """Return the layout of the exported model with these text files.

        The layout is PEFT's for LoRA, else Hugging Face's.
        """
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
        """Return the `Trainable` for a backend; see there for `loss` and `evaluate`."""
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
    """Return the layout of the whole model, from which `from_pretrained` loads it.

    Tied tensors are saved once; the configuration says that they are tied.
    """
    config = loaded.config.to_diff_dict()
    for key in ("transformers_version", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(loaded.model).__name__]
    document = json.dumps(config, indent=2, sort_keys=True, default=str) + "\n"
    return Export(files={"config.json": document, **files})
