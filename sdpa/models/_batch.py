"""Sequences of tokens of different lengths, without their padding."""

import numpy as np

from .._checks import plain_array, whole_numbers


class Batch:
    """Tokens in some of the places of (B, S).  Arrays with a row for each token are packed, (T, ...): the rows of one
    sequence follow those of the sequence before, without padding.

    given : ids (B, S), (S,), or a list of sequences of any lengths.    words : ids are below this number.
    """

    def __init__(self, given, words, lengths=None, mask=None):
        ids = given
        if isinstance(given, (list, tuple)) and any(np.ndim(row) == 1 for row in given):
            rows = [plain_array("ids", row if np.size(row) else np.zeros(0, np.int64)) for row in given]
            lengths = [row.size for row in rows] if lengths is None else lengths
            ids = [np.pad(row, (0, max(map(len, rows)) - len(row))) for row in rows]
        ids = plain_array("ids", ids)
        self.batched = ids.ndim == 2
        if ids.dtype.kind not in "iu" and ids.size:
            raise TypeError(f"ids have dtype {ids.dtype}: they must be whole numbers")
        if ids.ndim not in (1, 2):
            raise ValueError(f"ids have shape {ids.shape}: they must be (B, S), (S,), or a list of sequences")
        if ids.size and not 0 <= ids.min() <= ids.max() < words:
            raise ValueError(f"ids are from {ids.min()} to {ids.max()}: they must be from 0 to below the {words} words")
        self.ids = np.atleast_2d(ids).astype(np.int64)
        self.mask = None  # where there are tokens, if not everywhere
        if lengths is not None:
            counts = whole_numbers("lengths", lengths, self.ids.shape[:1])
            if ((counts < 0) | (counts > self.ids.shape[1])).any():
                raise ValueError(f"lengths are {lengths}: they must be from 0 to the {self.ids.shape[1]} places of ids")
            self.mask = np.arange(self.ids.shape[1]) < counts[:, None]
        if mask is not None:
            mask = np.atleast_2d(plain_array("mask", mask))
            if mask.dtype != np.bool_:
                raise TypeError(f"mask has dtype {mask.dtype}: it must be boolean, True where there is a token")
            if mask.shape != self.ids.shape:
                raise ValueError(f"mask has shape {mask.shape}: it must be that of ids, {self.ids.shape}")
            self.mask = mask if self.mask is None else mask & self.mask
        if self.mask is not None and self.mask.all():
            self.mask = None
        self.counts = np.full(len(self.ids), self.ids.shape[1]) if self.mask is None else self.mask.sum(axis=1)
        self.ends = np.concatenate([[0], np.cumsum(self.counts)])  # where sequences end, packed

    def part(self, *place):
        """The batch of some sequences, or of some places of all sequences."""
        mask = np.ones(self.ids.shape, bool) if self.mask is None else self.mask
        return Batch(self.ids[place], np.inf, mask=mask[place])

    def packed(self, array):
        """(B, S, ...) to (T, ...)"""
        return array.reshape(-1, *array.shape[2:]) if self.mask is None else array[self.mask]

    def spread(self, packed):
        """(T, ...) to (B, S, ...), with zeros where there is no token."""
        if self.mask is None:
            return packed.reshape(*self.ids.shape, *packed.shape[1:])
        array = np.zeros((*self.ids.shape, *packed.shape[1:]), packed.dtype)
        array[self.mask] = packed
        return array

    def result(self, packed):
        """As `spread` gives it, without the axis B if the ids had none."""
        array = self.spread(packed)
        return array if self.batched else array[0]
