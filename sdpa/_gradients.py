"""What `attention_backward` returns, that of the library and that of the oracle."""

from typing import Any, NamedTuple


class Gradients(NamedTuple):
    """What `attention_backward` returns: the gradient of each input, in its shape.  That of bias, or of sinks, is None
    where the call had none."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    sinks: Any = None
