"""Models of `transformers`: loading, LoRA, tokenizer, export.

Imports nothing else of the worker. Start with `pretrained`.
"""
