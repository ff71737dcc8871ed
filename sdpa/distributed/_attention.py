"""Attention of rows that are spread over the ranks to keys that are spread over them, too."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._attention.forward import attention as attention_here
from .._checks import check_out
from .._options import AttentionOptions, takes
from ._agreement import finish, join, ready, room
from ._calls import NO_KEYS, Dense
from ._heads import attend_by_heads, check_heads
from ._layout import Chunk, check_layout
from ._ring import Mail, Travel, pieces
from ._whole import gather_rows

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

# Keys and values of all ranks together that are no larger than this are gathered: one exchange and one call take less
# time than the steps of a ring and the joining of its partial results.
GATHER_BYTES = 1 << 20
LEAST_ROWS = 256  # of a call between which MPI gets to move what is under way
SPLITS = ("sequence", "heads")

ATTENTION = takes("attention", AttentionOptions)


@ATTENTION
def attention(
    comm: Any, query: ArrayLike, key: ArrayLike, value: ArrayLike, *, layout: str = "contiguous",
    split: str = "sequence", **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """`sdpa.attention` of sequences that are spread over the ranks of a communicator.

    Each rank gives its rows of query, key and value, and gets its rows of the result.  M and N are the rows of all
    ranks together; ranks may have any numbers of them, including none.

    Parameters
    ----------
    comm
        The communicator of mpi4py.  All its ranks call this, with the same options.
    query, key, value : (B, H, rows, D), (B, G, rows, D) and (B, G, rows, E), the rows of this rank
    layout
        Which positions the rows have.  "contiguous": those that follow the rows of the rank before.  "zigzag": the two
        halves of a rank's rows are the two chunks that `rows` names, so that causal work is the same for all ranks.
    split
        "sequence": keys and values travel round the ranks, while the block before is computed; if keys are few, all
        ranks get all keys at once.  "heads": each rank computes some heads for all rows; there must be as many heads as
        ranks, or more.  `explain` says what either costs.
    {options}

    Returns
    -------
    out, or (out, lse)
        Partial results are float32 at least, and are never rounded between ranks.  The same call on the same number of
        ranks gives the same bits; on one rank, those of `sdpa.attention`.

    Notes
    -----
    Mask and bias have the rows of this rank, and the columns of all keys.  Positions, and so `q_offset` and
    `kv_lengths`, are those of the whole sequence.

    A call that is wrong on one rank raises the same error on all ranks, before anything travels.  A rank that fails
    later, such as for want of memory, makes the others raise RuntimeError.
    """
    group = join(comm)
    if group.size == 1:
        check_layout(layout)
        check_split(split)
        return attention_here(query, key, value, **options)

    def check(call):
        check_split(split)
        check_result(call, options)
        if split == "heads":
            check_heads(call)

    call = Dense(group, query, key, value, options, ATTENTION, layout, check, split=split)
    return (attend_by_heads if split == "heads" else attend)(call, options)


def check_split(split):
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}: it must be {' or '.join(map(repr, SPLITS))}")


def check_result(call, options):
    """Raise unless `out` can take the result."""
    if options.get("out") is not None:
        inputs = {"query": call.query, "key": call.key, "value": call.value} | call.pairs
        check_out(options["out"], call.out_shape, call.query.dtype, inputs)


def attend(call, options):
    """The result of the rows of this rank, or (result, lse)."""
    mail = Mail(call.group)
    sums = ready(call.group, lambda: Sums(call, options.get("out"), mail.progress))
    for block in gathered(call, mail) if is_gathered(call) else travelling(call, mail):
        mail.attempt(sums.add_block, block)
    mail.attempt(sums.close)
    finish(call.group, mail.failure)
    return (sums.result, sums.lse) if options.get("return_lse") else sums.result


def is_gathered(call):
    return sum(call.of_all(x, call.keys).nbytes for x in (call.key, call.value)) <= GATHER_BYTES


def travelling(call, mail):
    """Blocks of (chunk of rows, chunk of keys, its keys and values): those of this rank, then those that come round."""
    for step, held in enumerate(ready(call.group, lambda: Travel(call, mail))):
        block = [(i, call.k_chunks[c], *held[c]) for i in call.own_rows for c in held if call.seen[i, c]]
        yield block if step else list(own_keys_together(call, block))


def own_keys_together(call, block):
    """The same, but that rows which see both chunks of this rank, and all of the first one, take them as one.

    Keys that all rows see may stand anywhere before them where only positions decide who sees whom: so they count as
    those right before the second chunk, beside which they lie in the arrays of this rank.
    """
    for i, of_rows in itertools.groupby(block, lambda each: each[0]):
        pairs = list(of_rows)
        if len(pairs) == 2 and call.sees_all(call.q_chunks[i], pairs[0][1]):
            early, late = pairs[0][1], pairs[1][1]
            together = late._replace(first=late.first - early.count, count=early.count + late.count, at=early.at)
            pairs = [(i, together, call.key, call.value)]
        yield from pairs


def gathered(call, mail):
    """The one block of all keys and values, in the order of their positions, which come to all ranks at once."""
    group, arrays = call.group, (call.key, call.value)
    key, value = (gather_rows(group, x, call.axis, call.k_chunks) for x in arrays)
    mail.tally.bytes_sent += sum(x.nbytes for x in arrays) * (group.size - 1)
    whole = Chunk(group.rank, 0, call.keys, 0)
    yield [(i, whole, key, value) for i in call.own_rows if call.seen[i].any()]


class Sums:
    """The results of the rows of this rank for the keys so far, not rounded."""

    def __init__(self, call, out, progress):
        self.call, self.progress = call, progress
        shape = call.out_shape
        self.result = np.empty_like(call.query, shape=shape, subok=False) if out is None else out
        self.out = self.result if self.result.dtype == call.sums else np.empty(shape, call.sums)
        self.lse = np.empty(shape[:-1], call.sums)
        self.begun = set()

    def add_block(self, block):
        for each in block:
            self.add(*each)

    def add(self, i, k, key, value):
        """Add what chunk `i` of rows sees of the keys of chunk `k`.  The order of these calls and the pieces are fixed,
        and therefore so are the bits."""
        call = self.call
        for piece in pieces(call, call.q_chunks[i], k, LEAST_ROWS):
            out, lse = call.rows_of(self.out, piece), call.lse_of(self.lse, piece)
            if i not in self.begun:
                lse[...] = call.attend(piece, k, key, value, True, out)
            else:
                part = room(call.group, "part", out.shape, call.sums)
                _core.merge_into(out, lse, part, call.attend(piece, k, key, value, False, part), call.threads)
            self.progress()
        self.begun.add(i)

    def close(self):
        """Finish rows that saw no key, and round the result to its dtype."""
        call = self.call
        for i in set(call.own_rows) - self.begun:
            self.add(i, NO_KEYS, *(call.rows_of(x, NO_KEYS) for x in (call.key, call.value)))
        if self.out is not self.result:
            with np.errstate(over="ignore", invalid="ignore"):
                self.result[...] = self.out
