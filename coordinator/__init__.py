"""The coordinator daemon: it plans, sums and commits steps. It never imports torch."""
