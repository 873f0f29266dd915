"""What a teacher said of each token: read where a capture or another tool left it, shown, learned.

Imports nothing else of the worker. Start with `captured_samples`, then `distillation_loss`.
"""
