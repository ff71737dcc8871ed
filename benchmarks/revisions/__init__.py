"""Compares two revisions: `python -m benchmarks.revisions`.  Begin with __main__.py."""
