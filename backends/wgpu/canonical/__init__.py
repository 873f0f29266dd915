"""Canonical arithmetic: one meaning of a kernel, as WGSL for devices and as C for this CPU.

May import: `graph`, `shaders`, `device`, and `lowering` for its types. Start with `tree`, which
reads a kernel; `wgsl_text` and `c_text` write it. See docs/canonical.md.
"""
