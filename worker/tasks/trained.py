"""What a classify run decided about its input: written beside its result, read to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.base.errors import DataError
from protocol.base.regular_file import read_json, read_regular
from protocol.spec.earlier_run import TRAINED
from protocol.spec.manifest import ADAPTER_CONFIG
from protocol.spec.run_spec import LoraSpec, ModelSpec

FILE: Final = TRAINED


class Trained(BaseModel):
    """Whoever uses the result makes of a text what the run made of it.

    Attributes:
        task: Of the run.
        labels: By number.
        max_tokens: Longer texts are cut.
        seed: The run's: a base is the same if it has the same digest together with what was drawn.
        model: Where the base is, and how it computes.
        lora: What was added to it; None for a model that was trained in full.
        base_weights: Digest of the base; see `Manifest.digests`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    labels: tuple[str, ...]
    max_tokens: int
    seed: int
    model: ModelSpec
    lora: LoraSpec | None
    base_weights: str

    def document(self) -> str:
        """As it is written."""
        return self.model_dump_json(indent=2) + "\n"

    @staticmethod
    def read(directory: Path) -> Trained:
        """What lies in a run's `adapter` or `model`.

        Raises:
            DataError: It is no result of a classify run.
        """
        path = directory / FILE
        try:
            return Trained.model_validate_json(read_regular(path))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(_not_there(directory)) from None
        except OSError as error:
            raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise DataError(
                f"{str(path)!r} is not what a classify run writes ({place or 'it is no JSON'}); "
                "copy the directory again from where the run left it"
            ) from None

    def base(self, directory: Path) -> str:
        """Source of the model that the trained tensors go into, its tokenizer with it.

        A whole model is its own. An adapter's base is looked for where the adapter says, which
        names a place on the coordinator's machine, else where the run spec says.
        """
        if self.lora is None:
            return str(directory)
        try:
            config = read_json(directory / ADAPTER_CONFIG)
            named = str(config["base_model_name_or_path"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read the adapter in {str(directory)!r}: {error}") from None
        return named if Path(named).is_dir() else str(self.model.source)


def _not_there(directory: Path) -> str:
    expected = f"expected the result of a classify run in {str(directory)!r}"
    for inner in ("adapter", "model"):
        if (directory / inner / FILE).is_file():
            return f"{expected}; it is in {str(directory / inner)!r}"
    return f"{expected}, its adapter or model directory, found no {FILE}"
