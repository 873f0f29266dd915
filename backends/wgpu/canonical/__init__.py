"""Canonical arithmetic: kernels with the same bits everywhere, as WGSL for devices and C for the
CPU.

Imports `shaders`, `device`, and `lowering` for its types. Start with `tree`, which parses a kernel;
`wgsl_text` and `c_text` print it. See docs/canonical.md.
"""
