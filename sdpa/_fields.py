"""Docstrings of the fields of named tuples, taken from their class: Python's own are "Alias for field number 0"."""

import inspect
import re
from typing import TypeVar

Tuple = TypeVar("Tuple", bound=type)


def documented(cls: Tuple) -> Tuple:
    """The class, each of whose fields now has what the section Attributes of the class says about it."""
    section = (inspect.getdoc(cls) or "").partition("Attributes\n----------\n")[2].partition("\n\n")[0]
    for names, kind, text in re.findall(r"^(\w[\w, ]*?)(?: : (.*))?\n((?: {4}.*\n?)*)", f"{section}\n", re.MULTILINE):
        told = " ".join(text.split())
        for name in names.split(", "):
            getattr(cls, name).__doc__ = ": ".join(filter(None, (kind, told)))
    return cls
