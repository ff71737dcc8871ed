"""Arrays to draw, and the dtypes that tests run with."""

import numpy as np
from ml_dtypes import bfloat16

inf, nan = np.inf, np.nan
float16, float32, float64 = np.float16, np.float32, np.float64


# A dtype, or that of query and that of key and value.
WIDE = {"float32": float32, "float64": float64}
HALF = {"float16": float16, "bfloat16": bfloat16}
MIXED = {
    "float64 over float32": (float64, float32),
    "float64 over float16": (float64, float16),
    "float64 over bfloat16": (float64, bfloat16),
    "float32 over float16": (float32, float16),
    "float32 over bfloat16": (float32, bfloat16),
}
DTYPES = WIDE | HALF | MIXED


def draw(B=2, H=4, G=2, M=37, N=133, D=20, E=12, dtype=float32, seed=0):
    """Query, key and value with normal elements, of one dtype or of (query's, key's and value's)."""
    normal = np.random.default_rng(seed).standard_normal
    query, others = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    shapes = ((B, H, M, D), query), ((B, G, N, D), others), ((B, G, N, E), others)
    return [normal(shape).astype(of) for shape, of in shapes]


def rng(seed):
    return np.random.default_rng(seed)
