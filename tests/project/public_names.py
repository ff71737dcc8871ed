"""The public names, their signatures, and the errors that are raised: `python tests/project/public_names.py` writes
them into public_names.txt beside it, which test_public_names.py compares with what there is.

A module that cannot be imported, because what it adapts is not installed, keeps the lines that it has in the file.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".txt")
MODULES = ("sdpa", "sdpa.reference", "sdpa.models", "sdpa.lab", "sdpa.distributed", "sdpa.torch", "sdpa.huggingface")
ADAPTERS = ("sdpa.torch", "sdpa.huggingface")
HEAD = "# Written by `python tests/project/public_names.py`. CONTRIBUTING.md says how a name may change."


def signature(of):
    """Without annotations, which are for type checkers."""
    try:
        found = inspect.signature(of)
    except (TypeError, ValueError):
        return "(...)"
    empty = inspect.Parameter.empty
    plain = [parameter.replace(annotation=empty) for parameter in found.parameters.values()]
    text = str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r"<class '([\w.]+)'>", r"\1", text)


def lines_of(name, found):
    """A line for a function; for a class also one for each of its own attributes."""
    if inspect.ismodule(found):
        yield f"{name}: module"
    elif not inspect.isclass(found):
        yield name + signature(found) if callable(found) else f"{name}: {type(found).__name__}"
    else:
        yield f"{name}: class" + signature(found)
        for attribute in sorted(dir(found)):
            own = inspect.getattr_static(found, attribute)
            where = next(kind for kind in found.__mro__ if attribute in vars(kind))
            special = attribute.startswith("_") and attribute not in ("__call__", "__len__")
            if special or not where.__module__.startswith("sdpa"):
                continue
            if isinstance(own, (staticmethod, classmethod)) or inspect.isroutine(own):
                yield f"    {attribute}{signature(getattr(found, attribute))}"
            else:
                yield f"    {attribute}"


def errors_of(name):
    """The exceptions that the files of a module raise by name.  Those of the commands end there."""
    folder = ROOT / name.replace(".", "/")
    others = [ROOT / module.replace(".", "/") for module in MODULES if module.startswith(f"{name}.")]
    others.append(ROOT / "sdpa/_commands")
    raised = set()
    for path in folder.rglob("*.p*"):
        if path.suffix in (".py", ".pyx", ".pxi") and not any(path.is_relative_to(other) for other in others):
            raised |= set(re.findall(r"^\s*raise (?!SystemExit)([A-Z]\w+)\b", path.read_text(), re.MULTILINE))
    return ", ".join(sorted(raised))


def section(name):
    """The lines of a module; None if it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        if name in ADAPTERS:
            return None
        raise
    lines = [line for each in sorted(module.__all__) for line in lines_of(each, getattr(module, each))]
    return [f"[{name}]", f"raises {errors_of(name)}", *lines]


def sections_of(text):
    """The lines of each module in the file."""
    parts = [part.strip().splitlines() for part in re.split(r"(?=^\[)", text, flags=re.MULTILINE)[1:]]
    return {part[0].strip("[]"): part for part in parts}


def main():
    old = sections_of(FILE.read_text()) if FILE.exists() else {}
    sections = [section(name) or old.get(name, []) for name in MODULES]
    FILE.write_text("\n\n".join([HEAD, *("\n".join(lines) for lines in sections if lines)]) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
