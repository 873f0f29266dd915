"""`samestep.hf.Trainer` and `Seq2SeqTrainer`: replacements for the trainers of transformers.

Start with `training`. `arguments` lists every training argument as honored, without effect or
refused; `losses` turns losses into sums; `callbacks` runs callbacks and writes the log. Imports
`samestep` and transformers.
"""

from samestep.hf.seq2seq import Seq2SeqTrainer
from samestep.hf.training import SamestepMixin, Trainer

__all__ = ["SamestepMixin", "Seq2SeqTrainer", "Trainer"]
