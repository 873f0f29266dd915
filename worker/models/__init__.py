"""Models of `transformers` and what belongs to them: loading, LoRA, tokenizer, export.

Imports `worker.data`. Start with `pretrained`.
"""
