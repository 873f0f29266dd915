"""`samestep.json` in the directory of a labeling result: settings for labeling new texts."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from protocol.base.errors import DataError
from protocol.base.regular_file import read_json, read_regular
from protocol.spec.earlier_run import RESULT_INFO_FILE
from protocol.spec.manifest import ADAPTER_CONFIG
from protocol.spec.run_spec import ClassifyRun, TagRun
from protocol.spec.sections.data import Problem
from protocol.spec.sections.model import LoraSpec, ModelSpec


class ResultInfo(BaseModel):
    """The settings of a run's labels and texts, with which new texts are read and labeled.

    Attributes:
        task: The run's task.
        labels: Names of the labels, by number.
        problem: single-label, multi-label or regression.
        has_pairs: Whether a text is a pair of texts.
        max_tokens: Longer texts are truncated.
        seed: The run's seed, from which weights that the base lacks were drawn.
        model: The section `model`, without an adapter.
        lora: The section `lora`; None for a model that was trained in full.
        base_weights: Digest of the base; see `Manifest.digests`.
        scale: Mean and deviation of the target of a regression. The predicted number is the
            model's output times the deviation, plus the mean.
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
        omitted = {"scale"} if self.scale == (0.0, 1.0) else set[str]()
        if self.problem == "single-label":
            omitted |= {"problem"} if self.has_pairs else {"problem", "has_pairs"}
        return self.model_dump_json(indent=2, exclude=omitted) + "\n"

    @staticmethod
    def read(directory: Path) -> ResultInfo:
        """Read the file from a run's directory `adapter` or `model`.

        Raises:
            DataError: The directory is not the result of a classify or tag run.
        """
        path = directory / RESULT_INFO_FILE
        try:
            return ResultInfo.model_validate_json(read_regular(path))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(_wrong_directory(directory)) from None
        except OSError as error:
            raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from None
        except ValidationError as error:
            location = ".".join(map(str, error.errors()[0]["loc"]))
            raise DataError(
                f"{str(path)!r}: expected the file that a classify or tag run writes, got another "
                f"({location or 'it is not JSON'}); copy the directory again from the run"
            ) from None

    def base(self, directory: Path) -> str:
        """Return the source of the base model and its tokenizer.

        A whole model is its own base. An adapter names its base by a path on the coordinator's
        machine; if that does not exist here, the source in the run spec is used.
        """
        if self.lora is None:
            return str(directory)
        try:
            config = read_json(directory / ADAPTER_CONFIG)
            source = str(config["base_model_name_or_path"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read the adapter in {str(directory)!r}: {error}") from None
        return source if Path(source).is_dir() else str(self.model.source)


def _wrong_directory(directory: Path) -> str:
    expected = f"expected the result of a classify or tag run in {str(directory)!r}"
    for inner in ("adapter", "model"):
        if (directory / inner / RESULT_INFO_FILE).is_file():
            return f"{expected}; it is in {str(directory / inner)!r}"
    return f"{expected}, its adapter or model directory, found no {RESULT_INFO_FILE}"


def result_info(
    spec: ClassifyRun | TagRun,
    names: tuple[str, ...],
    base_weights: str,
    *,
    problem: Problem = "single-label",
    has_pairs: bool = False,
    scale: tuple[float, float] = (0.0, 1.0),
) -> ResultInfo:
    """Return the information that a run saves with its result."""
    # On a worker that fetched the model, `source` is a directory of its cache.
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
