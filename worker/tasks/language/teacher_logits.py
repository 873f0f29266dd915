"""Task teacher-logits: capture a causal model's logits for each next token of a text.

The run trains no parameter. The whole text is divided into samples as in task causal-lm. The
student's run holds some of them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.base import draws
from backends.base.interface import Array, Batch, CaptureResult, Trainable
from protocol.base import limits
from protocol.base.errors import DataError
from protocol.base.limits import byte_size
from protocol.datasets.capture_check import vocabulary_digest
from protocol.datasets.logits_file import record_dtype
from protocol.spec.manifest import Block, CaptureLayout, Export, Manifest, TensorSpec
from protocol.spec.run_spec import TeacherLogitsRun
from worker.data.language_data import read_language_data
from worker.models import pretrained
from worker.models.tokens import IGNORED_LABEL, check_tokens, tokenizer_files
from worker.tasks.language.causal_lm import load_model, token_loss

_PLACEHOLDER_PARAMETER = "nothing_trained"
"""The only parameter of a capture. No step changes it; a run must have a parameter."""
_NOTES: Final = {"train_tokens": "tokens", "train_tokens_with_loss": "tokens_with_loss"}
"""Names of the data's counts in a run without training."""
_CACHED_BYTES: Final = 4 * limits.MIB
"""Size of the logits that a CPU reduces at once, small enough for its cache."""


class TeacherLogits:
    """Batches hold sample_ids (samples), input_ids and labels, both (samples, data.max_tokens),
    int64."""

    def __init__(self, spec: TeacherLogitsRun) -> None:
        data = read_language_data(spec, 0.0, is_fixed_width=True)
        tokenizer = data.tokenizer
        loaded = load_model(spec, tokenizer)
        pretrained.refuse_drawn_weights(
            loaded, str(spec.model.source), "take a teacher with all of its weights"
        )
        vocabulary = min(loaded.vocabulary, len(tokenizer))
        check_tokens(data.max_token, vocabulary)
        self._samples = data.train
        self._capture_layout = layout = _capture_layout(spec, vocabulary)
        module = loaded.model.requires_grad_(requires_grad=False)
        module.register_parameter(_PLACEHOLDER_PARAMETER, nn.Parameter(torch.zeros(1)))
        tensor = TensorSpec(name=_PLACEHOLDER_PARAMETER, shape=(1,))
        self.manifest = Manifest(
            blocks=(Block(name="nothing", kind="block", tensors=(tensor,)),),
            train_samples=len(self._samples),
            digests={
                "base_weights": loaded.weights_digest,
                "tokenizer": data.digests["tokenizer"],
                "vocabulary": vocabulary_digest(tokenizer.get_vocab()),
                **{name: value for name, value in data.digests.items() if name != "tokenizer"},
            },
            notes={
                **{_NOTES.get(name, name): count for name, count in data.notes.items()},
                "padding_of_the_vocabulary_cut": loaded.vocabulary - vocabulary,
            },
            export=Export(directory="logits", files=tokenizer_files(tokenizer)),
            capture=layout,
        )
        self.trainable = Trainable(
            blocks=self.manifest.blocks,
            module=module,
            loss=partial(token_loss, options=loaded.forward_options),
            capture_rows=partial(
                _compute_records, layout=layout, options=loaded.forward_options, seed=spec.seed
            ),
            seed=spec.seed,
            threads=spec.threads,
            precision=spec.model.precision,
            base_dtype=spec.model.base_dtype,
        )

    def initial_parameters(self) -> list[Array]:
        """Return one zero."""
        return [np.zeros(1, np.float32)]

    def batch(self, samples: Sequence[int]) -> Batch:
        """Make a batch of these samples."""
        rows = np.asarray(samples, np.int64)
        batch = self._samples.batch(rows)
        return Batch({"sample_ids": rows, **batch.arrays}, batch.weight)

    def evaluation_batch(self, part: int) -> Batch:
        """Fail: a capture has no evaluation parts."""
        raise AssertionError(part)


def _capture_layout(spec: TeacherLogitsRun, vocabulary: int) -> CaptureLayout:
    """Return the layout of a captured sample.

    Raises:
        DataError: The run spec asks for more logits than there are tokens in the vocabulary, or the
            logits of a step exceed their limit.
    """
    capture, data = spec.capture, spec.data
    if capture.drawn is None and capture.top_k > vocabulary:
        raise DataError(
            f"expected capture.top_k of at most {vocabulary}, the teacher's vocabulary, got "
            f"{capture.top_k}: --set capture.top_k={vocabulary}"
        )
    layout = CaptureLayout(
        tokens=data.max_tokens,
        vocabulary=vocabulary,
        top_k=capture.drawn or capture.top_k,
        drawn=capture.drawn is not None,
        temperature=capture.temperature,
    )
    step_bytes = spec.batch.samples * layout.sample_bytes
    if step_bytes > limits.CAPTURED_STEP_BYTES:
        max_samples = limits.CAPTURED_STEP_BYTES // layout.sample_bytes
        raise DataError(
            f"the logits of a step are {byte_size(step_bytes)}, over the limit of "
            f"{byte_size(limits.CAPTURED_STEP_BYTES)}: --set batch.samples={max_samples}"
        )
    return layout


