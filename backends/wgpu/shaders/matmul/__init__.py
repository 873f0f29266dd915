"""Matrix products: shapes and operands, tiles for GPUs, lanes for software adapters.

Imports modules of `shaders`. Start with `shader`.
"""
