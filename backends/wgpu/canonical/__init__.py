"""Canonical arithmetic: a kernel with the same bits everywhere, as WGSL for devices and C for the
CPU.

May import: `graph`, `shaders`, `device`, and `lowering` for its types. Start with `tree`, which
reads a kernel; `wgsl_text` and `c_text` write it. See docs/canonical.md.
"""
