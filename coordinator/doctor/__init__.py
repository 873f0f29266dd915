"""`coordinator doctor`: what usually keeps a coordinator from working.

Start with `doctor`.
"""
