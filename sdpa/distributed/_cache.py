"""A key/value cache whose tokens are spread over the ranks: what users call."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._cache import files, kv
from .._options import CacheOptions
from .._runtime import threads
from ._agreement import agree, join
from ._blocks import BLOCK, Blocks
from ._question import Question
from ._spread import Tokens, keep_own, own_sizes, receive_own, send_others, take_part
from ._together import ALL, SOME, attempt, digest_of, settle, voted

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack


class KVCache:
    """`sdpa.KVCache` whose tokens are spread over the ranks of a communicator, for contexts that no rank could hold.

    Blocks of 16 tokens lie on the ranks in turn, so that all ranks have the same work at every length and in every
    window.  Each rank attends to its own tokens, and one `Allreduce` joins the results by their log-sum-exps.

    Parameters
    ----------
    comm
        A communicator of mpi4py.  All its ranks make the cache and call its methods, with the same arguments.  A call
        that is wrong or fails on one rank is the same error on all, and leaves the cache as it was.
    batch, kv_heads, head_dim, value_dim, dtype, capacity, window, keep, group
        The sizes of the whole cache, as for `sdpa.KVCache`.

    Notes
    -----
    `len(cache)` is the length of the longest batch, on all ranks together.

    Examples
    --------
    >>> cache = sdpa.distributed.KVCache(MPI.COMM_WORLD, 1, 2, 64)       # doctest: +SKIP
    >>> cache.append(key, value)                                         # doctest: +SKIP
    >>> out = cache.attend(query)                                        # doctest: +SKIP
    """

    # Lengths, floors and aligned are those of all ranks together, as in Store; they are replaced and never changed.  A
    # rank has at least those of its tokens that are not below floors.  `alike`: all lengths are the same.
    __slots__ = (
        "__weakref__", "_aligned", "_alike", "_blocks", "_floors", "_group", "_lengths", "_local", "_parts", "_threads",
        "_whole",
    )  # fmt: skip

    batch, kv_heads, head_dim, value_dim, dtype, capacity, window, keep, group = kv.made_with("_whole")

    __signature__ = inspect.Signature(
        [
            inspect.Parameter("comm", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *inspect.signature(kv.KVCache).parameters.values(),
        ]
    )

    def __init__(self, comm, *sizes, **options):
        self._group = join(comm)
        self._blocks = Blocks(self._group.rank, self._group.size)

        def make():
            # Stays empty: it knows the sizes, and checks them and their names, so that a wrong one fails on all ranks.
            self._whole = kv.KVCache(*sizes, **options)
            own = own_sizes(self._whole, self._blocks)
            self._local = kv.KVCache(**own)
            return None, {name: getattr(self._whole, name) for name in own} | {"dtype": self.dtype.name}

        agree(self._group, make)
        self._threads = threads.count(None, self._group.sharing)
        self._lengths = self._floors = np.zeros(self.batch, np.int64)
        self._alike, self._aligned, self._parts = True, None, None

    # ------------------------------------------------------------------------------------------------ what users call

    def append(self, key, value, lengths=None):
        """Add the keys (B, G, M, D) and values (B, G, M, E) of M new tokens, as `sdpa.KVCache.append` does.

        Either all ranks give the arrays, and each rank keeps its own tokens; or one rank gives the arrays and all
        others give None, and that rank sends each other rank its tokens.
        """
        tokens, before, failure = None, None, None
        gives = key is not None or value is not None or lengths is not None
        if gives:
            tokens, failure = attempt(self._tokens, key, value, lengths)
        if tokens is not None:
            before, failure = attempt(lambda: keep_own(self, *tokens.of_rank(self._blocks)))
        try:
            giver = voted(self._group, 0 if tokens is None else tokens.digest, lambda: tokens.said(), failure, gives)
            if giver == SOME:
                raise ValueError("key and value are None on some ranks: either all ranks give them, or one does")
            if gives:
                count, added, alike = tokens.key.shape[2], tokens.added, tokens.alike
                if giver != ALL:
                    send_others(self._group, tokens)
                    voted(self._group, 0, dict, None)
            else:
                own, count, added, alike = receive_own(self, giver)
                before, failure = attempt(keep_own, self, *own)
                voted(self._group, 0, dict, failure)
        except BaseException:
            if before is not None:
                kv.restore(self._local, before)
            raise
        if self.window is not None:
            self._floors = np.maximum(self._floors, self._lengths - self.window + 1)
        self._aligned = None if alike or (added == count).all() else (count, self._lengths)
        self._lengths, self._alike = self._lengths + added, alike

    @kv.ATTEND
    def attend(self, query: ArrayLike, **options: Unpack[CacheOptions]) -> Any:
        """`attention` of `query` (B, H, M, D), the same on all ranks, to all tokens of the cache.

        Parameters
        ----------
        query : array (B, H, M, D)
        {options}

        Notes
        -----
        Mask and bias have the columns of all tokens.  `out`, `return_lse` and `threads` may differ from rank to rank.
        The result is the same on all ranks, to the bit.  As in `sdpa.KVCache.attend`, the results of rows past the
        lengths of the last append have no meaning.
        """
        if self._group.size == 1:
            return self._local.attend(query, **options)
        question, failure = attempt(Question, self, query, options)
        voted(self._group, 0 if question is None else question.digest, lambda: question.said(), failure)
        _, failure = attempt(question.ask)
        out, lse, failed = question.parts.join(failure)
        if failed:
            settle(self._group, dict, failure)
        return question.answer(out, lse)

    def truncate(self, n):
        """Forget all but the first n tokens (an int, or one for each batch).

        With a window, only tokens of the last append can be forgotten, and all as long as the window has dropped none.
        """
        kept, failure = attempt(self._whole._fewer, n, self._lengths, self._floors)
        said = {"the function": "truncate", "lengths so far": self._lengths.tolist()}
        said |= {} if kept is None else {"n": kept[0].tolist()}
        voted(self._group, digest_of(said), lambda: said, failure)
        self._local.truncate(self._blocks.held(kept[0]))
        (self._lengths, self._floors), self._aligned = kept, None
        self._alike = bool((kept[0] == kept[0][0]).all())

    def fork(self):
        """A new cache with the same tokens, which shares their memory until one of the two appends."""
        twin = type(self).__new__(type(self))
        for name in KVCache.__slots__[1:]:
            setattr(twin, name, getattr(self, name))
        twin._local, twin._parts = self._local.fork(), None
        return twin

    # Copies are forks, and there are no pickles.
    __copy__, __deepcopy__, __reduce__ = kv.KVCache.__copy__, kv.KVCache.__deepcopy__, kv.KVCache.__reduce__

    def save(self, path):
        """Write the cache to a folder, which may be on a disk that the ranks share, or on a disk of each machine: each
        rank writes a folder `rank-0-of-2` in there, as `sdpa.KVCache.save` does."""
        number = self._group.comm.bcast(os.urandom(8).hex())
        part = dict(
            rank=self._blocks.rank, size=self._blocks.size, block=BLOCK, save=number, lengths=self._lengths.tolist(),
            floors=self._floors.tolist(), capacity=self.capacity, window=self.window, keep=self.keep,
        )  # fmt: skip

        def write():
            folder = _folder(path, self._blocks)
            folder.parent.mkdir(exist_ok=True)
            files.save(self._local._store, folder, part=part)

        _, failure = attempt(write)
        voted(self._group, 0, dict, failure)

    @classmethod
    def load(cls, comm, path, mmap=False):
        """The cache that equally many ranks saved to the folder `path`.  Each rank reads what it wrote.

        Parameters
        ----------
        comm, path
            The communicator, all of whose ranks call this, and the folder.
        mmap
            As for `sdpa.KVCache.load`.

        Notes
        -----
        If the ranks find files of different saves, because a save did not come to its end, all ranks raise a
        ValueError.
        """
        cache, group = cls.__new__(cls), join(comm)
        cache._group, cache._blocks = group, Blocks(group.rank, group.size)
        cache._threads, cache._parts = threads.count(None, group.sharing), None

        def read():
            number = None

            def take(part, *found):
                nonlocal number
                number = take_part(cache, part, *found)

            folder = _folder(path, cache._blocks)
            if not folder.exists():
                there = sorted(each.name for each in Path(path).glob("rank-*"))
                raise ValueError(
                    f"path is {str(path)!r}: it has no {folder.name}, only {', '.join(there) or 'nothing'}"
                )
            files.load(kv.KVCache, folder, mmap, take)
            return None, {"the save that is in the files": number}

        agree(group, read)
        return cache

    # ----------------------------------------------------------------------------------------------------- what it is

    @property
    def lengths(self):
        """Number of tokens of each batch, on all ranks together, (B), read-only."""
        lengths = self._lengths.view()
        lengths.flags.writeable = False
        return lengths

    @property
    def nbytes(self):
        """Bytes of the arrays of this rank, including free room."""
        return self._local.nbytes

    def __len__(self):
        return int(self._lengths.max())

    def __bool__(self):
        return True

    def __repr__(self):
        return f"<sdpa.distributed.KVCache of {len(self)} tokens, on {self._blocks.size} ranks; here {self._local}>"

    # -------------------------------------------------------------------------------------------------------- checks

    def _tokens(self, key, value, lengths):
        key, value = self._whole._new_arrays(key, value)
        added = self._whole._added(key.shape[2], lengths, self._lengths)
        return Tokens(key, value, self._lengths, added, self._alike and lengths is None)


def _folder(path, blocks):
    return Path(path) / f"rank-{blocks.rank}-of-{blocks.size}"
