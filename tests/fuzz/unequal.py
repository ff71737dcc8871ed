"""What mpiexec starts: any arguments for sdpa.distributed, on one rank or on all of them.  All ranks have a result, or
all have the same error; none waits for another without end."""

import sys
import warnings

import numpy as np
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from mpi4py import MPI
from support.ranks import holds, on_ranks

from sdpa import distributed

from .arguments import (
    ANY,
    ARRAYS,
    CACHE,
    CACHE_OPTIONS,
    ERRORS,
    LSE,
    OPTIONS,
    OUT,
    PACKED,
    PACKED_LSE,
    PACKED_OUT,
    RESULTS,
    taken,
)

HOW = dict(layout="contiguous")
SPLIT = HOW | dict(split="sequence")


def of_cache(comm, key, value, query, lengths, n, **given):
    cache = distributed.KVCache(comm, **taken(given, ("window", *CACHE)))
    cache.append(key, value, lengths)
    cache.fork().truncate(n)
    return cache.attend(query, **given)


CALLS = {
    "attention": (distributed.attention, ARRAYS | OPTIONS | RESULTS | SPLIT),
    "explain": (distributed.explain, ARRAYS | OPTIONS | RESULTS | SPLIT),
    "attention_backward": (
        distributed.attention_backward, ARRAYS | OPTIONS | HOW | dict(grad_out=OUT, out=OUT, lse=LSE, grad_lse=None),
    ),
    "attention_varlen": (distributed.attention_varlen, PACKED | OPTIONS | RESULTS | HOW),
    "attention_varlen_backward": (
        distributed.attention_varlen_backward,
        PACKED | OPTIONS | HOW | dict(grad_out=PACKED_OUT, out=PACKED_OUT, lse=PACKED_LSE, grad_lse=None),
    ),
    "gather": (distributed.gather, HOW | dict(array=OUT, axis=-2, root=0)),
    "scatter": (distributed.scatter, HOW | dict(array=OUT, axis=-2, root=0)),
    "KVCache": (
        of_cache,
        CACHE | CACHE_OPTIONS | RESULTS | dict(
            key=np.ones((2, 2, 5, 4), np.float32), value=np.ones((2, 2, 5, 3), np.float32), query=ARRAYS["query"],
            lengths=None, n=3,
        ),
    ),
}  # fmt: skip
EVERYWHERE = -1
PICKLED = ANY.filter(lambda given: not isinstance(given, np.ma.MaskedArray) or given.dtype != bfloat16)  # NumPy fails


def call(comm, name, changes, where):
    """The kind of the error and what it says; None for a result."""
    function, given = CALLS[name]
    for offsets in ("cu_seqlens_q", "cu_seqlens_k"):  # which are those of all ranks together
        if offsets in given:
            given = given | {offsets: np.asarray(given[offsets]) * comm.size}
    given = given | (changes if where in (EVERYWHERE, comm.rank) else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that are not finite, or of NumPy about its own conversions
        try:
            function(comm, **given)
        except (*ERRORS, MemoryError) as error:
            return type(error).__name__, str(error)
        except RuntimeError as error:
            if comm.size == 1 and str(error) == "no array":  # of Odd; several ranks make a ValueError of it
                return type(error).__name__, str(error)
            raise
    return None


def unequal(ranks, data):
    name = data.draw(st.sampled_from(list(CALLS)))
    names = data.draw(st.lists(st.sampled_from(sorted(CALLS[name][1])), min_size=1, max_size=3, unique=True))
    changes = {name: data.draw(PICKLED) for name in names}
    where = data.draw(st.integers(EVERYWHERE, ranks.comm.size - 1))
    ranks_with_it = "all ranks" if where == EVERYWHERE else f"rank {where}"
    print(f"{name} with {changes} on {ranks_with_it}", file=sys.stderr, flush=True)
    said = ranks.all(call, name, changes, where)
    assert all(one == said[0] for one in said), said


def main(ranks):
    for name in CALLS:  # else all that follows would be refused, and nothing tested
        assert set(ranks.all(call, name, {}, EVERYWHERE)) == {None}, name
    holds(unequal, ranks)


if __name__ == "__main__":
    on_ranks(MPI.COMM_WORLD, main)
