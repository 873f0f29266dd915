"""Uses what a run has trained: `worker classify DIRECTORY TEXT...`.

A text is read, cut and computed as the run did with its held-out samples, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from backends.base.interface import Array, Backend, Batch, Sums
from protocol.base.errors import DataError
from protocol.spec.adapter import adapter_config
from protocol.spec.sources import model_source
from worker.tasks.trained import Trained

if TYPE_CHECKING:
    from worker.models.tuned import Tuned


@dataclass(frozen=True, slots=True)
class Prediction:
    """The likeliest label of a text, and its probability."""

    text: str
    label: str
    probability: float


def classify(
    directory: Path, texts: Sequence[str], backend: Callable[[], Backend]
) -> Iterator[Prediction]:
    """Classify texts with the result of a `classify` run.

    Args:
        directory: Where the run left its adapter or model.
        texts: Each is classified by itself.
        backend: Gives what computes; called once all that is cheap to see is there.

    Raises:
        DataError: The directory holds no such result, or its base model is not there, or another.
    """
    trained = Trained.read(directory)
    source, weights = trained.base(directory), _weights(directory, trained)
    model_source(source)
    with _open(weights):
        pass
    # Seconds of imports; the errors above come at once.
    from worker.models.pretrained import load_classifier  # noqa: PLC0415
    from worker.models.tokens import check_tokens, encode_cut, load_tokenizer  # noqa: PLC0415
    from worker.models.tuned import Tuned  # noqa: PLC0415
    from worker.tasks.classify import class_loss, padded  # noqa: PLC0415

    bare = trained.lora is None and not (directory / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(str(trained.model.source) if bare else source)
    padding = int(tokenizer.pad_token_id)
    model = trained.model.model_copy(update={"source": source})
    loaded = load_classifier(model, trained.labels, padding, trained.seed)
    heads = _heads(directory) if trained.lora is not None else None
    classifier = Tuned.of(loaded, model, trained.lora, "SEQ_CLS", trained.seed, heads=heads)
    if trained.lora is not None and loaded.weights_digest != trained.base_weights:
        raise DataError(
            f"the model {source!r} is not the one that {str(directory)!r} was trained on: its "
            "weights have another digest; get that model's files again"
        )
    # As a run reads its data: the spaces around a text are no part of it.
    stripped = [text.strip() for text in texts]
    encoded = [ids for ids, _ in encode_cut(tokenizer, stripped, trained.max_tokens)]
    check_tokens(max(int(tokens.max()) for tokens in encoded), loaded.vocabulary)
    batches = []
    for tokens in encoded:
        arrays = padded([tokens], padding, trained.max_tokens)
        batches.append(Batch({**arrays, "labels": np.zeros(1, np.int64)}, weight=1.0))
    trainable = classifier.trainable(
        trained.seed,
        1,
        loss=partial(class_loss, options=loaded.forward_options),
        evaluate=partial(_probabilities, classifier),
    )
    program = backend().compile(trainable, batches[0])
    program.load(_values(weights, classifier))
    for text, batch in zip(texts, batches, strict=True):
        found = program.evaluate(batch)
        best = max(range(len(trained.labels)), key=lambda number: found[str(number)])
        yield Prediction(text, trained.labels[best], found[str(best)])
    program.close()


def _probabilities(classifier: Tuned, module: Any, arrays: Mapping[str, Any]) -> Sums:
    """Of each label by its number, for a lone text."""
    from worker.tasks.classify import logits_of  # noqa: PLC0415

    logits = logits_of(module, arrays, classifier.loaded.forward_options)
    return {str(number): float(p) for number, p in enumerate(logits[0].softmax(dim=0))}


def _heads(directory: Path) -> list[str] | None:
    """What the adapter trained in full; an earlier release left a drawn pooler as it was."""
    named = adapter_config(directory).get("modules_to_save")
    return list(dict.fromkeys(map(str, named))) if named else None


def _weights(directory: Path, trained: Trained) -> Path:
    name = "model.safetensors" if trained.lora is None else "adapter_model.safetensors"
    return directory / name


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "np") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read the weights {str(path)!r}: {error}") from None


def _values(path: Path, classifier: Tuned) -> list[Array]:
    """The trained tensors, one flat array per block.

    Raises:
        DataError: The file is not what the run has written.
    """
    from worker.models.lora import adapter_name  # noqa: PLC0415

    name_of = adapter_name if classifier.lora else str
    with _open(path) as tensors:
        names = tensors.keys()
        stored = {name_of(name): name for name in names}
        wanted = [[name_of(tensor.name) for tensor in block.tensors] for block in classifier.blocks]
        values = [
            [np.asarray(tensors.get_tensor(stored.get(name, name))) for name in of_block]
            for of_block in wanted
        ]
    for block, arrays in zip(classifier.blocks, values, strict=True):
        for tensor, array in zip(block.tensors, arrays, strict=True):
            if array.shape != tensor.shape or array.dtype != np.float32:
                raise DataError(
                    f"expected {tensor.name!r} as float32 {tensor.shape} in {str(path)!r}, got "
                    f"{array.dtype} {array.shape}"
                )
    return [np.concatenate([array.reshape(-1) for array in arrays]) for arrays in values]
