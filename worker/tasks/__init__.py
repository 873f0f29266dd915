"""Tasks: what is trained, on what data, with what loss, and how it is measured and saved.

One file for each task, beside what they share. Imports `models`, `data` and `distillation`. Start
with `base`, which is what a task must offer, and `registry`.
"""
