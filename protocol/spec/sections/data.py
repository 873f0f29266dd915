"""The section `data` of a run spec, by task and by `data.format`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from protocol.base.fields import BoundedInt, Count, Fraction, sort_keys
from protocol.spec.sections.section import KeyFault, Needs, OmittedByDefault, Section, TaggedUnion

LOGITS_SUFFIX: Final = ".parquet"
"""Suffix of files with captured logits."""

DEFAULT_PATTERN: Final = "*.txt"
"""Default pattern of files of running text; in a directory without such files, files of rows are
read."""
COLUMNS_OF_FORMAT: Final[dict[str, tuple[str, ...]]] = {
    "text": (),
    "messages": ("messages", "system", "tools"),
    "sharegpt": ("conversations", "system", "tools"),
    "prompt-completion": ("prompt", "completion", "system", "tools"),
    "alpaca": ("instruction", "input", "output", "system", "history", "tools"),
}
"""The columns of each `data.format`, named as in `data.columns`."""
PREFERENCE_COLUMNS: Final = ("prompt", "chosen", "rejected", "system", "tools")
"""The columns of task dpo."""
EMBEDDING_COLUMNS: Final = ("anchor", "positive", "negative")
"""The columns of task embed."""
OPTIONAL_COLUMNS: Final = frozenset({"input", "system", "history", "tools", "negative"})
"""Columns that a row may lack."""

Problem = Literal["single-label", "multi-label", "regression"]
ConversationFormat = Literal["messages", "sharegpt", "prompt-completion", "alpaca"]
Column = Literal[
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system",
    "history", "tools", "chosen", "rejected", "anchor", "positive", "negative",
]  # fmt: skip
Weight = Annotated[float, Field(gt=0.0, le=1e6)]
ClassWeights = Literal["balanced"] | Annotated[dict[str, Weight], AfterValidator(sort_keys)]


class DataSpec(Section):
    """Training and evaluation data."""

    train: str = Field(
        description="a file, a directory, a pattern such as `chats/*.jsonl`, or "
        "`package:DISTRIBUTION`; for causal-lm also `python-stdlib`, Python's top-level modules; "
        "for distil the directory of a capture"
    )
    name: Annotated[str | None, OmittedByDefault()] = Field(
        None,
        max_length=400,
        description="name of the data in the model card, such as a hub's data set: ORG/NAME",
    )
    text: str = Field("text", description="column or key of the text")
    label: str = Field("label", description="column or key of the label")
    pattern: str = Field(
        DEFAULT_PATTERN, min_length=1, description="files of a directory to read, at any depth"
    )
    validation: str | None = Field(
        None, description="separate evaluation data instead of a held-out share; named as train"
    )
    holdout: Annotated[Fraction, Needs("validation", (None,))] = Field(
        0.2, description="share of samples or documents held out for evaluation"
    )
    holdout_samples: Count | None = Field(
        None, description="evaluate at most this many held-out samples, drawn by the seed"
    )
    max_tokens: int = Field(
        64,
        ge=2,
        le=65_536,
        description="labeled texts and conversations: longer ones are truncated; running text: "
        "sample length",
    )
    text_pair: str | None = Field(
        None, description="column or key of a second text, for tasks on pairs of sentences"
    )
    problem: Problem = Field(
        "single-label",
        description="one label per text, several labels, or a number to predict (regression)",
    )
    standardize: Annotated[bool, Needs("problem", ("regression",)), OmittedByDefault()] = Field(
        default=False,
        description="learn (number - mean) / deviation of the training data; metrics and worker "
        "classify give numbers as in the data",
    )
    num_classes: Annotated[BoundedInt | None, Needs("problem", ("single-label", "multi-label"))] = (
        Field(None, ge=2, description="expected number of classes, checked against the data")
    )
    class_weights: Annotated[ClassWeights | None, Needs("problem", ("single-label",))] = Field(
        None, description="`balanced`, or a weight for each label, 1 for labels that are left out"
    )
    sampling: Annotated[ClassWeights | None, Needs("problem", ("single-label",))] = Field(
        None,
        description="draw the samples of an epoch with replacement; `balanced`: each class equally "
        "often; or a weight for each label, 1 for labels that are left out",
    )
    stratify: Annotated[bool, Needs("validation", (None,)), Needs("problem", ("single-label",))] = (
        Field(default=False, description="hold out the same share of each class")
    )
    conflicts: Literal["refuse", "keep_first"] = Field(
        "refuse",
        description="a text that occurs with two labels: refuse the data, or keep the first label",
    )
    format: Literal["text"] | ConversationFormat = Field(
        "text", description="running text, or one conversation per row"
    )
    columns: Annotated[dict[Column, str], AfterValidator(sort_keys)] = Field(
        {}, description="conversations: names of columns that differ from the usual ones"
    )
    loss: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="conversations: tokens that the loss covers; last: those of the last answer",
    )
    chat_template: str | None = Field(
        None, max_length=65_536, description="Jinja template, instead of the tokenizer's own"
    )
    mask_share: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.15, description="share of tokens that are predicted"
    )
    generate_tokens: Annotated[Count | None, OmittedByDefault()] = Field(
        None,
        description="also evaluate targets that the model generates, of at most this many tokens: "
        "ROUGE and exact match",
    )
    skip_bad_rows: bool = Field(
        default=False, description="count and skip rows that cannot be used"
    )
    packing: bool = Field(
        default=False,
        description="pack several documents or conversations into a sample of max_tokens; "
        "attention stays within each, and positions restart with each",
    )
    group_by_length: bool = Field(
        default=False,
        description="conversations: microbatches of similar lengths, for less padding",
    )


_KEYS: Final = frozenset(DataSpec.model_fields)
_COMMON_KEYS: Final = {"train", "name", "validation", "holdout", "holdout_samples"}


class UserTaskData(DataSpec):
    """Data of a user-defined task; the task may read any key."""

    holdout: Fraction = Field(
        0.2, description="share of samples or documents held out for evaluation"
    )


class LabeledData(
    DataSpec,
    lacks=_KEYS
    - _COMMON_KEYS
    - {
        "text",
        "label",
        "max_tokens",
        "num_classes",
        "class_weights",
        "sampling",
        "conflicts",
        "stratify",
        "standardize",
        "text_pair",
        "problem",
        "skip_bad_rows",
    },
):
    """Labeled texts, for classify."""

    @model_validator(mode="after")
    def _check_distinct_columns(self) -> Self:
        names = {"text": self.text, "label": self.label, "text_pair": self.text_pair}
        for first_key, second_key in itertools.combinations(names, 2):
            if names[first_key] == names[second_key]:
                raise KeyFault(
                    f"expected two columns, got {names[first_key]!r} for data.{first_key} and "
                    f"data.{second_key}",
                    first_key,
                    second_key,
                )
        return self


class TaggedData(
    DataSpec, lacks=_KEYS - _COMMON_KEYS - {"text", "label", "max_tokens", "skip_bad_rows"}
):
    """Lists of words with a tag for each word, for tag."""

    text: str = Field("tokens", description="column or key of the words: a list")
    label: str = Field("tags", description="column or key of the tags: a list of the same length")


class TextPairs(
    DataSpec,
    lacks=_KEYS
    - _COMMON_KEYS
    - {"text", "label", "max_tokens", "skip_bad_rows", "generate_tokens"},
):
    """Pairs of source and target texts, for seq2seq."""

    text: str = Field("source", description="column or key of the text that is read")
    label: str = Field("target", description="column or key of the text that is to be written")


class RunningText(
    DataSpec,
    lacks=_KEYS
    - _COMMON_KEYS
    - {"text", "pattern", "max_tokens", "format", "packing", "skip_bad_rows"},
):
    """Running text: documents without turns."""

    format: Literal["text"] = "text"


class MaskedText(
    DataSpec,
    lacks=_KEYS
    - _COMMON_KEYS
    - {"text", "pattern", "max_tokens", "format", "skip_bad_rows", "mask_share"},
):
    """Running text for masked-lm."""

    format: Literal["text"] = "text"


def _check_columns(data: DataSpec, columns: Sequence[str], owner: str) -> None:
    for key in data.columns:
        if key not in columns:
            text = f"{owner} has no column {key!r}; expected one of {', '.join(columns)}"
            raise KeyFault(text, "columns")
    new_names: Mapping[str, str] = dict(data.columns.items())
    names = [new_names.get(key, key) for key in columns]
    if len(set(names)) < len(names):
        raise KeyFault(f"expected columns of different names, got {', '.join(names)}", "columns")


class Conversations(
    DataSpec,
    lacks=_KEYS
    - _COMMON_KEYS
    - {
        "max_tokens",
        "format",
        "columns",
        "loss",
        "chat_template",
        "packing",
        "group_by_length",
        "skip_bad_rows",
    },
):
    """Conversations, one per row."""

    format: ConversationFormat

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        _check_columns(self, COLUMNS_OF_FORMAT[self.format], f"format {self.format}")
        if self.group_by_length and self.packing:
            text = (
                "data.group_by_length has no effect with packing, whose samples are all full; "
                "remove data.group_by_length or data.packing"
            )
            raise KeyFault(text, "group_by_length", "packing")
        return self


class TeacherText(RunningText, lacks={"validation", "holdout", "holdout_samples", "packing"}):
    """Running text whose teacher logits are captured; nothing is held out."""


class TeacherConversations(
    Conversations,
    lacks={"validation", "holdout", "holdout_samples", "packing", "group_by_length"},
):
    """Conversations whose teacher logits are captured; none is held out."""


class CapturedData(DataSpec, lacks=_KEYS - _COMMON_KEYS):
    """Captured logits of a teacher, for distil."""


class PreferencePairs(
    DataSpec,
    lacks=_KEYS - _COMMON_KEYS - {"max_tokens", "columns", "chat_template", "skip_bad_rows"},
):
    """Pairs of chosen and rejected answers, for dpo."""

    @model_validator(mode="after")
    def _check_preference_columns(self) -> Self:
        _check_columns(self, PREFERENCE_COLUMNS, "task dpo")
        return self


class EmbeddingPairs(
    DataSpec, lacks=_KEYS - _COMMON_KEYS - {"max_tokens", "columns", "skip_bad_rows"}
):
    """Pairs or triplets of texts, for embed."""

    @model_validator(mode="after")
    def _check_embedding_columns(self) -> Self:
        _check_columns(self, EMBEDDING_COLUMNS, "task embed")
        return self


AnyText = Annotated[RunningText | Conversations, TaggedUnion("format", default="text")]
AnyTeacherText = Annotated[
    TeacherText | TeacherConversations, TaggedUnion("format", default="text")
]
