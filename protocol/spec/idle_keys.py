"""Which keys of a run spec act, by what others say: one that would do nothing is refused.

A run would finish without what was asked for, and nothing would tell. What counts is that a key
was said, even if it says the default: `{name: sgd, momentum: 0.9}` means to have momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from protocol.spec.run_spec_text import set_by

if TYPE_CHECKING:
    from protocol.spec.run_spec import RunSpec

TASK_SECTIONS: Final = {
    "regress": {"regress"},
    "digits": {"digits"},
    "classify": {"model", "lora", "data"},
    "causal-lm": {"model", "lora", "data", "tokenizer"},
    "teacher-logits": {"model", "data", "tokenizer", "capture"},
    "distil": {"model", "lora", "data", "distil"},
    "dpo": {"model", "lora", "data", "dpo"},
    "scripted": {"scripted"},
}
"""The tasks that come along, and which sections each of them reads beside those of all."""

OWN_SECTIONS: Final = frozenset({"options"}.union(*TASK_SECTIONS.values()))
"""Those that not every task reads."""

CONVERSATION_KEYS: Final = frozenset({"columns", "loss", "chat_template"})
TEXT_KEYS: Final = frozenset({"text", "label", "pattern"})

KEYS_OF_DATA: Final = {
    "classify": {
        "train", "text", "label", "holdout", "holdout_samples", "max_tokens",
        "validation", "num_classes", "class_weights", "conflicts",
    },
    "causal-lm": {
        "train", "text", "pattern", "holdout", "holdout_samples", "max_tokens", "format",
        "validation", "packing", "group_by_length", *CONVERSATION_KEYS,
    },
    "teacher-logits": {"train", "text", "pattern", "max_tokens", "format", *CONVERSATION_KEYS},
    "distil": {"train", "validation", "holdout", "holdout_samples"},
    "dpo": {
        "train", "validation", "holdout", "holdout_samples", "max_tokens", "columns",
        "chat_template",
    },
}  # fmt: skip
"""What of the section data these tasks read; the others read all of it."""


_DOCUMENTS: Final = {"options", "config", "columns", "class_weights"}


class Acting(NamedTuple):
    """When some keys act.

    Attributes:
        keys: Each whole, or a section with `.*` for all of its keys.
        when: Whether they act in a run.
        beside: What makes them idle, formatted with the run spec as {0}.
        instead: What to do beside leaving them out; empty if there is nothing.
    """

    keys: tuple[str, ...]
    when: Callable[[RunSpec], bool]
    beside: str
    instead: str = ""


def _in_float16(spec: RunSpec) -> bool:
    return spec.model is not None and spec.model.precision == "float16"


def _is_own(spec: RunSpec) -> bool:
    return spec.task not in TASK_SECTIONS


def _reads_format(spec: RunSpec) -> bool:
    return spec.data is not None and "format" in KEYS_OF_DATA.get(spec.task, ())


_OPTIMIZER = "optimizer {0.optimizer.name}"
_SCHEDULE = "schedule {0.optimizer.schedule}"
ACTING: Final = (
    Acting(
        ("arithmetic.multiply_add", "arithmetic.subnormals"), lambda s: s.arithmetic.is_canonical,
        "arithmetic.mode {0.arithmetic.mode}", "set arithmetic.mode: canonical",
    ),
    Acting(
        ("model.loss_scale", "model.loss_scale_every"), _in_float16,
        "model.precision {0.model.precision}", "set model.precision: float16",
    ),
    Acting(
        ("model.name",), lambda s: s.lora is not None or _is_own(s),
        "a model that is trained whole", "set lora",
    ),
    Acting(
        ("tokenizer.vocab_size",),
        lambda s: s.tokenizer is None or s.tokenizer.source is None or _is_own(s),
        "a tokenizer that is loaded", "leave out tokenizer.source",
    ),
    Acting(
        ("data.holdout",), lambda s: s.data is None or s.data.validation is None or _is_own(s),
        "data.validation", "leave out data.validation",
    ),
    Acting(
        tuple(f"data.{key}" for key in sorted(CONVERSATION_KEYS)),
        lambda s: not _reads_format(s) or (s.data is not None and s.data.format != "text"),
        "running text", "set data.format: messages",
    ),
    Acting(
        tuple(f"data.{key}" for key in sorted(TEXT_KEYS)),
        lambda s: not _reads_format(s) or (s.data is not None and s.data.format == "text"),
        "data.format {0.data.format}", "set data.format: text",
    ),
    Acting(
        ("capture.top_k",), lambda s: s.capture.drawn is None, "capture.drawn",
        "leave out capture.drawn",
    ),
    Acting(
        ("distil.temperature",), lambda s: s.distil.alpha > 0, "distil.alpha {0.distil.alpha:g}",
        "set it above 0",
    ),
    Acting(
        ("optimizer.*", "exchange.*", "evaluate_every", "checkpoint.metric", "checkpoint.better",
         "model.gradient_checkpointing"),
        lambda s: not s.captures, "task teacher-logits, which trains nothing",
    ),
    Acting(
        ("optimizer.momentum",), lambda s: s.optimizer.name in ("momentum", "nesterov"),
        _OPTIMIZER, "set optimizer.name: momentum",
    ),
    Acting(
        ("optimizer.betas",),
        lambda s: s.optimizer.name in ("adamw", "lion", "schedule-free"),
        _OPTIMIZER, "set optimizer.name: adamw",
    ),
    Acting(
        ("optimizer.eps",), lambda s: s.optimizer.name in ("adamw", "schedule-free"),
        _OPTIMIZER, "set optimizer.name: adamw",
    ),
    Acting(
        ("optimizer.no_decay",), lambda s: s.optimizer.weight_decay > 0,
        "optimizer.weight_decay 0", "set optimizer.weight_decay above 0",
    ),
    Acting(
        ("optimizer.warmup_from_zero",), lambda s: s.optimizer.warmup_steps > 0,
        "optimizer.warmup_steps 0", "set optimizer.warmup_steps",
    ),
    Acting(
        ("optimizer.min_lr_ratio",), lambda s: s.optimizer.schedule != "constant",
        _SCHEDULE, "set optimizer.schedule: cosine",
    ),
    Acting(
        ("optimizer.decay_ratio", "optimizer.decay"), lambda s: s.optimizer.schedule == "wsd",
        _SCHEDULE, "set optimizer.schedule: wsd",
    ),
    Acting(
        ("exchange.*",), lambda s: s.replicas is None, "replicas",
        "set replicas.codec and replicas.averages",
    ),
    Acting(
        ("replicas.outer.nesterov",), lambda s: s.replicas is None or s.replicas.outer.momentum > 0,
        "replicas.outer.momentum 0", "set replicas.outer.momentum above 0",
    ),
    Acting(
        ("checkpoint.better",), lambda s: s.checkpoint.metric is not None,
        "no checkpoint.metric", "set checkpoint.metric",
    ),
)  # fmt: skip
"""Beside `TASK_SECTIONS` and `KEYS_OF_DATA`; every key that is in neither acts always."""


def _every_key(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that hold a value, whole, and the value."""
    for key, value in document.items():
        # What is in a document of the user's own is no key of ours.
        if isinstance(value, Mapping) and key not in _DOCUMENTS:
            yield from _every_key(value, f"{before}{key}.")
        else:
            yield before + key, value


