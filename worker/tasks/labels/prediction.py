"""Label new texts with the result of a classify run: `worker classify DIRECTORY TEXT...`.

A text is read, cut and computed as the run did with its held-out samples, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from backends.base.interface import Array, Backend, Sums
from protocol.base.errors import DataError
from protocol.spec.files.adapter import adapter_config
from protocol.spec.files.sources import model_source
from protocol.spec.sections.data import Problem
from worker.tasks.labels.result_info import ResultInfo

if TYPE_CHECKING:
    from worker.data.labeled_data import LabeledSamples
    from worker.models.lora import TaskType
    from worker.models.trainable_model import TrainableModel

_HALF: Final = 0.5


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of a text.

    Attributes:
        text: The text, or both texts of a pair; of tags its words.
        labels: The likeliest label; of multi-label results all above one half; of regression none;
            of tags one for each word, O for those beyond `max_tokens`.
        scores: The probability of each label; of regression the value, by its name.
        problem: Which kind of labels.
        is_tagged: Whether each word has a label.
    """

    text: tuple[str, ...]
    labels: tuple[str, ...]
    scores: Mapping[str, float]
    problem: Problem
    is_tagged: bool = False

    @property
    def is_single(self) -> bool:
        """Return whether a text has one label."""
        return self.problem == "single-label"

    @property
    def is_value(self) -> bool:
        """Return whether the answer is a number."""
        return self.problem == "regression"

    @property
    def value(self) -> float:
        """Return the number of a regression."""
        (value,) = self.scores.values()
        return value


