"""Convert torch's samplers to a `Sampling`, without their generators."""

from __future__ import annotations

from typing import Any

from torch.utils.data import RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from protocol.base.errors import DataError
from protocol.spec.sampling import Sampling

_REMEDIES: dict[type, str] = {
    SequentialSampler: "leave it out, as the order of samples follows from the seed",
    DistributedSampler: "leave it out, as the coordinator divides each step among the workers",
}


def sampling_of(sampler: object, samples: int) -> Sampling | None:
    """Convert a sampler of torch; return None if an epoch has every sample once.

    Args:
        sampler: A `WeightedRandomSampler`, a `RandomSampler`, or None.
        samples: Number of training samples.

    Raises:
        DataError: The sampler has no equivalent, or does not fit the data.
    """
    if sampler is None:
        return None
    sampler_class: Any = type(sampler)
    if isinstance(sampler, WeightedRandomSampler) and sampler_class is WeightedRandomSampler:
        if len(sampler.weights) != samples:
            raise DataError(
                f"sampler: expected a weight for each of {samples} training samples, got "
                f"{len(sampler.weights)}"
            )
        weights = sampler.weights.double().numpy()
        return Sampling.by_weight(weights, sampler.num_samples, replacement=sampler.replacement)
    if isinstance(sampler, RandomSampler) and sampler_class is RandomSampler:
        if len(sampler.data_source) != samples:
            raise DataError(
                f"sampler: expected a RandomSampler over the {samples} training samples, got one "
                f"over {len(sampler.data_source)}: pass the data that it draws from as train"
            )
        return _equal_chances(sampler.num_samples, samples, replacement=sampler.replacement)
    remedy = _REMEDIES.get(sampler_class, "pass a WeightedRandomSampler or a RandomSampler")
    if isinstance(sampler, Sampler) and hasattr(sampler, "indices"):
        remedy = "pass torch.utils.data.Subset(data, indices) as train"
    raise DataError(
        "sampler: expected a WeightedRandomSampler or RandomSampler, got "
        f"{sampler_class.__name__}: {remedy}"
    )


def _equal_chances(draws: int, samples: int, *, replacement: bool) -> Sampling | None:
    if replacement or draws < samples:
        return Sampling(draws=draws, replacement=replacement)
    if draws > samples:
        raise DataError(
            f"sampler: expected at most {samples} draws without replacement, got {draws}: train "
            "for more steps or epochs instead"
        )
    return None
