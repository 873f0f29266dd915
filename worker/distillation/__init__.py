"""A teacher's captured logits: read, shown, and used in the distillation loss.

Imports nothing else of the worker. Start with `captured_samples`, then `distillation_loss`.
"""
