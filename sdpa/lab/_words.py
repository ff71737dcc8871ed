"""Words as vectors, by a rule that anybody can repeat."""

import zlib

import numpy as np

RULE = (
    "The embedding of a word is a vector of normal numbers, mean 0 and variance 1, from NumPy's default generator with "
    "the CRC-32 of the word (UTF-8, as it is written) as seed: a word has the same vector everywhere, and different "
    "words have independent ones.  There are no positions.  The elements of the weight matrices are normal with "
    "variance 1 / width, so that queries and keys have variance 1 as well.  Nothing here was trained."
)


def embed(words, width):
    """(words, width), float32."""
    seeds = [zlib.crc32(word.encode()) for word in words]
    return np.stack([np.random.default_rng(seed).standard_normal(width, np.float32) for seed in seeds])


def draw_matrix(random, rows, columns):
    """One that keeps the variance of what it is multiplied with, (rows, columns), float32."""
    return random.standard_normal((rows, columns), np.float32) * np.float32(rows**-0.5)
