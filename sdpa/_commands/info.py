"""`python -m sdpa info`: what was built, and which kernel is in use."""

import sdpa


def info():
    """What was built and which kernel is in use, a line for each fact."""
    for name, value in sdpa.build_info().items():
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        print(f"{name.replace('_', ' '):14}{value}")
