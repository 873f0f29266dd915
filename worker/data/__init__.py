"""Samples for a task: read text and conversations, split them, tokenize them, and show them.

Imports only `models` of the worker, for tokens. Start with `language_data`.
"""
