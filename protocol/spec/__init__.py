"""What a run is to be: the run spec, the manifest that follows from it, and the files it reads.

Imports `protocol.base`. Start with `run_spec`.
"""
