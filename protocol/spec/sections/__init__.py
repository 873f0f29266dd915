"""The sections of a run spec as pydantic models, and how a YAML document becomes them.

Imports `protocol.base`. Start with `section`: tagged unions, and keys that depend on other keys.
"""
