"""What a run leaves behind: the trained tensors in the manifest's layout, and result.json.

Everything is written under a temporary name, synced and renamed: a reader never sees half a file.
"""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.disk.durable_file import replace_file
from coordinator.disk.safetensors_file import safetensors_pieces
from protocol.base.errors import DataError
from protocol.exact.replica import Replica
from protocol.spec.manifest import ADAPTER_CONFIG, Manifest
from protocol.spec.sources import model_source


def write_model(directory: Path, manifest: Manifest, replica: Replica) -> dict[str, str]:
    """Save the trained tensors as the manifest says.

    Args:
        directory: The run's output directory; the export's own is made below it.
        manifest: Gives file names, tensor names and the text files that go along.
        replica: The trained state.

    Returns:
        BLAKE3 of each file, by its path below `directory`.
    """
    export = manifest.export
    target = directory / export.directory
    target.mkdir(parents=True, exist_ok=True)
    tensors = {export.names.get(name, name): values for name, values in replica.tensors().items()}
    weights = safetensors_pieces(tensors, {"format": "pt"})
    digests = {export.weights_file: replace_file(target / export.weights_file, weights)}
    for name, text in export.files.items():
        written = _with_place_of_base(text) if name == ADAPTER_CONFIG else text
        digests[name] = replace_file(target / name, written.encode())
    return {f"{export.directory}/{name}": digest for name, digest in digests.items()}


def _with_place_of_base(text: str) -> str:
    """PEFT itself looks for an adapter's base in a directory or on the hub: no other words do."""
    try:
        config = json.loads(text)
        found = Path(model_source(str(config["base_model_name_or_path"])))
    except (DataError, ValueError, KeyError, TypeError):
        return text
    if not found.is_dir():
        return text
    config["base_model_name_or_path"] = str(found.absolute())
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def write_json(path: Path, document: dict[str, object]) -> None:
    """Save a JSON document, two spaces deep; non-finite numbers are not JSON and not accepted."""
    text = json.dumps(document, indent=2, allow_nan=False)
    replace_file(path, (text + "\n").encode())
