"""Matrix products: shapes and operands, tiles for wide ones, lanes for narrow ones.

Imports what is beside it in `shaders`. Start with `shader`.
"""
