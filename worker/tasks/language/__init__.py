"""Tasks of models that generate text: language modeling, preferences, distillation."""
