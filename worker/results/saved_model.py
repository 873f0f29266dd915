"""Find the model that a user names by the directory of a run, an adapter or a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol import __version__
from protocol.base.errors import DataError, MessageError
from protocol.base.regular_file import read_json, read_regular
from protocol.spec.files.sources import GGUF
from protocol.spec.manifest import ADAPTER_CONFIG, Manifest
from protocol.spec.model_card import CardFacts, read_card
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
SENTENCE_TRANSFORMERS_FILES: Final = (
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A saved model, or an adapter for one.

    Attributes:
        directory: Directory of its files, or a GGUF file.
        adapter: Content of `adapter_config.json`; None for a complete model.
        facts: Facts that its run recorded; None if unknown.
    """

    directory: Path
    adapter: dict[str, Any] | None
    facts: CardFacts | None

    @property
    def is_complete(self) -> bool:
        return self.adapter is None

    @property
    def is_text_encoder(self) -> bool:
        """Whether the model is a text encoder, with the files of sentence-transformers."""
        return (self.directory / SENTENCE_TRANSFORMERS_FILES[0]).is_file()

    def refuse_embeddings(self) -> None:
        """Refuse a text encoder where a model that generates text is needed.

        Raises:
            DataError: The model is a text encoder.
        """
        if self.is_text_encoder:
            raise DataError(
                f"expected a model that generates text in {str(self.directory)!r}, got one that "
                "embeds texts; load it with sentence-transformers, an adapter after worker merge"
            )

    def base(self, user_choice: str | None) -> str:
        """Return the source of the base model; of a complete model, its directory.

        Args:
            user_choice: The source that the user names; None: the path in the adapter if it exists
                on this machine, else the source in the run spec.

        Raises:
            DataError: The user names a base for a complete model, or the adapter names none.
        """
        if self.adapter is None:
            if user_choice is not None:
                raise DataError(
                    f"--base: expected none for the complete model {str(self.directory)!r}, got "
                    "one; leave --base out"
                )
            return str(self.directory)
        if user_choice is not None:
            return user_choice
        recorded_path = self.adapter.get("base_model_name_or_path")
        if isinstance(recorded_path, str) and Path(recorded_path).is_dir():
            return recorded_path
        spec = self.facts.base if self.facts is not None else None
        if not (spec or recorded_path):
            raise DataError(
                f"expected a base model in {str(self.directory / ADAPTER_CONFIG)!r}, got none; "
                "name it: --base DIR"
            )
        return str(spec or recorded_path)


def find_saved_model(path: Path) -> SavedModel:
    """Find the saved model in a run's, an adapter's or a model's directory.

    Raises:
        DataError: The path is none of these, or the run has not finished.
    """
    if path.is_file() and path.suffix == GGUF:
        return SavedModel(path, None, None)
    if not path.is_dir():
        raise DataError(
            f"expected the directory of a run or a model at {str(path)!r}, found none; check the "
            "path"
        )
    if (path / "run.json").is_file():
        return _model_of_run(path)
    if (path / ADAPTER_CONFIG).is_file():
        return SavedModel(path, _read_adapter_config(path), read_card(path) or _facts_above(path))
    if (path / "config.json").is_file():
        return SavedModel(path, None, read_card(path) or _facts_above(path))
    subdirectory = next((n for n in ("adapter", "model") if (path / n).is_dir()), None)
    hint = f"; is it {str(path / subdirectory)!r}?" if subdirectory else ""
    raise DataError(
        f"expected a run (run.json), an adapter ({ADAPTER_CONFIG}) or a model (config.json) in "
        f"{str(path)!r}, found none{hint}"
    )


def _model_of_run(run: Path) -> SavedModel:
    if not (run / "result.json").is_file():
        raise DataError(
            f"expected a finished run in {str(run)!r}, got one without result.json; resume it "
            f"first: coordinator --out {run} --resume"
        )
    _, manifest, _ = _documents(run)
    directory = run / manifest.export.directory
    if (directory / ADAPTER_CONFIG).is_file():
        adapter = _read_adapter_config(directory)
    elif (directory / "config.json").is_file():
        adapter = None
    else:
        raise DataError(
            f"expected a run of a language model or classifier in {str(run)!r}, got a result "
            f"without config.json in {str(directory)!r}; use a run of such a task"
        )
    return SavedModel(directory, adapter, read_card(directory) or _facts_of_run(run))


def _documents(run: Path) -> tuple[RunSpec, Manifest, dict[str, Any]]:
    try:
        document = read_json(run / "run.json")["spec"]
        spec = parse_run_spec_bytes(json.dumps(document).encode())
        manifest = Manifest.from_bytes(read_regular(run / "manifest.json"))
        result = read_json(run / "result.json")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MessageError) as error:
        raise DataError(f"cannot read the files of the run in {str(run)!r}: {error}") from None
    return spec, manifest, result


def _facts_of_run(run: Path) -> CardFacts:
    """Return the facts of a run of an older release, whose result has no model card."""
    spec, manifest, result = _documents(run)
    return CardFacts.of(spec, manifest, result, __version__, ())


def _facts_above(directory: Path) -> CardFacts | None:
    """Return the facts of the run whose result the directory is; None if there is no such run."""
    run = directory.absolute().parent
    if not all((run / name).is_file() for name in ("run.json", "manifest.json", "result.json")):
        return None
    _, manifest, _ = _documents(run)
    return _facts_of_run(run) if manifest.export.directory == directory.name else None


def _read_adapter_config(directory: Path) -> dict[str, Any]:
    path = directory / ADAPTER_CONFIG
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}") from None
    peft_type = config.get("peft_type") if isinstance(config, dict) else None
    if peft_type != "LORA":
        raise DataError(
            f"expected a LoRA adapter in {str(directory)!r}, got {peft_type or 'no type'}; use "
            "PEFT itself for other types"
        )
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise DataError(
            f"expected {ADAPTER_WEIGHTS} in {str(directory)!r}, found none; copy the directory "
            "again from the run"
        )
    return dict(config)
