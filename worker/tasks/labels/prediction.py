"""Label new texts with the result of a classify or tag run: `worker classify DIRECTORY TEXT...`.

New texts are read, truncated and computed by the code of the run's evaluation.
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

_LABEL_THRESHOLD: Final = 0.5


@dataclass(frozen=True, slots=True)
class Prediction:
    """The labels or the value that the model predicts for a text.

    Attributes:
        text: The text, both texts of a pair, or for tags the words.
        labels: The likeliest label. Multi-label: all labels with a probability above one half.
            Regression: none. Tags: one per word, with O for words beyond `max_tokens`.
        scores: The probability of each label; for regression the value, by its name.
        problem: single-label, multi-label or regression.
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
    """Label texts with the result of a `classify` or `tag` run.

    Args:
        directory: The run's directory `adapter` or `model`.
        texts: The texts to label; for a result on pairs, every two consecutive ones are a pair.
        backend: Returns the backend; called after all cheap checks, since it may take seconds.

    Raises:
        DataError: The directory has no such result, its base model is missing or has other weights,
            or a text of a pair is missing.
    """
    info = ResultInfo.read(directory)
    source, weights = info.base(directory), _weights_file(directory, info)
    model_source(source)
    with _open_weights(weights):
        pass
    # These imports take seconds: the errors above come first.
    from worker.models.tokens import check_tokens, load_tokenizer  # noqa: PLC0415
    from worker.tasks.labels.classify import class_loss  # noqa: PLC0415

    lacks_tokenizer = info.lora is None and not (directory / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(
        str(info.model.source) if lacks_tokenizer else source, info.model.added_tokens
    )
    padding = int(tokenizer.pad_token_id)
    classifier = _build_model(directory, info, source, tokenizer)
    loaded = classifier.loaded
    if info.task == "tag":
        yield from _tag_texts(texts, tokenizer, classifier, info, _read_values(weights, classifier))
        return
    inputs = _group_pairs(texts, info)
    samples = _encode(inputs, tokenizer, info)
    check_tokens(max(padding, samples.tokens.max_element), loaded.vocabulary)
    batches = [samples.batch(np.array([row])) for row in range(len(inputs))]
    trainable = classifier.trainable(
        info.seed,
        1,
        loss=partial(class_loss, options=loaded.forward_options),
        evaluate=partial(_scores, classifier, info),
    )
    program = backend().compile(trainable, batches[0])
    program.load(_read_values(weights, classifier))
    for text, batch in zip(inputs, batches, strict=True):
        sums = program.evaluate(batch)
        scores = {name: sums[str(number)] for number, name in enumerate(info.labels)}
        yield Prediction(text, _likeliest_labels(info, scores), scores, info.problem)
    program.close()


def _build_model(directory: Path, info: ResultInfo, source: str, tokenizer: Any) -> TrainableModel:
    """Load the base with its head and build the trained modules, without their values.

    Raises:
        DataError: The base has other weights than the one that the run trained.
    """
    from worker.models.pretrained import load_classifier, load_tagger  # noqa: PLC0415
    from worker.models.tokens import add_tokens_to_model  # noqa: PLC0415
    from worker.models.trainable_model import TrainableModel  # noqa: PLC0415

    model = info.model.model_copy(update={"source": source})
    heads = _heads(directory) if info.lora is not None else None
    if info.task == "tag":
        loaded = load_tagger(model, info.labels, info.seed)
    else:
        padding = int(tokenizer.pad_token_id)
        loaded = load_classifier(model, info.labels, padding, info.seed, problem=info.problem)
    loaded = add_tokens_to_model(loaded, model, tokenizer)
    task_type: TaskType = "TOKEN_CLS" if info.task == "tag" else "SEQ_CLS"
    trainable_model = TrainableModel.of(loaded, model, info.lora, task_type, info.seed, heads=heads)
    if info.lora is not None and loaded.weights_digest != info.base_weights:
        raise DataError(
            f"the model {source!r} is not the one that {str(directory)!r} was trained on: its "
            "weights have another digest; get that model's files again"
        )
    return trainable_model


def _tag_texts(
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

    parameters = dict(tagger.module.named_parameters())
    with torch.no_grad():
        for block, array in zip(tagger.blocks, values, strict=True):
            for tensor, part in block.slices():
                parameters[tensor.name].copy_(torch.from_numpy(array[part].reshape(tensor.shape)))
        tagger.module.eval()
        for text in texts:
            words = text.split()
            if not words:
                raise DataError("expected words to tag, got an empty text; leave it out")
            ids, numbers, _ = encode_words(tokenizer, words, info.max_tokens)
            tokens = torch.from_numpy(ids)[None]
            arrays = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            predicted = logits_of(tagger.module, arrays, tagger.loaded.forward_options)[0].argmax(
                -1
            )
            tags = ["O"] * len(words)
            for position, word in enumerate(numbers.tolist()):
                if word >= 0:
                    tags[word] = info.labels[int(predicted[position])]
            yield Prediction(tuple(words), tuple(tags), {}, info.problem, is_tagged=True)


def _group_pairs(texts: Sequence[str], info: ResultInfo) -> list[tuple[str, ...]]:
    # A run strips spaces around texts when it reads its data.
    stripped_texts = [text.strip() for text in texts]
    if not info.has_pairs:
        return [(text,) for text in stripped_texts]
    if len(stripped_texts) % 2:
        raise DataError(
            f"expected pairs of texts, as the run had, got an odd number, {len(stripped_texts)}; "
            "give the second text of each pair too"
        )
    return [*zip(stripped_texts[::2], stripped_texts[1::2], strict=True)]


def _encode(inputs: Sequence[tuple[str, ...]], tokenizer: Any, info: ResultInfo) -> LabeledSamples:
    from worker.data.labeled_data import LabeledSamples, encode_pairs, encode_texts  # noqa: PLC0415

    types = None
    if info.has_pairs:
        pairs = [(first_text, second_text) for first_text, second_text in inputs]
        tokens, types, _ = encode_pairs(tokenizer, pairs, info.max_tokens)
    else:
        single = (text for (text,) in inputs)
        tokens, _ = encode_texts(tokenizer, single, info.max_tokens, "text {}".format)
    padding = int(tokenizer.pad_token_id)
    targets = np.zeros(len(inputs), np.int64)
    return LabeledSamples(tokens, types, targets, None, padding, info.max_tokens)


def _scores(
    classifier: TrainableModel, info: ResultInfo, module: Any, arrays: Mapping[str, Any]
) -> Sums:
    """Return the score of each label, by its number, for a batch of one text."""
    from worker.tasks.base.transformer import logits_of  # noqa: PLC0415

    logits = logits_of(module, arrays, classifier.loaded.forward_options)[0]
    if info.problem == "single-label":
        logits = logits.softmax(dim=0)
    elif info.problem == "multi-label":
        logits = logits.sigmoid()
    else:
        mean, deviation = info.scale
        logits = logits.cpu().double() * deviation + mean
    return {str(number): float(score) for number, score in enumerate(logits)}


def _likeliest_labels(info: ResultInfo, scores: Mapping[str, float]) -> tuple[str, ...]:
    if info.problem == "regression":
        return ()
    if info.problem == "multi-label":
        return tuple(name for name, score in scores.items() if score > _LABEL_THRESHOLD)
    return (max(scores, key=lambda name: scores[name]),)


def _heads(directory: Path) -> list[str] | None:
    """Return the modules that the adapter trained in full; None if its config names none."""
    modules = adapter_config(directory).get("modules_to_save")
    return list(dict.fromkeys(map(str, modules))) if modules else None


def _weights_file(directory: Path, info: ResultInfo) -> Path:
    name = "model.safetensors" if info.lora is None else "adapter_model.safetensors"
    return directory / name


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "np") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read the weights {str(path)!r}: {error}") from None


def _read_values(path: Path, classifier: TrainableModel) -> list[Array]:
    """Read the trained tensors, one flat array per block.

    Raises:
        DataError: The file lacks a tensor, or one has another shape or dtype.
    """
    from worker.models.lora import adapter_name  # noqa: PLC0415

    name_of = adapter_name if classifier.lora else str
    with _open_weights(path) as tensors:
        names = tensors.keys()
        stored_names = {name_of(name): name for name in names}
        names_by_block = [
            [name_of(tensor.name) for tensor in block.tensors] for block in classifier.blocks
        ]
        values = [
            [np.asarray(tensors.get_tensor(stored_names.get(name, name))) for name in block_names]
            for block_names in names_by_block
        ]
    for block, arrays in zip(classifier.blocks, values, strict=True):
        for tensor, array in zip(block.tensors, arrays, strict=True):
            if array.shape != tensor.shape or array.dtype != np.float32:
                raise DataError(
                    f"expected {tensor.name!r} as float32 {tensor.shape} in {str(path)!r}, got "
                    f"{array.dtype} {array.shape}"
                )
    return [np.concatenate([array.reshape(-1) for array in arrays]) for arrays in values]
