"""Checks of tasks that users wrote: the loss adds up over samples, the model keeps no state.

Start with `additivity`.
"""
