"""A whole model saved in Hugging Face's layout: `from_pretrained` of the directory loads it."""

from __future__ import annotations

import json
from typing import Any

from protocol.spec.manifest import Export
from worker.models.pretrained import Pretrained


def export_in_full(loaded: Pretrained, files: dict[str, str]) -> Export:
    """model.safetensors under the model's own names, config.json, and these text files.

    Tied tensors are saved once; the configuration says that they are tied.
    """
    config = loaded.config.to_diff_dict()
    for key in ("transformers_version", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(loaded.model).__name__]
    return Export(files={"config.json": _document(config), **files})


def _document(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, default=str) + "\n"
