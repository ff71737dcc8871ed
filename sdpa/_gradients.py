"""What both `attention_backward`, that of the library and that of the oracle, return."""

from typing import Any, NamedTuple


class Gradients(NamedTuple):
    """The gradient of each input, in its shape; None where the call had no bias or no sinks."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    sinks: Any = None
