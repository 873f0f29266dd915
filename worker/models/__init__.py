"""Models of `transformers` and what belongs to them: loading, LoRA, tokenizer, export.

Imports nothing else of the worker. Start with `pretrained`.
"""
