"""The result files of a run: the trained tensors in the manifest's layout, and result.json.

Everything is written under a temporary name, synced and renamed: a reader never sees half a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from coordinator.disk.durable_file import NewFile, make_below, replace_file, storage_errors
from coordinator.disk.safetensors_file import safetensors_pieces
from protocol.base.errors import DataError
from protocol.exact.reduction.average import Array
from protocol.exact.replica import Replica
from protocol.spec.files.sources import model_source
from protocol.spec.manifest import ADAPTER_CONFIG, Manifest


def write_model(directory: Path, manifest: Manifest, replica: Replica) -> dict[str, str]:
    """Save the trained tensors in the layout of the manifest.

    Args:
        directory: The run's directory; the export's directory is below it.
        manifest: The run's manifest, with file names, tensor names and further text files.
        replica: The trained state.

    Returns:
        BLAKE3 of each file, by its path below `directory`.

    Raises:
        StorageFailed: A write failed.
    """
    with ExitStack() as stack:
        files = prepare_model_files(stack, directory, manifest, replica.trained_tensors())
        return {name: file.confirm() for name, file in files.items()}


def prepare_model_files(
    stack: ExitStack, directory: Path, manifest: Manifest, tensors_by_name: Mapping[str, Array]
) -> dict[str, NewFile]:
    """Write the files of `write_model`, not yet durable; the replica may change afterwards.

    Args:
        stack: Takes the open files, and closes them.
        directory: As for `write_model`.
        manifest: As for `write_model`.
        tensors_by_name: The tensors by name.

    Returns:
        Each file by its path below `directory`, to be confirmed in this order.
    """
    export = manifest.export
    target = directory / export.directory
    with storage_errors("make", target):
        make_below(directory, target)
    tensors = {export.names.get(name, name): values for name, values in tensors_by_name.items()}
    contents: dict[str, bytes | Iterator[memoryview]] = {
        export.weights_file: safetensors_pieces(tensors, {"format": "pt"})
    }
    for name, text in export.files.items():
        file_text = _with_base_path(text) if name == ADAPTER_CONFIG else text
        contents[name] = file_text.encode()
    files = {}
    for name, content in contents.items():
        if "/" in name:
            with storage_errors("make", (target / name).parent):
                make_below(directory, (target / name).parent)
        file = files[f"{export.directory}/{name}"] = stack.enter_context(NewFile(target / name))
        file.write(content)
    return files


def _with_base_path(text: str) -> str:
    """Make the base model in an adapter's configuration an absolute path, if it is a directory.

    PEFT accepts only a directory or a hub name.
    """
    try:
        config = json.loads(text)
        base_path = Path(model_source(str(config["base_model_name_or_path"])))
    except (DataError, ValueError, KeyError, TypeError):
        return text
    if not base_path.is_dir():
        return text
    config["base_model_name_or_path"] = str(base_path.absolute())
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def write_json(path: Path, document: dict[str, object]) -> None:
    """Save a JSON document in the format of `json_text`."""
    replace_file(path, json_text(document))


def json_text(document: dict[str, object]) -> bytes:
    """Encode a JSON document with two spaces of indentation; non-finite numbers are refused."""
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()
