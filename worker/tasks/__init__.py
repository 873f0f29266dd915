"""Tasks: what is trained, on what data, with what loss, and how it is measured and saved."""
