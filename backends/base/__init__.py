"""The interface of backends, and the code that they share: tree sums, buffers, random numbers.

Imports no other chapter of `backends`. Start with `interface`.
"""
