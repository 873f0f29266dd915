"""States of the global generators when this process imported samestep, for its devices' processes.

A script that seeds nothing initializes its model from these states, so the processes that run the
script again begin with the same states. Draws from numpy's or Python's generator before the import
cannot be repeated; draws from torch's can, because torch knows its first seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """The states in a form that JSON can represent.

    Attributes:
        torch: The first seed of the CPU's generator.
        numpy: Words, position, whether a normal draw is left over, and that draw.
        python: Version, words, and the normal draw that is left over.
    """

    torch: int
    numpy: tuple[list[int], int, int, float]
    python: tuple[int, list[int], float | None]

    @staticmethod
    def now() -> GeneratorStates:
        """Read the current states."""
        words: Any = np.random.get_state()  # noqa: NPY002 -- scripts use the global generator
        version, python_words, normal = random.getstate()
        return GeneratorStates(
            torch.initial_seed(),
            (words[1].tolist(), int(words[2]), int(words[3]), float(words[4])),
            (version, list(python_words), normal),
        )

    def restore(self) -> None:
        """Set the generators of this process to these states."""
        torch.default_generator.manual_seed(self.torch)
        words, position, has_normal, normal = self.numpy
        np.random.set_state(  # noqa: NPY002
            ("MT19937", np.array(words, np.uint32), position, has_normal, normal)
        )
        version, python_words, python_normal = self.python
        random.setstate((version, tuple(python_words), python_normal))


AT_IMPORT: Final = GeneratorStates.now()
