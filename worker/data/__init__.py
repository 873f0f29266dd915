"""Samples for a task: text and conversations read, split, made into tokens, and shown.

Imports of the worker only `models`, for tokens. Start with `language_data`.
"""
