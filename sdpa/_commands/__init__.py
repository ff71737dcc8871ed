"""The commands of `python -m sdpa`, one file each.  The laboratory's command is in sdpa/lab.  Begin with info.py."""
