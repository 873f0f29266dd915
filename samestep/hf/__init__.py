"""`samestep.hf.Trainer` and `Seq2SeqTrainer`: in place of transformers' in a script.

Start with `training`. `arguments` lists every training argument as honored, without effect or
refused; `losses` makes sums of losses; `callbacks` runs callbacks and writes the log. Imports
`samestep` and transformers.
"""

from samestep.hf.seq2seq import Seq2SeqTrainer
from samestep.hf.training import SamestepMixin, Trainer

__all__ = ["SamestepMixin", "Seq2SeqTrainer", "Trainer"]