def idle_because(spec: RunSpec, key: str) -> str:
    """Why a key does nothing in this run, and what to do; empty if it acts."""
    section, _, name = key.partition(".")
    known = TASK_SECTIONS.get(spec.task)
    unread = known is not None and section in OWN_SECTIONS and section not in known
    if unread or (section == "data" and name not in KEYS_OF_DATA.get(spec.task, {name})):
        return f"{key} does nothing with task {spec.task}: leave it out"
    for acting in ACTING:
        if (key in acting.keys or f"{section}.*" in acting.keys) and not acting.when(spec):
            instead = f", or {acting.instead}" if acting.instead else ""
            return f"{key} does nothing with {acting.beside.format(spec)}: leave it out{instead}"
    return ""


def idle_keys(spec: RunSpec, said: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Of each key that was said and does nothing: why, and what to do.

    Args:
        spec: What the document amounts to.
        said: The document. A canonical one says every key, so there defaults mean nothing.
        overrides: `key=value` pairs that were set.
    """
    given = dict(_every_key(said))
    usual = dict(_every_key(type(spec)(task="scripted", steps=1).model_dump(mode="json")))
    canonical = given.keys() >= {key for key, value in usual.items() if value is not None}
    told = []
    for key, value in given.items():
        over = set_by((key,), overrides)
        meant = over or not canonical or value != usual.get(key, value)
        text = idle_because(spec, key) if meant and value is not None else ""
        if text:
            told.append(f"{text} (from --set {over[-1]})" if over else text)
    return told