def _compute_records(
    module: nn.Module,
    arrays: Mapping[str, Any],
    *,
    layout: CaptureLayout,
    options: Mapping[str, Any],
    seed: int,
) -> CaptureResult:
    """Run one forward; return the samples' records and the cross-entropy summed over labels."""
    labels = arrays["labels"]  # (samples, length)
    full = module(input_ids=arrays["input_ids"], **options).logits.float()
    logits = full[..., : layout.vocabulary].flatten(0, 1)  # (rows, vocabulary)
    reduced = [
        _reduce_logits(rows, row_labels.clamp(min=0), layout)
        for rows, row_labels in zip(
            logits.split(_rows_at_once(logits)),
            labels.flatten().split(_rows_at_once(logits)),
            strict=True,
        )
    ]
    losses, top_logits, ids, lse_1, lse_t = (
        torch.cat(parts).view(*labels.shape, *parts[0].shape[1:])
        for parts in zip(*reduced, strict=True)
    )
    if layout.drawn:
        shifted = logits.view(*labels.shape, -1)
        shifted = shifted - shifted.amax(-1, keepdim=True)
        ids = _draw(shifted, lse_t, layout, seed, arrays["sample_ids"])
        top_logits = shifted.gather(-1, ids)
    label_losses = torch.where(labels != IGNORED_LABEL, losses, 0)
    return CaptureResult(
        _records(arrays, layout, ids, top_logits, (lse_1, lse_t)), float(label_losses.sum())
    )


def _rows_at_once(logits: torch.Tensor) -> int:
    """Return how many rows to reduce at once: on a CPU as many as its cache holds."""
    rows, vocabulary = logits.shape
    return max(1, _CACHED_BYTES // (4 * vocabulary)) if logits.device.type == "cpu" else rows


def _reduce_logits(
    logits: torch.Tensor, labels: torch.Tensor, layout: CaptureLayout
) -> tuple[torch.Tensor, ...]:
    """Reduce rows of logits, (rows, vocabulary), with their labels, (rows,).

    Every logit is relative to its row's maximum.

    Returns:
        The cross-entropy of the label, (rows,); the largest logits and their ids, both (rows, k),
        with k = 0 if tokens are sampled; the log-sum-exp of all logits at temperature 1 and at the
        capture's temperature, both (rows,).
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    top_logits, ids = shifted.topk(0 if layout.drawn else layout.top_k, dim=-1)
    lse_1 = shifted.exp().sum(-1).log()
    losses = lse_1 - shifted.gather(-1, labels[:, None])[:, 0]
    if layout.temperature == 1.0:
        return losses, top_logits, ids, lse_1, lse_1
    return losses, top_logits, ids, lse_1, shifted.div_(layout.temperature).exp_().sum(-1).log()


def _records(
    arrays: Mapping[str, Any],
    layout: CaptureLayout,
    ids: torch.Tensor,
    top_logits: torch.Tensor,
    lse: Sequence[torch.Tensor],
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the records as bytes, (samples, layout.sample_bytes), with zeros after the rows."""
    inputs, labels = (arrays[name].cpu().numpy() for name in ("input_ids", "labels"))
    counts = labels != IGNORED_LABEL
    records = np.zeros(len(inputs), record_dtype(layout))
    records["sample_id"] = arrays["sample_ids"].cpu().numpy()
    # Rows extend to the last token with loss; all tokens before it have rows too.
    positions = np.arange(1, counts.shape[1] + 1)
    records["rows"] = (positions * counts).max(1)
    has_row = positions <= records["rows"][:, None]
    records["input_ids"][:, :-1][has_row] = inputs[has_row]
    records["input_ids"][:, 1:][counts] = labels[counts]
    records["loss_mask"] = counts
    half_logits = top_logits.clamp(min=torch.finfo(torch.float16).min).half()
    for name, tensor in (
        ("topk_ids", ids), ("topk_logits", half_logits), ("lse_1", lse[0]), ("lse_T", lse[1])
    ):  # fmt: skip
        records[name][has_row] = tensor.cpu().numpy()[has_row]
    return records.view(np.uint8).reshape(len(records), layout.sample_bytes)


def _draw(
    shifted: torch.Tensor,
    lse: torch.Tensor,
    layout: CaptureLayout,
    seed: int,
    sample_ids: torch.Tensor,
) -> torch.Tensor:
    """Sample tokens from the distribution at the capture's temperature, (samples, length, k).

    The cumulative distribution is inverted in float64 on the host, with `backends.base.draws`, so
    every worker samples the same tokens.
    """
    samples = []
    for number, rows, log_sum in zip(sample_ids.tolist(), shifted.cpu(), lse.cpu(), strict=True):
        probabilities = torch.exp(rows.double() / layout.temperature - log_sum.double()[:, None])
        cumulated = probabilities.cumsum(-1)  # (length, vocabulary)
        key = draws.derive_key(seed, "capture", number)
        uniforms = draws.uniforms(key, len(rows) * layout.top_k).reshape(len(rows), -1)
        points = torch.from_numpy(np.asarray(uniforms, np.float64)) * cumulated[:, -1:]
        samples.append(torch.searchsorted(cumulated, points, right=True))
    token_ids = torch.stack(samples).clamp(max=layout.vocabulary - 1)
    return token_ids.sort(-1).values.to(shifted.device)
