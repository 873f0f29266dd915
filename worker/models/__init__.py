"""Models of `transformers`: loading, LoRA, tokenizer, export.

Imports nothing else from the worker. Start with `pretrained`.
"""
