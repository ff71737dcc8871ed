"""The contiguous key/value cache: what users call, and its checks."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from .._checks import float_array, float_dtype, whole_number, whole_numbers
from .._options import WORDS, CacheOptions, takes
from .attend import attend
from .files import load, save
from .store import Store, attributes, without_padding

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack


OF_CACHE = WORDS | {
    "pairs": "(B, H, M, N), N the length of the longest batch",
    "offset": "the queries are those of the last M tokens",
}
ATTEND = takes("attend", CacheOptions, OF_CACHE, causal=True)


# What a cache was made with.
MADE_WITH = ("batch", "kv_heads", "head_dim", "value_dim", "dtype", "capacity", "window", "keep", "group")


def made_with(owner):
    """The properties MADE_WITH of a class, whose instances have in `owner` what knows them."""
    for name in MADE_WITH:
        yield property(operator.attrgetter(f"{owner}.{name}"), doc=f"The argument `{name}`, or its default.")


class KVCache:
    """A contiguous key/value cache: `append` the keys and values of new tokens, `attend` to all tokens so far.

    Axes: B batch, H query heads, G key/value heads (H a multiple of G), M new tokens, D and E sizes of a key and of a
    value.  The cache holds arrays (B, G, room, D) and (B, G, room, E), which grow by doubling.  Each batch has its own
    length.  If B is 1, all arrays may come without that axis.

    Parameters
    ----------
    batch, kv_heads, head_dim
        B, G and D.
    value_dim
        E.  Default: D.
    dtype : float16, bfloat16 (of ml_dtypes), float32, float64, or int8
        Keys and values are rounded to this dtype.  Queries must not have a narrower dtype, but over int8 they may have
        any.
    capacity
        The most tokens; appending more is an error.  Default: no limit.
    window
        A query sees the last `window` tokens up to its own, as with window=(window - 1, 0) of `attention`.  Tokens that
        no query will see are dropped: `keep + window` tokens stay, and the last chunk if it had more than one.
    keep
        How many tokens from the start all later queries see in spite of the window. (Streaming models call these tokens
        attention sinks.  The option `sinks` of `attend` is something else: logits without a token.)
    group
        Each run of `group` neighbouring numbers of a key or value shares one float32 scale.  `group` is a power of 2
        from 32 on, and only int8 uses it.  A number takes 1 + 4 / group bytes; docs/how_to/caches.md prints the error
        for each.

    Notes
    -----
    `len(cache)` is the length of the longest batch.  Several threads may use a cache as long as none of them changes
    it.  Forks are independent of one another.

    Examples
    --------
    >>> import numpy as np, sdpa
    >>> rng = np.random.default_rng(0)
    >>> query = rng.standard_normal((1, 8, 10, 64), np.float32)
    >>> key, value = rng.standard_normal((2, 1, 2, 10, 64), np.float32)
    >>> cache = sdpa.KVCache(1, 2, 64)
    >>> cache.append(key[:, :, :9], value[:, :, :9])    # the prompt
    >>> prompt = cache.attend(query[:, :, :9])
    >>> cache.append(key[:, :, 9:], value[:, :, 9:])    # one token more
    >>> out = cache.attend(query[:, :, 9:])
    >>> whole = sdpa.attention(query, key, value, causal=True)
    >>> bool(abs(out - whole[:, :, 9:]).max() < 1e-6)
    True
    >>> cache
    <sdpa.KVCache (1, 2, 10, 64) float32, room for 64, 65,536 bytes>
    """

    __slots__ = ("__weakref__", "_store")

    batch, kv_heads, head_dim, value_dim, dtype, capacity, window, keep, group = made_with("_store")

    def __init__(
        self, batch, kv_heads, head_dim, *, value_dim=None, dtype=np.float32, capacity=None, window=None, keep=0,
        group=32,
    ):  # fmt: skip
        batch, kv_heads = whole_number("batch", batch), whole_number("kv_heads", kv_heads)
        head_dim = whole_number("head_dim", head_dim)
        value_dim = head_dim if value_dim is None else whole_number("value_dim", value_dim)
        dtype = float_dtype(dtype, "int8")
        capacity = None if capacity is None else whole_number("capacity", capacity, least=0)
        window = None if window is None else whole_number("window", window)
        keep = whole_number("keep", keep, least=0)
        group = whole_number("group", group, least=32)
        if group & (group - 1):
            raise ValueError(f"group is {group}: it must be a power of 2")
        if keep and window is None:
            raise ValueError(f"keep is {keep} and window None: without a window every token is kept, keep must be 0")
        self._store = Store(batch, kv_heads, head_dim, value_dim, dtype, capacity, window, keep, group)

    # ------------------------------------------------------------------------------------------------ what users call

    def append(self, key, value, lengths=None):
        """Add the keys (B, G, M, D) and values (B, G, M, E) of M new tokens.

        Parameters
        ----------
        key, value : array (B, G, M, D), array (B, G, M, E)
            The keys and values of the new tokens, in their order.
        lengths : (B), int
            Only the first lengths[b] tokens of batch b count; the others may hold anything.

        Notes
        -----
        Keys and values may have any float dtype.  They are rounded to the dtype of the cache, ties to even, and numbers
        that are too large for that dtype become infinite.  With int8, NaN and inf are an error.  An error or an
        interrupt leaves the cache as it was.

        Examples
        --------
        >>> import numpy as np, sdpa
        >>> cache = sdpa.KVCache(2, 1, 4)
        >>> cache.append(np.ones((2, 1, 3, 4)), np.ones((2, 1, 3, 4)), lengths=[3, 1])
        >>> cache.lengths
        array([3, 1])
        """
        if lengths is None and self._store.append_few(key, value):
            return
        key, value = self._new_arrays(key, value)  # before anything is allocated that has the size of the batch
        before, floors = self._store.state()
        count = key.shape[2]
        added = self._added(count, lengths, before)
        ragged = not (added == count).all()
        if ragged:
            key, value = without_padding(key, added), without_padding(value, added)
        self._store.write(key, value, before, floors, added, (count, before) if ragged else None)

    @ATTEND
    def attend(self, query: ArrayLike, **options: Unpack[CacheOptions]) -> Any:
        """`attention` of `query` (B, H, M, D) to all tokens of the cache.

        Parameters
        ----------
        query : array (B, H, M, D)
        {options}

        Notes
        -----
        After an append of M rows with `lengths`, the default of `q_offset` gives each query the position of its row;
        the results of rows past the length have no meaning.

        If the cache has a window, attention is always causal, and the option `window` bounds it further.  A query that
        would see a dropped token is an error, so attend to each chunk right after appending it.

        Examples
        --------
        >>> import numpy as np, sdpa
        >>> cache = sdpa.KVCache(1, 1, 2, window=2, keep=1)
        >>> value = np.arange(5.0).repeat(2).reshape(1, 1, 5, 2)
        >>> cache.append(0 * value, value)
        >>> cache.attend(np.ones((1, 1, 1, 2)))[0, 0]       # sees the tokens 0, 3 and 4
        array([[2.33333333, 2.33333333]])
        """
        return attend(self._store, query, options, ATTEND)

    def truncate(self, n):
        """Forget all but the first n tokens (an int, or one for each batch), such as guesses that turned out wrong.

        With a window, dropped tokens do not come back, so that only the tokens of the last append can always be
        forgotten.

        >>> import numpy as np, sdpa
        >>> cache = sdpa.KVCache(1, 1, 4)
        >>> cache.append(np.ones((1, 1, 9, 4)), np.ones((1, 1, 9, 4)))
        >>> cache.truncate(len(cache) - 2)
        >>> len(cache)
        7
        """
        lengths, floors = self._store.state()
        numbers, floors = self._fewer(n, lengths, floors)
        self._store.forget(numbers, floors)

    def fork(self):
        """A new cache with the same tokens.  From then on both caches change independently.

        They share their memory until one of them appends: that cache copies the memory first.

        >>> import numpy as np, sdpa
        >>> prompt = sdpa.KVCache(1, 1, 4)
        >>> prompt.append(np.ones((1, 1, 9, 4)), np.ones((1, 1, 9, 4)))
        >>> answers = [prompt.fork() for _ in range(3)]
        >>> np.shares_memory(answers[0].keys, answers[1].keys)
        True
        """
        twin = type(self).__new__(type(self))
        for name, attribute in attributes(self):
            setattr(twin, name, attribute)
        twin._store = self._store.fork()
        return twin

    def __copy__(self):
        return self.fork()

    def __deepcopy__(self, memo):
        return self.fork()

    def __reduce__(self):
        raise TypeError("a KVCache cannot be pickled: use its methods save and load")

    @property
    def keys(self):
        """Keys (B, G, N, D), read-only, N the length of the longest batch.  In a shorter batch, rows past its length
        have no meaning.  With a window, these are the first `keep` and the last `window` keys.

        This is a view, or with a window maybe a copy.  Appending does not change what the view shows, unless `truncate`
        or the window gave up the place of those keys.  With int8 the keys are integers: see `key_scales`.
        """
        return self._store.readable(self._store.keys.numbers)

    @property
    def values(self):
        """Values (B, G, N, E): a view like `keys`."""
        return self._store.readable(self._store.values.numbers)

    @property
    def key_scales(self):
        """Scales (B, G, N, groups) of an int8 cache, else None.

        Number d of a key is keys[..., d] * key_scales[..., d // group].
        """
        return self._store.readable(self._store.keys.scales)

    @property
    def value_scales(self):
        """Scales of the values, like `key_scales`."""
        return self._store.readable(self._store.values.scales)

    @property
    def lengths(self):
        """Number of tokens of each batch, (B), read-only."""
        lengths = self._store.state()[0].view()
        lengths.flags.writeable = False
        return lengths

    @property
    def nbytes(self):
        """Bytes of the arrays, including free room.  Memory that forks share counts for each of them."""
        return self._store.nbytes

    def __len__(self):
        return len(self._store)

    def __bool__(self):
        return True  # "if cache" asks whether there is one

    def __repr__(self):
        size = str(self.head_dim) if self.value_dim == self.head_dim else f"{self.head_dim} and {self.value_dim}"
        parts = [f"({self.batch}, {self.kv_heads}, {len(self)}, {size}) {self.dtype.name}"]
        if self._store.ragged:
            parts.append(f"lengths {_said(self.lengths)}")
        if self.window is not None:
            parts.append(f"window {self.window}" + (f" and the first {self.keep}" if self.keep else ""))
        if self.capacity is not None:
            parts.append(f"capacity {self.capacity}")
        parts += [f"room for {self._store.room}", f"{self.nbytes:,} bytes"]
        return f"<sdpa.KVCache {', '.join(parts)}>"

    def save(self, path):
        """Write the cache to a folder: .npy files that can be mapped into memory, and cache.json.

        The save replaces an older cache in that folder in one step.  A process that loads meanwhile gets either the old
        or the new cache, whole.  If several processes save at the same time, one of them wins.  A save that is killed
        leaves the older cache in place, and a hidden folder beside it, which the next save removes.  Anything but a
        saved cache at that path is an error.  bfloat16 is written as uint16.

        >>> import numpy as np, sdpa, tempfile
        >>> cache = sdpa.KVCache(1, 1, 4)
        >>> cache.append(np.ones((1, 1, 9, 4)), np.ones((1, 1, 9, 4)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache.save(folder + "/prompt")
        ...     again = sdpa.KVCache.load(folder + "/prompt")
        >>> bool((again.keys == cache.keys).all())
        True
        """
        save(self._store, path)

    @classmethod
    def load(cls, path, mmap=False):
        """The cache that was saved to the folder `path`.

        Parameters
        ----------
        path : str or path
            The folder.
        mmap
            Map the files into memory instead of reading them.  Pages are then read when they are needed, and shared by
            all processes that map them.  The first append copies the arrays; until then the files must not change.  If
            another program shortens one of them, the system ends this process where it reads past the end (SIGBUS).  A
            save to the same path is no such change, as it writes new files.

        Notes
        -----
        A file that `save` could not have written raises a ValueError, which names the file and the reason.  Loading
        takes no more memory than the files have.
        """
        return load(cls, path, mmap)

    # -------------------------------------------------------------------------------------------------------- checks

    def _new_arrays(self, key, value):
        """Keys and values to be appended, with four axes."""
        key, value = self._new_rows("key", key, self.head_dim), self._new_rows("value", value, self.value_dim)
        count = key.shape[2]
        if value.shape[2] != count:
            raise ValueError(f"key has {count} new tokens and value {value.shape[2]}: they must be as many")
        return key, value

    def _added(self, count, lengths, before):
        """How many of `count` tokens are appended to each batch, which has `before` tokens."""
        added = np.full(self.batch, count, np.int64) if lengths is None else self._new_lengths(lengths, count)
        if self.capacity is not None and (before + added).max() > self.capacity:
            raise ValueError(
                f"capacity is {self.capacity} and lengths are {_said(before)}: {_said(added)} more cannot be appended"
            )
        return added

    def _new_rows(self, name, given, dim):
        """`given` with four axes."""
        array = float_array(name, given)
        missing = 4 - array.ndim
        wanted = (self.batch, self.kv_heads, array.shape[-2], dim)
        if missing < 0 or array.shape != wanted[missing:] or wanted[:missing] != (1,) * missing:
            raise ValueError(
                f"{name} has shape {array.shape}: it must be ({self.batch}, {self.kv_heads}, new tokens, {dim})"
                + (", or that without the first axis" if self.batch == 1 else "")
            )
        return array[(None,) * missing]

    def _fewer(self, n, lengths, floors):
        """The lengths and floors that remain of the given ones after `truncate`."""
        numbers = whole_numbers("n", n, (self.batch,))
        if (numbers < 0).any() or (numbers > lengths).any():
            raise ValueError(f"n is {_said(n)}: it must be from 0 to the length, {_said(lengths)}")
        if self.window is not None:
            floors = np.where(numbers <= self.keep, 0, floors)
            missing = (numbers < lengths) & (floors > np.maximum(self.keep, numbers - self.window + 1))
            if missing.any():
                least = (floors + self.window - 1)[missing].max()
                raise ValueError(
                    f"n is {_said(n)}: the next token would see some that the window of {self.window} has dropped; "
                    f"it must be {least} or more"
                )
        return numbers, floors

    def _new_lengths(self, given, count):
        lengths = whole_numbers("lengths", given, (self.batch,))
        if (lengths < 0).any() or (lengths > count).any():
            raise ValueError(f"lengths are {_said(given)}: they must be from 0 to the {count} tokens given")
        return lengths


def _said(numbers):
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


# What a layer needs to take an append back, if what follows it fails.


def next_position(cache):
    """The position of the next token: an int, or (B) where batches differ."""
    return cache._store.next_position()


def snapshot(cache, count):
    return cache._store.snapshot(count)


def restore(cache, kept):
    cache._store.restore(kept)


# What an adapter of another library needs.


def tokens(cache, name, begin, end):
    """The "keys" or "values" of the tokens from position `begin` up to `end`, as floats; a view where possible."""
    _, floors = cache._store.state()
    if end > len(cache) or (begin < floors).any():
        raise RuntimeError(
            f"the {name} of the tokens {begin} to {end - 1} are not in the cache any more, which holds "
            f"{floors.max()} to {len(cache) - 1}: use them before the next ones are appended"
        )
    return cache._store.between(getattr(cache._store, name), begin, end)


def select(cache, batches):
    """A new cache of the given batches, in their order.  A batch may be given several times."""
    twin = type(cache).__new__(type(cache))
    twin._store = cache._store.select(batches)
    return twin
