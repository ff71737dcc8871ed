"""Caches as files: `python tests/cache/saved/make.py` writes one of each kind into a folder of the present version.

The files are committed with the release, and are never written again: later versions must load them.
"""

from pathlib import Path

import ml_dtypes
import numpy as np

import sdpa

CACHES = {
    "float32": dict(),
    "bfloat16": dict(dtype=ml_dtypes.bfloat16),
    "int8": dict(dtype=np.int8),
    "window": dict(window=3, keep=1),
    "ragged": dict(batch=2),
}


def made(name):
    """The cache of that name: 7 tokens in two chunks, of numbers that each dtype holds exactly."""
    options = dict(batch=1) | CACHES[name]
    batch = options.pop("batch")
    cache = sdpa.KVCache(batch, 1, 4, **options)
    tokens = np.arange(2 * batch * 7 * 4, dtype=np.float32).reshape(2, batch, 1, 7, 4) % 64 - 32
    cache.append(*tokens[:, :, :, :5])
    cache.append(*tokens[:, :, :, 5:], [2, 1][:batch] if name == "ragged" else None)
    return cache


if __name__ == "__main__":
    version = ".".join(sdpa.__version__.split(".")[:2])
    for name in CACHES:
        folder = Path(__file__).parent / version / name
        folder.parent.mkdir(exist_ok=True)
        made(name).save(folder)
