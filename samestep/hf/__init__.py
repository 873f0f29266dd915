"""`samestep.hf.Trainer`: a script for `transformers.Trainer` with the class swapped.

`arguments` says of every training argument whether it is honoured, without effect, or refused;
`training` trains. Imports `samestep` and transformers.
"""

from samestep.hf.training import SamestepMixin, Trainer

__all__ = ["SamestepMixin", "Trainer"]
