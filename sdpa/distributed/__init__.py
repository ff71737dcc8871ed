"""Attention of sequences that are spread over several machines, or several processes, by MPI.

`comm` is a communicator of mpi4py.  Importing this does not import mpi4py.
"""

from ._attention import attention
from ._backward import attention_backward
from ._cache import KVCache
from ._explain import Explanation, explain
from ._layout import rows
from ._varlen import attention_varlen, attention_varlen_backward
from ._whole import gather, scatter

__all__ = [
    "Explanation",
    "KVCache",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "explain",
    "gather",
    "rows",
    "scatter",
]
