"""Edges of what a row may see."""

import numpy as np

from support.draw import inf

BLIND = {  # no row sees a key, of 133
    "mask": dict(mask=np.zeros((), bool)),
    "mask of all pairs": dict(mask=np.zeros((2, 4, 37, 133), bool)),
    "bias": dict(bias=np.full((37, 133), -inf, np.float32)),
    "lengths": dict(kv_lengths=np.array([0, 0])),
    "causal": dict(causal=True, q_offset=-37),
    "window before": dict(window=(None, -140), q_offset=0),
    "window behind": dict(window=(-140, None), q_offset=0),
    "empty window": dict(window=(0, -1)),
    "mask and length": dict(mask=np.arange(133) >= 50, kv_lengths=50),
    "mask and causal": dict(mask=np.arange(133) >= 37, causal=True, q_offset=0),
    "bias and window": dict(bias=np.where(np.arange(133) < 60, -inf, 1.0), window=(2, 2), q_offset=5),
}


ROW, COLUMN = np.arange(37)[:, None], np.arange(133)
HIDDEN = {
    "mask of keys": (dict(mask=COLUMN % 5 > 1), (COLUMN % 5 <= 1) & (ROW >= 0)),
    "mask": (dict(mask=(ROW + COLUMN) % 3 > 0), (ROW + COLUMN) % 3 == 0),
    "mask of a block": (dict(mask=COLUMN >= 128), (COLUMN < 128) & (ROW >= 0)),
    "bias": (
        dict(bias=np.where((COLUMN % 9 > 4) & ((ROW + COLUMN) % 4 > 0), 0.5, -inf)),
        (COLUMN % 9 <= 4) | ((ROW + COLUMN) % 4 == 0),
    ),
    "causal": (dict(causal=True), ROW + 96 < COLUMN),
    "causal, top left": (dict(causal=True, q_offset=0), ROW < COLUMN),
    "window": (dict(window=(20, 1)), (ROW + 76 > COLUMN) | (ROW + 97 < COLUMN)),
    "lengths": (dict(kv_lengths=100), (COLUMN >= 100) & (ROW >= 0)),
    "all together": (
        dict(mask=COLUMN != 40, causal=True, window=(50, None), kv_lengths=120, bias=np.where(COLUMN == 70, -inf, 0.0)),
        (COLUMN == 40) | (ROW + 83 < COLUMN) | (ROW + 33 > COLUMN) | (COLUMN >= 120) | (COLUMN == 70),
    ),
}
