"""Seed every generator that may be used while samples are read, separately for each batch.

These are the global generators of torch, numpy and Python, and generators that data sets and
collators own, as in augmentation libraries. Each of the latter gets a separate stream, chosen by
its path. All states are restored afterwards, so that reading a batch does not affect later reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from backends.base.draws import derive_key
from backends.checks.additivity import seed_generators
from worker.tasks.checks.reachable_state import position_of, reachable_generators

_GLOBAL: Final = (torch.default_generator, random._inst, np.random.mtrand._rand)  # noqa: SLF001


class ReadingGenerators:
    """The generators that may be used while samples are read.

    Args:
        roots: Data sets and collator, by name.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._object_generators = {
            path: generator
            for path, generator in reachable_generators(roots).items()
            if not any(generator is global_generator for global_generator in _GLOBAL)
        }

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed all generators for a context; restore their states afterwards."""
        with ExitStack() as stack:
            stack.enter_context(seed_generators(seed))
            for path, generator in self._object_generators.items():
                stack.enter_context(_seeded(generator, derive_key(seed, path) >> 1))
            yield

    def positions(self) -> list[str | None]:
        """Return the positions of all generators; they differ after a draw."""
        return [
            position_of(generator) for generator in (*_GLOBAL, *self._object_generators.values())
        ]


@contextmanager
def _seeded(generator: Any, seed: int) -> Iterator[None]:
    state: Any
    restore: Any
    match generator:
        case random.Random():
            state = generator.getstate()
            generator.seed(seed)
            restore = generator.setstate
        case torch.Generator():
            state = generator.get_state()
            generator.manual_seed(seed)
            restore = generator.set_state
        case np.random.RandomState():
            state = generator.get_state()
            generator.seed(seed % 2**32)
            restore = generator.set_state
        case _:
            bits = getattr(generator, "bit_generator", generator)
            state = bits.state
            bits.state = type(bits)(seed).state
            restore = partial(setattr, bits, "state")
    try:
        yield
    finally:
        restore(state)
