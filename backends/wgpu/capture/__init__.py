"""From a torch module to a graph of core operators.

Imports `graph` and `shaders`. Start with `capture`.
"""
