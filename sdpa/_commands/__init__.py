"""What `python -m sdpa` does, a file for each command; that of the laboratory is in sdpa/lab.  Begin with info.py."""
