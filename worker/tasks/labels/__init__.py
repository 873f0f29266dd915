"""Tasks of models that label text, their metrics, and how a result labels new text."""