def classify(
    directory: Path, texts: Sequence[str], backend: Callable[[], Backend]
) -> Iterator[Prediction]:
    """Label texts with the result of a `classify` run.

    Args:
        directory: Where the run left its adapter or model.
        texts: Each is labeled by itself; for a result on pairs two that follow are a pair.
        backend: Gives what computes; called once all that is cheap to check is there.

    Raises:
        DataError: The directory holds no such result, its base model is missing or another one, or
            a text of a pair is missing.
    """
    info = ResultInfo.read(directory)
    source, weights = info.base(directory), _weights(directory, info)
    model_source(source)
    with _open(weights):
        pass
    # Seconds of imports; the errors above come at once.
    from worker.models.tokens import check_tokens, load_tokenizer  # noqa: PLC0415
    from worker.tasks.labels.classify import class_loss  # noqa: PLC0415

    bare = info.lora is None and not (directory / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(str(info.model.source) if bare else source, info.model.added_tokens)
    padding = int(tokenizer.pad_token_id)
    classifier = _model(directory, info, source, tokenizer)
    loaded = classifier.loaded
    if info.task == "tag":
        yield from _tagged(texts, tokenizer, classifier, info, _values(weights, classifier))
        return
    given = _texts(texts, info)
    samples = _encoded(given, tokenizer, info)
    check_tokens(max(padding, samples.tokens.highest), loaded.vocabulary)
    batches = [samples.batch(np.array([row])) for row in range(len(given))]
    trainable = classifier.trainable(
        info.seed,
        1,
        loss=partial(class_loss, options=loaded.forward_options),
        evaluate=partial(_scores, classifier, info),
    )
    program = backend().compile(trainable, batches[0])
    program.load(_values(weights, classifier))
    for text, batch in zip(given, batches, strict=True):
        found = program.evaluate(batch)
        scores = {name: found[str(number)] for number, name in enumerate(info.labels)}
        yield Prediction(text, _chosen(info, scores), scores, info.problem)
    program.close()


def _model(directory: Path, info: ResultInfo, source: str, tokenizer: Any) -> TrainableModel:
    """Load the base with its head, and add what was trained of it, without its values.

    Raises:
        DataError: The base is another one.
    """
    from worker.models.pretrained import load_classifier, load_tagger  # noqa: PLC0415
    from worker.models.tokens import with_added_tokens  # noqa: PLC0415
    from worker.models.trainable_model import TrainableModel  # noqa: PLC0415

    model = info.model.model_copy(update={"source": source})
    heads = _heads(directory) if info.lora is not None else None
    if info.task == "tag":
        loaded = load_tagger(model, info.labels, info.seed)
    else:
        padding = int(tokenizer.pad_token_id)
        loaded = load_classifier(model, info.labels, padding, info.seed, problem=info.problem)
    loaded = with_added_tokens(loaded, model, tokenizer)
    kind: TaskType = "TOKEN_CLS" if info.task == "tag" else "SEQ_CLS"
    tuned = TrainableModel.of(loaded, model, info.lora, kind, info.seed, heads=heads)
    if info.lora is not None and loaded.weights_digest != info.base_weights:
        raise DataError(
            f"the model {source!r} is not the one that {str(directory)!r} was trained on: its "
            "weights have another digest; get that model's files again"
        )
    return tuned


def _tagged(
    texts: Sequence[str],
    tokenizer: Any,
    tagger: TrainableModel,
    info: ResultInfo,
    values: Sequence[Array],
) -> Iterator[Prediction]:
    """Tag the words of each text, which spaces separate."""
    import torch  # noqa: PLC0415

    from worker.data.sequence_data import encode_words  # noqa: PLC0415
    from worker.tasks.base.transformer import logits_of  # noqa: PLC0415

    named = dict(tagger.module.named_parameters())
    with torch.no_grad():
        for block, array in zip(tagger.blocks, values, strict=True):
            for tensor, place in block.slices():
                named[tensor.name].copy_(torch.from_numpy(array[place].reshape(tensor.shape)))
        tagger.module.eval()
        for text in texts:
            words = text.split()
            if not words:
                raise DataError("expected text, got none")
            ids, numbers, _ = encode_words(tokenizer, words, info.max_tokens)
            read = torch.from_numpy(ids)[None]
            arrays = {"input_ids": read, "attention_mask": torch.ones_like(read)}
            chosen = logits_of(tagger.module, arrays, tagger.loaded.forward_options)[0].argmax(-1)
            tags = ["O"] * len(words)
            for at, word in enumerate(numbers.tolist()):
                if word >= 0:
                    tags[word] = info.labels[int(chosen[at])]
            yield Prediction(tuple(words), tuple(tags), {}, info.problem, is_tagged=True)


def _texts(texts: Sequence[str], info: ResultInfo) -> list[tuple[str, ...]]:
    # As a run reads its data: the spaces around a text are no part of it.
    stripped = [text.strip() for text in texts]
    if not info.has_pairs:
        return [(text,) for text in stripped]
    if len(stripped) % 2:
        raise DataError(
            f"expected two texts for each answer, as the run had, got {len(stripped)}; give the "
            "second text too"
        )
    return [*zip(stripped[::2], stripped[1::2], strict=True)]


def _encoded(given: Sequence[tuple[str, ...]], tokenizer: Any, info: ResultInfo) -> LabeledSamples:
    from worker.data.labeled_data import LabeledSamples, encode_pairs, encoded  # noqa: PLC0415

    types = None
    if info.has_pairs:
        pairs = [(first, second) for first, second in given]
        tokens, types, _ = encode_pairs(tokenizer, pairs, info.max_tokens)
    else:
        lone = (text for (text,) in given)
        tokens, _ = encoded(tokenizer, lone, info.max_tokens, "text {}".format)
    padding = int(tokenizer.pad_token_id)
    targets = np.zeros(len(given), np.int64)
    return LabeledSamples(tokens, types, targets, None, padding, info.max_tokens)


def _scores(
    classifier: TrainableModel, info: ResultInfo, module: Any, arrays: Mapping[str, Any]
) -> Sums:
    """Return the score of each label by its number, for a lone text."""
    from worker.tasks.base.transformer import logits_of  # noqa: PLC0415

    logits = logits_of(module, arrays, classifier.loaded.forward_options)[0]
    if info.problem == "single-label":
        logits = logits.softmax(dim=0)
    elif info.problem == "multi-label":
        logits = logits.sigmoid()
    else:
        mean, deviation = info.scale
        logits = logits.double() * deviation + mean
    return {str(number): float(score) for number, score in enumerate(logits)}


def _chosen(info: ResultInfo, scores: Mapping[str, float]) -> tuple[str, ...]:
    if info.problem == "regression":
        return ()
    if info.problem == "multi-label":
        return tuple(name for name, score in scores.items() if score > _HALF)
    return (max(scores, key=lambda name: scores[name]),)


def _heads(directory: Path) -> list[str] | None:
    """Return the modules that the adapter trained in full; None if it does not say."""
    named = adapter_config(directory).get("modules_to_save")
    return list(dict.fromkeys(map(str, named))) if named else None


def _weights(directory: Path, info: ResultInfo) -> Path:
    name = "model.safetensors" if info.lora is None else "adapter_model.safetensors"
    return directory / name


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "np") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read the weights {str(path)!r}: {error}") from None


def _values(path: Path, classifier: TrainableModel) -> list[Array]:
    """Read the trained tensors, one flat array per block.

    Raises:
        DataError: The file is not what the run wrote.
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
