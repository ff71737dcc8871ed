"""What follows from the description of options: signatures, documentation, and which keywords a function knows."""

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_type_hints

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def described(options: type) -> Mapping[str, Any]:
    """name: Option of the fields of a TypedDict, in their order."""
    hints = get_type_hints(options, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


@functools.cache
def explained(name: str, kind: str, default: Any, meaning: str) -> str:
    """An option as the parameter list of a docstring has it."""
    head = f"{name} : {kind}" + ("" if default is None else f", default {default}")
    return f"{head}\n{textwrap.fill(meaning, 112, initial_indent='    ', subsequent_indent='    ')}\n"


class Keywords(NamedTuple):
    """The options of one function, for the compiled core, which reads their values; as a decorator it completes the
    function, whose last parameter is `**options: Unpack[...]`."""

    function: str
    names: frozenset[str]
    defaults: Mapping[str, Any]  # in the order of the description
    causal: bool  # the default
    described: Mapping[str, Any]
    words: Mapping[str, str]  # for what is in braces in the description
    said: Mapping[str, str]  # what messages call an option, where that is not its name
    most: Callable[[], int] | None  # the most threads of a call that says none, where another library decides

    def __call__(self, function: Function) -> Function:
        """`help`, `inspect.signature` and editors then show the options by name; a line `{options}` of the docstring
        becomes the list of what they mean."""
        given = [
            parameter.replace(annotation=parameter.empty)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in self.defaults.items()
        ]
        about: Any = function
        about.__signature__ = inspect.Signature([*given, *named])
        before, found, after = (function.__doc__ or "").partition("{options}\n")
        if found:
            indent = before[before.rindex("\n") + 1 :]
            function.__doc__ = before + textwrap.indent(self.parameters(), indent).lstrip() + after
        return function

    def parameters(self) -> str:
        """The list of all options for a docstring."""
        return "".join(
            explained(
                name, option.kind.format_map(self.words), self.defaults[name], option.meaning.format_map(self.words)
            )
            for name, option in self.described.items()
        )

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises where there is an option that the function does not take."""
        for name in options:
            if name not in self.names:
                likely = difflib.get_close_matches(name, self.names, 1)
                hint = f": did you mean {likely[0]!r}?" if likely else ""
                raise TypeError(f"{self.function}() got an unexpected keyword argument {name!r}{hint}")
