"""Text and samples as they are read from files: checked, without duplicates, split.

Imports nothing else of the worker. Start with `text_file`.
"""
