"""The paged key/value cache: many sequences in one pool of pages."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._checks import float_dtype, one_sequence, packed_rows, rows_of, whole_number
from .._options import PACKED, AttentionOptions, takes
from .._runtime import kernels
from .store import new_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike
    from typing_extensions import Unpack


OF_PAGES = PACKED | {
    "pairs": "(H, T, L), of one sequence (H, M, L), L the tokens of the longest sequence",
    "lse": "(T, H), of one sequence (H, M)",
    "offset": "the queries are the last tokens of their sequence",
}
ATTEND = takes("attend", AttentionOptions, OF_PAGES, causal=True)


class PagedKVCache:
    """A paged key/value cache: many growing sequences in a pool of pages, which is allocated once.

    Parameters
    ----------
    pages, page_size
        The number of pages, and the tokens of a page, 1 or more.
    kv_heads, head_dim
        G, and D, the size of a key.
    value_dim
        E, the size of a value.  Default: D.
    dtype : float32, float64, float16 or ml_dtypes.bfloat16
        Keys and values are rounded to this dtype, and numbers that are too large for it become infinite.  Queries must
        not have a narrower dtype.

    Notes
    -----
    A sequence is a number that `allocate` or `fork` returns; after `free` its number is not used again.  A sequence
    owns pages, in any order, and takes another page when its last one is full: at most page_size - 1 places per
    sequence are unused.  Forks share pages until one of them writes.

    `append` and `attend` take one sequence, with heads first as in `attention`, or a list of sequences, with packed
    rows as in `attention_varlen`::

                         one sequence                  sequences
        append   key     (G, M, D)                     (T, G, D)      cu_seqlens default: one token each
                 value   (G, M, E)                     (T, G, E)
        attend   query   (H, M, D)                     (T, H, D)      cu_seqlens_q default: one query each
                 result  (H, M, E)                     (T, H, E)

    A call that needs more pages than are free raises MemoryError.  A call that fails, or is interrupted, changes
    nothing.  Several threads may attend at the same time, but not while another thread changes the cache.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> cache = sdpa.PagedKVCache(pages=8, page_size=2, kv_heads=1, head_dim=1)
    >>> long, short = cache.allocate(), cache.allocate()
    >>> prompt = np.array([[[1.0], [2.0], [3.0]]], np.float32)          # (G, M, D)
    >>> cache.append(long, np.ones_like(prompt), prompt)
    >>> token = np.ones((2, 1, 1), np.float32)                          # one token for each of two: (T, G, D)
    >>> cache.append([long, short], token, 6 * token)
    >>> cache.attend(token, [long, short]).ravel().tolist()
    [3.0, 6.0]
    >>> cache
    <sdpa.PagedKVCache (8, 1, 2, 1) float32, 2 sequences, 5 pages free, 128 bytes>
    """

    def __init__(self, pages, page_size, kv_heads, head_dim, *, value_dim=None, dtype=np.float32):
        self.pages = whole_number("pages", pages)
        self.page_size = whole_number("page_size", page_size)
        self.kv_heads = whole_number("kv_heads", kv_heads)
        self.head_dim = whole_number("head_dim", head_dim)
        self.value_dim = self.head_dim if value_dim is None else whole_number("value_dim", value_dim)
        self.dtype = float_dtype(dtype)
        self._pool = _core.Pool(self._new_pages(self.head_dim), self._new_pages(self.value_dim))

    # Sequences

    def allocate(self, tokens=0):
        """A new, empty sequence, which owns pages for `tokens` tokens already.

        >>> import sdpa
        >>> cache = sdpa.PagedKVCache(pages=8, page_size=4, kv_heads=1, head_dim=2)
        >>> cache.allocate(tokens=10), cache.free_pages
        (0, 5)
        """
        tokens = whole_number("tokens", tokens, least=0, bounded=False)
        pages = -(-tokens // self.page_size)
        if pages > self.free_pages:
            raise self._pool.exhausted(pages, tokens)
        return self._pool.allocate(pages)

    def free(self, sequence):
        """Forget the sequence.  Its pages are free again, except those that other sequences share.

        >>> import sdpa
        >>> cache = sdpa.PagedKVCache(pages=8, page_size=4, kv_heads=1, head_dim=2)
        >>> cache.free(cache.allocate(tokens=10))
        >>> cache.free_pages
        8
        """
        self._find(sequence)
        self._pool.remove(operator.index(sequence))

    def fork(self, sequence):
        """A new sequence with the same tokens, in the same pages.

        If the last page is not full, whichever sequence appends first copies that page, which takes a free one.  Empty
        pages that `allocate` reserved stay with the old sequence.

        >>> import numpy as np, sdpa
        >>> cache = sdpa.PagedKVCache(pages=8, page_size=4, kv_heads=1, head_dim=2)
        >>> prompt = cache.allocate()
        >>> cache.append(prompt, np.ones((1, 6, 2)), np.ones((1, 6, 2)))
        >>> answer = cache.fork(prompt)
        >>> cache.append(answer, np.ones((1, 1, 2)), np.ones((1, 1, 2)))
        >>> cache.pages_of(prompt), cache.pages_of(answer)
        ([0, 1], [0, 2])
        """
        return self._pool.fork(self._find(sequence))

    def truncate(self, sequence, n):
        """Forget all but the first n tokens.  The pages after them are free again, reserved ones too.

        >>> import numpy as np, sdpa
        >>> cache = sdpa.PagedKVCache(pages=8, page_size=4, kv_heads=1, head_dim=2)
        >>> guess = cache.allocate()
        >>> cache.append(guess, np.ones((1, 9, 2)), np.ones((1, 9, 2)))
        >>> cache.truncate(guess, 7)
        >>> cache.length(guess), cache.free_pages
        (7, 6)
        """
        state = self._find(sequence)
        n = whole_number("n", n, least=0, bounded=False)
        if n > state.length:
            raise ValueError(f"n is {n}: it must be from 0 to the length of sequence {sequence}, {state.length}")
        self._pool.truncate(state, n)

    def length(self, sequence):
        """The number of tokens of the sequence."""
        return self._find(sequence).length

    def pages_of(self, sequence):
        """The numbers of the pages that the sequence owns or shares, in the order of its tokens."""
        return self._find(sequence).pages.tolist()

    # Tokens

    def append(self, sequences, key, value, cu_seqlens=None):
        """Append the keys and values of new tokens to one sequence, or to several.

        One sequence takes key (G, M, D) and value (G, M, E).  A list of S different sequences takes packed rows, key
        (T, G, D) and value (T, G, E): sequence b gets the rows from cu_seqlens[b] to cu_seqlens[b + 1], or row b if
        cu_seqlens is not given and T = S.  If there are not enough free pages, no sequence gets any token.

        >>> import numpy as np, sdpa
        >>> cache = sdpa.PagedKVCache(pages=8, page_size=4, kv_heads=1, head_dim=2)
        >>> first, second = cache.allocate(), cache.allocate()
        >>> cache.append(first, np.ones((1, 9, 2)), np.ones((1, 9, 2)))
        >>> cache.append([first, second], np.ones((7, 1, 2)), np.ones((7, 1, 2)), cu_seqlens=[0, 1, 7])
        >>> cache.length(first), cache.length(second)
        (10, 6)
        """
        one, numbers, states = self._find_all(sequences)
        if len(states) > 1 and len({id(state) for state in states}) < len(states):
            raise ValueError(f"sequences are {numbers}: none may be there twice")
        key = self._tokens("key", key, self._pool.keys, one)
        value = self._tokens("value", value, self._pool.values, one)
        rows, value_rows = (key.shape[1], value.shape[1]) if one else (len(key), len(value))
        if rows != value_rows:
            raise ValueError(f"key has {rows} tokens and value {value_rows}: they must have the same")
        begins = rows_of("cu_seqlens", cu_seqlens, "key", rows, len(states), one)
        self._pool.append(states, begins, key, value, one)

    @ATTEND
    def attend(
        self, query: ArrayLike, sequences: int | Sequence[int], *, cu_seqlens_q: ArrayLike | None = None,
        **options: Unpack[AttentionOptions],
    ) -> Any:  # fmt: skip
        """`attention` of queries to the tokens of their sequences.  A call may mix long and short sequences, and
        prompts with single tokens.

        One sequence takes query (H, M, D) and returns (H, M, E).  A list of S sequences takes packed rows, query
        (T, H, D), and returns (T, H, E): sequence b has the rows from cu_seqlens_q[b] to cu_seqlens_q[b + 1], or row b
        if cu_seqlens_q is not given and T = S.  Append the keys and values of the queries' tokens first.

        Parameters
        ----------
        query, sequences, cu_seqlens_q
            The queries, and the sequence or sequences to which they belong, as above.
        {options}

        Examples
        --------
        >>> import numpy as np, sdpa
        >>> cache = sdpa.PagedKVCache(pages=8, page_size=4, kv_heads=1, head_dim=1)
        >>> prompt, running = cache.allocate(), cache.allocate()
        >>> for sequence, value in (prompt, [1.0, 3.0, 5.0]), (running, [7.0, 9.0]):
        ...     cache.append(sequence, np.zeros((1, len(value), 1)), np.reshape(value, (1, -1, 1)))
        >>> query = np.ones((4, 1, 1), np.float32)          # all 3 of the prompt, the last one of what is running
        >>> cache.attend(query, [prompt, running], cu_seqlens_q=[0, 3, 4]).ravel().tolist()
        [1.0, 2.0, 3.0, 8.0]
        """
        one, _, states = self._find_all(sequences)
        keys, values = self._pool.keys, self._pool.values
        return _core.attend_pages(kernels.default, query, keys, values, states, one, cu_seqlens_q, options, ATTEND)

    # Sizes

    @property
    def free_pages(self):
        """The number of pages that no sequence owns."""
        return self._pool.free_count

    @property
    def nbytes(self):
        """Bytes of the pool of pages."""
        return self._pool.keys.nbytes + self._pool.values.nbytes

    def __repr__(self):
        size = str(self.head_dim) if self.value_dim == self.head_dim else f"{self.head_dim} and {self.value_dim}"
        return (
            f"<sdpa.PagedKVCache ({self.pages}, {self.kv_heads}, {self.page_size}, {size}) {self.dtype.name}, "
            f"{len(self._pool.sequences)} sequences, {self.free_pages} pages free, {self.nbytes:,} bytes>"
        )

    # What is given

    def _find(self, sequence):
        try:
            number = operator.index(None if isinstance(sequence, (bool, np.bool_)) else sequence)
        except TypeError:
            raise TypeError(f"sequence is {sequence!r}: it must be a number from allocate or fork") from None
        state = self._pool.sequences.get(number)
        if state is None:
            what = "was freed" if 0 <= number < self._pool.issued else "was never allocated in this cache"
            raise ValueError(f"sequence {number} {what}: it must be one from allocate or fork, and not freed")
        return state

    def _find_all(self, sequences):
        """Whether `sequences` is one sequence, and the lists of their numbers and of their states."""
        if isinstance(sequences, (int, np.integer)):
            return True, [sequences], [self._find(sequences)]
        if isinstance(sequences, np.ndarray) and sequences.ndim != 1:  # its list might be long, if it holds nothing
            raise TypeError(f"sequences has shape {sequences.shape}: it must be a sequence, or a list of them")
        try:
            numbers = list(sequences.tolist() if isinstance(sequences, np.ndarray) else sequences)
        except TypeError:
            raise TypeError(f"sequences is {sequences!r}: it must be a sequence, or a list of them") from None
        return False, numbers, [self._find(number) for number in numbers]

    def _tokens(self, name, rows, pool, one):
        """As (T, G, size), or for one sequence (G, T, size), of the dtype of the cache, the last axis without gaps."""
        if _core.fits_pages(rows, pool, one):
            return rows
        rows = one_sequence(name, rows) if one else packed_rows(name, rows)
        heads, size, wanted = rows.shape[0 if one else 1], rows.shape[2], pool.shape[3]
        if heads != self.kv_heads or size != wanted:
            given = f"{heads} heads of size {size}"
            raise ValueError(f"{name} has {given}: the cache has {self.kv_heads} heads, and {wanted} is the size")
        with np.errstate(over="ignore", invalid="ignore"):
            rows = rows.astype(self.dtype, copy=False)
        return rows if rows.strides[2] == rows.itemsize else rows.copy()

    def _new_pages(self, size):
        """An array (pages, G, page_size, size).  The rows of a head lie together, so that pages with neighbouring
        numbers are one run of memory, which is read faster (see csrc/README.md).  The array holds zeros, so that no
        kernel reads NaN where nothing was written; zeros cost nothing before they are touched."""
        return new_array((self.kv_heads, self.pages, self.page_size, size), self.dtype, np.zeros).swapaxes(0, 1)


# What a layer needs, which appends to a cache before it attends, and takes that back where it fails.


def find_all(cache, sequences):
    """Whether it is one sequence, and the lists of all numbers and of their states."""
    return cache._find_all(sequences)


def snapshot(cache, states):
    """What `restore` needs to take back an append to these."""
    return cache._pool.snapshot(states)


def restore(cache, states, marks):
    cache._pool.restore(states, marks)
