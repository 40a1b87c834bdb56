"""Finished models as files for other runtimes."""
