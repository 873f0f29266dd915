"""Random draws while samples are read: seeded for each batch, whichever generator they come from.

The global generators of torch, numpy and Python are seeded, and so are generators that data sets
and collator hold themselves, as libraries of augmentations do. Each of those gets its own stream,
by its path, and its state back afterwards: what a worker reads leaves no trace in later reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from backends.base.additivity import seeded
from backends.base.draws import key_of
from worker.tasks.checks.reachable_state import position_of, reached_generators

_GLOBAL: Final = (torch.default_generator, random._inst, np.random.mtrand._rand)  # noqa: SLF001


class ReadingGenerators:
    """The generators that samples may be drawn with.

    Args:
        roots: Data sets and collator by name.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._own = {
            path: generator
            for path, generator in reached_generators(roots).items()
            if not any(generator is each for each in _GLOBAL)
        }

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Context in which all generators are seeded; their states are restored afterwards."""
        with ExitStack() as stack:
            stack.enter_context(seeded(seed))
            for path, generator in self._own.items():
                stack.enter_context(_seeded(generator, key_of(seed, path) >> 1))
            yield

    def positions(self) -> list[str | None]:
        """Return the positions of all generators, to see whether anything was drawn."""
        return [position_of(each) for each in (*_GLOBAL, *self._own.values())]


@contextmanager
def _seeded(generator: Any, seed: int) -> Iterator[None]:
    before: Any
    restore: Any
    match generator:
        case random.Random():
            before = generator.getstate()
            generator.seed(seed)
            restore = generator.setstate
        case torch.Generator():
            before = generator.get_state()
            generator.manual_seed(seed)
            restore = generator.set_state
        case np.random.RandomState():
            before = generator.get_state()
            generator.seed(seed % 2**32)
            restore = generator.set_state
        case _:
            bits = getattr(generator, "bit_generator", generator)
            before = bits.state
            bits.state = type(bits)(seed).state
            restore = partial(setattr, bits, "state")
    try:
        yield
    finally:
        restore(before)
