"""What a run leaves behind: the trained tensors in the manifest's layout, and result.json.

Everything is written under a temporary name, synced and renamed: a reader never sees half a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from coordinator.disk.durable_file import NewFile, make_below, replace_file, storing
from coordinator.disk.safetensors_file import safetensors_pieces
from protocol.base.errors import DataError
from protocol.exact.replica import Replica
from protocol.exact.update import Array
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

    Raises:
        StorageFailed: The disk refuses.
    """
    with ExitStack() as stack:
        files = begin_model(stack, directory, manifest, replica.trained_tensors())
        return {name: file.confirm() for name, file in files.items()}


def begin_model(
    stack: ExitStack, directory: Path, manifest: Manifest, named: Mapping[str, Array]
) -> dict[str, NewFile]:
    """Write the files of `write_model`, not durable yet: the replica may change from then on.

    Args:
        stack: Closes them.
        directory: As for `write_model`.
        manifest: As there.
        named: The tensors.

    Returns:
        Each by its path below `directory`, to be confirmed in this order.
    """
    export = manifest.export
    target = directory / export.directory
    with storing("make", target):
        make_below(directory, target)
    tensors = {export.names.get(name, name): values for name, values in named.items()}
    contents: dict[str, bytes | Iterator[memoryview]] = {
        export.weights_file: safetensors_pieces(tensors, {"format": "pt"})
    }
    for name, text in export.files.items():
        written = _with_place_of_base(text) if name == ADAPTER_CONFIG else text
        contents[name] = written.encode()
    files = {}
    for name, content in contents.items():
        file = files[f"{export.directory}/{name}"] = stack.enter_context(NewFile(target / name))
        file.write(content)
    return files


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
    """Save a JSON document as of `json_text`."""
    replace_file(path, json_text(document))


def json_text(document: dict[str, object]) -> bytes:
    """A JSON document, two spaces deep; non-finite numbers are not JSON and not accepted."""
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()
