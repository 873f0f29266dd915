"""What is still known of the run that left a directory: beside its result, or in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from protocol.base.errors import DataError
from protocol.base.regular_file import read_json

TRAINED: Final = "samestep.json"
"""Beside the result of a classify run; see `worker.tasks.trained`."""


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """Sections of its run spec, as documents; empty where nothing says what they were.

    Attributes:
        task: What was trained; empty where that is not known.
        model: Where its base was, and how it computed.
        tokenizer: None for the model's own.
        chat_template: None for the tokenizer's.
        labels: Of a classifier, by number; empty without.
    """

    task: str
    model: dict[str, Any]
    tokenizer: dict[str, Any] | None
    chat_template: str | None
    labels: tuple[str, ...]

    @staticmethod
    def that_left(directory: Path) -> EarlierRun:
        """Of a directory with an adapter or a model.

        Its own files count before those of the run around it; the card alone says the least.

        Raises:
            DataError: `samestep.json` is there and cannot be read.
        """
        own, spec = _own(directory), _spec_around(directory)
        model = _section(own, "model") or _section(spec, "model") or _of_card(directory)
        if name := _section(spec, "model").get("name"):
            model = {**model, "source": _section(spec, "model").get("source"), "name": name}
        return EarlierRun(
            task=str(own.get("task") or spec.get("task") or ""),
            model=model,
            tokenizer=_section(spec, "tokenizer") or None,
            chat_template=_section(spec, "data").get("chat_template"),
            labels=tuple(own.get("labels", ())),
        )


def _own(directory: Path) -> dict[str, Any]:
    path = directory / TRAINED
    try:
        found = _document(path)
    except (FileNotFoundError, NotADirectoryError):  # (a GGUF file is its own directory)
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}") from None
    labels = found.get("labels")
    if not isinstance(labels, list) or not all(isinstance(each, str) for each in labels):
        raise DataError(
            f"{str(path)!r} is not what a classify run writes (labels); copy the directory again "
            "from where the run left it"
        )
    return found


def _spec_around(directory: Path) -> dict[str, Any]:
    """Of the run whose directory this lies in, where the run has put it."""
    above = directory.absolute().parent
    run = above.parent.parent if above.parent.name == "checkpoints" else above
    try:
        return _section(_document(run / "run.json"), "spec")
    except (OSError, ValueError, RecursionError):
        return {}


def _of_card(directory: Path) -> dict[str, Any]:
    from protocol.spec.model_card import read_card  # noqa: PLC0415  (it knows run specs)

    facts = read_card(directory)
    return {} if facts is None else {"source": facts.base, "base_dtype": facts.base_dtype}


def _document(path: Path) -> dict[str, Any]:
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _section(document: dict[str, Any], key: str) -> dict[str, Any]:
    found = document.get(key)
    return found if isinstance(found, dict) else {}
