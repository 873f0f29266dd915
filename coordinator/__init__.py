"""The coordinator daemon: it plans, sums and commits steps. It never imports torch.

Start with `run`, which decides; `service` executes its decisions.
"""
