"""`samestep.json` beside a result with labels: what is needed to label new texts with it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.base.errors import DataError
from protocol.base.regular_file import read_json, read_regular
from protocol.spec.earlier_run import TRAINED
from protocol.spec.manifest import ADAPTER_CONFIG
from protocol.spec.run_spec import ClassifyRun, TagRun
from protocol.spec.sections.data import Problem
from protocol.spec.sections.model import LoraSpec, ModelSpec

FILE: Final = TRAINED


class ResultInfo(BaseModel):
    """How a run read its texts, so that new texts are read the same way.

    Attributes:
        task: The run's.
        labels: Names, by number.
        problem: Which kind of labels.
        has_pairs: Whether a text is a pair of texts.
        max_tokens: Longer texts are truncated.
        seed: The run's, which drew the weights that the base lacks.
        model: Where the base is, and how it computes.
        lora: What was added to it; None for a model that was trained in full.
        base_weights: Digest of the base; see `Manifest.digests`.
        scale: Mean and deviation of the numbers that were learned: a number is what the model says
            times the deviation, plus the mean.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    labels: tuple[str, ...]
    max_tokens: int
    seed: int
    model: ModelSpec
    lora: LoraSpec | None
    base_weights: str
    problem: Problem = "single-label"
    has_pairs: bool = False
    scale: tuple[float, float] = (0.0, 1.0)

    def document(self) -> str:
        """Return the file's text."""
        usual = {"problem", "has_pairs"} if self.problem == "single-label" else set[str]()
        seldom = {name for name in usual if not (name == "has_pairs" and self.has_pairs)}
        seldom |= {"scale"} if self.scale == (0.0, 1.0) else set()
        return self.model_dump_json(indent=2, exclude=seldom) + "\n"

    @staticmethod
    def read(directory: Path) -> ResultInfo:
        """Read it from a run's `adapter` or `model`.

        Raises:
            DataError: The directory is no result with labels.
        """
        path = directory / FILE
        try:
            return ResultInfo.model_validate_json(read_regular(path))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(_not_there(directory)) from None
        except OSError as error:
            raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise DataError(
                f"{str(path)!r} is not what a run with labels writes ({place or 'it is no JSON'}); "
                "copy the directory again from where the run left it"
            ) from None

    def base(self, directory: Path) -> str:
        """Return the source of the base model and its tokenizer.

        A whole model is its own base. An adapter's base is where the adapter says (a path on the
        coordinator's machine), else where the run spec says.
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
    expected = f"expected the result of a classify or tag run in {str(directory)!r}"
    for inner in ("adapter", "model"):
        if (directory / inner / FILE).is_file():
            return f"{expected}; it is in {str(directory / inner)!r}"
    return f"{expected}, its adapter or model directory, found no {FILE}"


def result_info(
    spec: ClassifyRun | TagRun,
    names: tuple[str, ...],
    base_weights: str,
    *,
    problem: Problem = "single-label",
    has_pairs: bool = False,
    scale: tuple[float, float] = (0.0, 1.0),
) -> ResultInfo:
    """Return what the result of a run says of itself."""
    # A worker's own directory for what it was sent is no part of the result.
    source = spec.model.name or spec.model.source
    return ResultInfo(
        task=spec.task,
        labels=names,
        problem=problem,
        has_pairs=has_pairs,
        scale=scale,
        max_tokens=spec.data.max_tokens,
        seed=spec.seed,
        model=spec.model.model_copy(update={"source": source, "name": None, "adapter": None}),
        lora=spec.lora,
        base_weights=base_weights,
    )
