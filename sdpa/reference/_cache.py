"""Keys and values of what was read so far."""

import numpy as np

from ._arrays import cast
from ._attention import attention


class KVCache:
    """A cache that keeps all keys (B, G, N, D) and values (B, G, N, E).  The arguments are those of sdpa.KVCache.

    >>> import numpy as np
    >>> cache = KVCache(1, 1, 2)
    >>> value = np.arange(4.0).repeat(2).reshape(1, 1, 4, 2)
    >>> cache.append(0 * value, value)
    >>> cache.attend(np.zeros((1, 1, 1, 2)))
    array([[[[1.5, 1.5]]]])
    """

    def __init__(
        self, batch, kv_heads, head_dim, *, value_dim=None, dtype=None, capacity=None, window=None, keep=0, group=32
    ):
        if np.dtype(dtype) == np.int8:
            raise TypeError("dtype is int8: in the oracle it must be a float type")
        value_dim = head_dim if value_dim is None else value_dim
        self.keys, self.values = (cast(np.zeros((batch, kv_heads, 0, dim)), dtype) for dim in (head_dim, value_dim))
        self.dtype, self.window, self.keep = dtype, window, keep
        self.lengths, self.rows = np.zeros(batch, np.int64), None

    def append(self, key, value, lengths=None):
        """Add M tokens to each batch; with `lengths` (B) the first lengths[b] of them."""
        batch, _, count, _ = key.shape
        added = np.full(batch, count) if lengths is None else np.asarray(lengths)
        self.rows = count, self.lengths
        after = self.lengths + added
        room = [(0, 0), (0, 0), (0, max(0, after.max() - self.keys.shape[2])), (0, 0)]
        self.keys, self.values = np.pad(self.keys, room), np.pad(self.values, room)
        for b, (begin, end) in enumerate(zip(self.lengths, after)):
            self.keys[b, :, begin:end] = cast(key[b, :, : end - begin], self.dtype)
            self.values[b, :, begin:end] = cast(value[b, :, : end - begin], self.dtype)
        self.lengths = after

    def attend(self, query, *, causal=True, q_offset=None, window=None, mask=None, threads=None, dtype=None, **options):
        """Attention of `query` (B, H, M, D) to all tokens in the cache, as sdpa.KVCache computes it."""
        count = query.shape[2]
        if q_offset is None:
            rows, before = self.rows
            q_offset = before if rows == count else self.lengths - count
        if self.window is not None:
            place = np.reshape(q_offset, (-1, 1, 1, 1)) + np.arange(count)[:, None]
            key = np.arange(self.keys.shape[2])
            seen = (key > place - self.window) | (key < self.keep)
            mask, causal = seen if mask is None else seen & mask, True
        return attention(
            query, self.keys, self.values, causal=causal, q_offset=q_offset, window=window, mask=mask,
            kv_lengths=self.lengths, dtype=dtype, **options,
        )  # fmt: skip

    def truncate(self, n):
        """Forget all but the first n tokens, an int or (B)."""
        self.lengths = np.broadcast_to(n, self.lengths.shape).copy()

    def __len__(self):
        return int(self.lengths.max())
