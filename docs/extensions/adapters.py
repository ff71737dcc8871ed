"""Stand-ins for torch and transformers, so that the docstrings of the adapters can be read where neither is installed.

Whatever is imported from them, or from their submodules, exists.  What has the name of a class can be inherited from,
and a decorator gives back what it decorates.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import isclass, isfunction
from types import ModuleType

ADAPTED = "torch", "transformers"
OPERATOR = "custom_op"  # the decorator that gives something else than the function


def attribute(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    full = f"{owner.__name__}.{name}"
    return Attributes(name, (Beneath,), {"__module__": owner.__name__}) if name[0].isupper() else Anything(full)


class Attributes(type):
    __getattr__ = attribute


class Beneath:
    apply = None  # of autograd's Function, which is asked for it by super(), and so past `Attributes`

    def __init__(self, *given, **named):
        pass

    def __getattr__(self, name):
        return attribute(type(self), name)

    def __len__(self):
        return 0


class Anything(ModuleType):
    """A module, or what is in one."""

    __path__ = ()

    def __getattr__(self, name):
        found = attribute(self, name)
        setattr(self, name, found)
        return found

    def __get__(self, *owner):
        return self

    def __iter__(self):
        return iter(())

    def __call__(self, *given, **named):
        decorates = given and (isfunction(given[0]) or isclass(given[0])) and not self.__name__.endswith(OPERATOR)
        return given[0] if decorates else Anything(self.__name__)


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ADAPTED else None

    def create_module(self, spec):
        return Anything(spec.name)

    def exec_module(self, module):
        pass


def setup(app):
    sys.meta_path.insert(0, Finder())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
